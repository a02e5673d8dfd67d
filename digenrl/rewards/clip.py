"""The rewards ``clip_score`` and ``pickscore``: how near an image and its prompt are in the space of a CLIP model.

With image and text embeddings i and t of length 1: clip_score = 100 * max(i.t, 0) (CLIPScore, arXiv 2104.08718, which writes
2.5 where percent are customary), pickscore = exp(logit_scale) * i.t (arXiv 2305.01569; about 20 to 24, often divided by 26).

Images are resized (bicubic, shorter side), cut to a square at the centre and normalized as the model's preprocessor_config.json
says. Invariant: a score does not depend on which other samples are scored beside it; passes have one shape.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from torch import Tensor

from digenrl.config.settings.clip import ClipSettings, PickScoreSettings
from digenrl.diffusion.batching import row_batches
from digenrl.errors import ConfigError
from digenrl.ids import SampleId
from digenrl.rewards.base import RewardSample

_CONFIG = "preprocessor_config.json"


class ClipScoreReward:
    """100 times the cosine of image and prompt, and 0 where it is negative."""

    Settings = ClipSettings

    def __init__(self, settings: ClipSettings) -> None:
        """Raises ConfigError where the weights are not there."""
        self._clip = Clip(settings)
        self._tests = settings.self_test

    def score(self, samples: Sequence[RewardSample]) -> Mapping[SampleId, float]:
        """One number for each image."""
        cosines = self._clip.cosines([s.image for s in samples], [s.prompt for s in samples])
        return {sample.id: 100 * max(cosine, 0.0) for sample, cosine in zip(samples, cosines, strict=True)}

    def self_test(self) -> tuple[Sequence[RewardSample], Sequence[RewardSample]] | None:
        """A drawn circle must beat noise."""
        return _circle_and_noise() if self._tests else None

    def to_device(self) -> None:
        """See Reward."""
        self._clip.to_device()

    def to_cpu(self) -> None:
        """See Reward."""
        self._clip.to_cpu()


class PickScoreReward:
    """What people would pick, in the units of the paper."""

    Settings = PickScoreSettings

    def __init__(self, settings: PickScoreSettings) -> None:
        """Raises ConfigError where the weights are not there."""
        self._clip = Clip(settings)
        self._tests = settings.self_test

    def score(self, samples: Sequence[RewardSample]) -> Mapping[SampleId, float]:
        """One number for each image."""
        cosines = self._clip.cosines([s.image for s in samples], [s.prompt for s in samples])
        return {sample.id: self._clip.scale * cosine for sample, cosine in zip(samples, cosines, strict=True)}

    def self_test(self) -> tuple[Sequence[RewardSample], Sequence[RewardSample]] | None:
        """A drawn circle must beat noise."""
        return _circle_and_noise() if self._tests else None

    def to_device(self) -> None:
        """See Reward."""
        self._clip.to_device()

    def to_cpu(self) -> None:
        """See Reward."""
        self._clip.to_cpu()


class Clip:
    """A CLIP model with its tokenizer, in float32."""

    def __init__(self, settings: ClipSettings) -> None:
        from transformers import AutoTokenizer, CLIPModel

        device = settings.device
        self._device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
        self._size = settings.forward_batch_size
        beside = settings.tokenizer_path or settings.path
        try:
            # Never the .bin of an old repository, which is a pickle.
            model = CLIPModel.from_pretrained(settings.path, use_safetensors=True, dtype=torch.float32)
            self._tokenizer: Any = AutoTokenizer.from_pretrained(beside)
            self._preparation = Preparation.from_json(_config_file(beside).read_text(encoding="utf-8"))
        except Exception as error:  # the hub's client, tokenizers and safetensors each raise classes of their own
            raise ConfigError(
                f"The CLIP model {settings.path!r} (tokenizer: {beside!r}) cannot be loaded: {type(error).__name__}: {error}",
                why="It needs config.json, model.safetensors, a tokenizer and preprocessor_config.json; a hub id, a network.",
                fix=f"Fetch it where there is a network (hf download {settings.path} --local-dir FOLDER), and set path=FOLDER"
                f"{f' and tokenizer_path to a folder with {beside}' if beside != settings.path else ''}.",
            ) from error
        self._model: Any = model.eval().requires_grad_(False).to(self._device)
        self.scale = float(model.logit_scale.detach().exp())
        """exp(logit_scale)."""

    def to_device(self) -> None:
        """Bring the network to where it runs."""
        self._model.to(self._device)

    def to_cpu(self) -> None:
        """Take the network away from there, and give its memory back."""
        self._model.to("cpu")
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.no_grad()
    def cosines(self, images: Sequence[NDArray[np.uint8]], prompts: Sequence[str]) -> list[float]:
        """Of each image [H, W, 3] and its prompt."""
        found: list[Tensor] = []
        for batch in row_batches(len(images), self._size):
            rows = batch.rows.tolist()
            pixels = torch.stack([self._preparation.pixels(images[row]) for row in rows])
            text = self._tokenizer(
                [prompts[row] for row in rows],
                padding="max_length",
                truncation=True,
                max_length=self._model.config.text_config.max_position_embeddings,
                return_tensors="pt",
            )
            seen = self._model.visual_projection(self._model.vision_model(pixel_values=pixels.to(self._device)).pooler_output)
            read = self._model.text_model(
                input_ids=text["input_ids"].to(self._device), attention_mask=text["attention_mask"].to(self._device)
            ).pooler_output
            read = self._model.text_projection(read)
            found.append(torch.nn.functional.cosine_similarity(seen, read)[: batch.count].double().cpu())
        return torch.cat(found).tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """How pixels become the network's input."""

    shorter_side: int
    crop: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    @classmethod
    def from_json(cls, text: str) -> Preparation:
        """From a preprocessor_config.json. Raises KeyError or ValueError for one that is not CLIP's."""
        plain = json.loads(text)
        size, crop = plain["size"], plain["crop_size"]
        return cls(
            shorter_side=int(size["shortest_edge"] if isinstance(size, dict) else size),
            crop=int(crop["height"] if isinstance(crop, dict) else crop),
            mean=tuple(plain["image_mean"]),
            std=tuple(plain["image_std"]),
        )

    def pixels(self, image: NDArray[np.uint8]) -> Tensor:
        """An image [H, W, 3] as [3, crop, crop] float32."""
        height, width = image.shape[:2]
        shorter, longer = min(height, width), max(height, width)
        long_side = int(self.shorter_side * longer / shorter)
        size = (self.shorter_side, long_side) if width <= height else (long_side, self.shorter_side)
        resized = np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BICUBIC))
        top, left = ((side - self.crop) // 2 for side in resized.shape[:2])
        cut = resized[top : top + self.crop, left : left + self.crop].astype(np.float32) / 255
        normal = (cut - np.array(self.mean, dtype=np.float32)) / np.array(self.std, dtype=np.float32)
        return torch.from_numpy(normal).permute(2, 0, 1)


def _config_file(path: str) -> Path:
    local = Path(path).expanduser()
    if local.is_dir():
        return local / _CONFIG
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(path, _CONFIG))


def _circle_and_noise() -> tuple[Sequence[RewardSample], Sequence[RewardSample]]:
    page = Image.new("RGB", (256, 256), "white")
    ImageDraw.Draw(page).ellipse((64, 64, 192, 192), fill="red")
    noise = np.random.default_rng(0).integers(0, 256, size=(256, 256, 3), dtype=np.uint8)
    good, bad = (
        RewardSample(id=SampleId(0, 0, n), prompt="a red circle on a white background", metadata={}, image=image)
        for n, image in enumerate((np.array(page), noise))
    )
    return [good], [bad]
