"""The rewards ``clip_score`` and ``pickscore``: how near an image and its prompt are in the space of a CLIP model.

With image and text embeddings i and t of length 1: clip_score = 100 * max(i.t, 0) (CLIPScore, arXiv 2104.08718, which writes
2.5 where percent are customary), pickscore = exp(logit_scale) * i.t (arXiv 2305.01569; about 20 to 24, often divided by 26).

Images are resized (bicubic, shorter side), cut to a square at the centre and normalized as the model's preprocessor_config.json
says. Invariant: a score does not depend on which other samples are scored beside it; passes have one shape.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from digenrl.config.settings.clip import ClipSettings, PickScoreSettings
from digenrl.config.settings.neural import NeuralSettings
from digenrl.diffusion.batching import row_batches
from digenrl.ids import SampleId
from digenrl.rewards.base import RewardSample
from digenrl.rewards.neural import device_of, reading
from digenrl.rewards.self_test import GoodAndBad, circle_and_noise

_CONFIG = "preprocessor_config.json"
Pixels = Callable[[NDArray[np.uint8]], Tensor]
"""An image [H, W, 3] as a network's input, [3, side, side] float32."""


class ClipScoreReward:
    """100 times the cosine of image and prompt, and 0 where it is negative."""

    Settings = ClipSettings

    def __init__(self, settings: ClipSettings) -> None:
        """Raises ConfigError where the weights are not there."""
        self._clip = Clip.load(settings.path, settings.tokenizer_path, settings)
        self._tests = settings.self_test

    def score(self, samples: Sequence[RewardSample]) -> Mapping[SampleId, float]:
        """One number for each image."""
        return {sample.id: 100 * max(cosine, 0.0) for sample, cosine in zip(samples, self._clip.cosines(samples), strict=True)}

    def self_test(self) -> GoodAndBad | None:
        """A drawn circle must beat noise."""
        return circle_and_noise() if self._tests else None

    def to(self, device: torch.device | str) -> None:
        """Move the network."""
        self._clip.to(device)


class PickScoreReward:
    """What people would pick, in the units of the paper."""

    Settings = PickScoreSettings

    def __init__(self, settings: PickScoreSettings) -> None:
        """Raises ConfigError where the weights are not there."""
        self._clip = Clip.load(settings.path, settings.tokenizer_path, settings)
        self._tests = settings.self_test

    def score(self, samples: Sequence[RewardSample]) -> Mapping[SampleId, float]:
        """One number for each image."""
        cosines = self._clip.cosines(samples)
        return {sample.id: self._clip.scale * cosine for sample, cosine in zip(samples, cosines, strict=True)}

    def self_test(self) -> GoodAndBad | None:
        """A drawn circle must beat noise."""
        return circle_and_noise() if self._tests else None

    def to(self, device: torch.device | str) -> None:
        """Move the network."""
        self._clip.to(device)


class Clip:
    """A CLIP model with its tokenizer, in float32."""

    def __init__(self, model: Any, tokenizer: Any, pixels: Pixels, settings: NeuralSettings) -> None:
        """model: transformers' CLIPModel. tokenizer: None where only images are embedded."""
        self._model = model.eval().requires_grad_(False)
        self._tokenizer = tokenizer
        self._pixels = pixels
        self._size = settings.forward_batch_size
        self.to(device_of(settings.device))

    @classmethod
    def load(cls, path: str, beside: str | None, settings: NeuralSettings) -> Clip:
        """From a folder or the hub. beside: where tokenizer and preprocessor_config.json are, if not there too."""
        from transformers import AutoTokenizer, CLIPModel

        beside = beside or path
        with reading(
            f"The CLIP model {path!r} (tokenizer: {beside!r})",
            needs="It needs config.json, model.safetensors, a tokenizer and preprocessor_config.json; a hub id, a network.",
            fix=f"Fetch it where there is a network (hf download {path} --local-dir FOLDER), and set path=FOLDER"
            f"{f' and tokenizer_path to a folder with {beside}' if beside != path else ''}.",
        ):
            # Never the .bin of an old repository, which is a pickle.
            model = CLIPModel.from_pretrained(path, use_safetensors=True, dtype=torch.float32)
            tokenizer = AutoTokenizer.from_pretrained(beside)
            preparation = Preparation.from_json(_config_file(beside).read_text(encoding="utf-8"))
        return cls(model, tokenizer, preparation.pixels, settings)

    @property
    def scale(self) -> float:
        """exp(logit_scale)."""
        return float(self._model.logit_scale.exp())

    @property
    def width(self) -> int:
        """Length of an embedding."""
        return int(self._model.config.projection_dim)

    def to(self, device: torch.device | str) -> None:
        """Move the network; it is asked where it is."""
        self._device = torch.device(device)
        self._model.to(self._device)

    def cosines(self, samples: Sequence[RewardSample]) -> list[float]:
        """Of each image and its prompt."""
        images = self.image_embeddings([sample.image for sample in samples])
        return (images * self.text_embeddings([sample.prompt for sample in samples])).sum(-1).double().tolist()

    @torch.no_grad()
    def image_embeddings(self, images: Sequence[NDArray[np.uint8]]) -> Tensor:
        """[B, width] of length 1, for B images [H, W, 3], on the CPU."""
        found: list[Tensor] = []
        for batch in row_batches(len(images), self._size):
            pixels = torch.stack([self._pixels(images[row]) for row in batch.rows.tolist()]).to(self._device)
            seen = self._model.visual_projection(self._model.vision_model(pixel_values=pixels).pooler_output)
            found.append(torch.nn.functional.normalize(seen, dim=-1)[: batch.count].cpu())
        return torch.cat(found)

    @torch.no_grad()
    def text_embeddings(self, prompts: Sequence[str]) -> Tensor:
        """[B, width] of length 1, for B prompts, on the CPU."""
        found: list[Tensor] = []
        for batch in row_batches(len(prompts), self._size):
            text = self._tokenizer(
                [prompts[row] for row in batch.rows.tolist()],
                padding="max_length",
                truncation=True,
                max_length=self._model.config.text_config.max_position_embeddings,
                return_tensors="pt",
            ).to(self._device)
            read = self._model.text_model(input_ids=text["input_ids"], attention_mask=text["attention_mask"]).pooler_output
            found.append(torch.nn.functional.normalize(self._model.text_projection(read), dim=-1)[: batch.count].cpu())
        return torch.cat(found)


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
