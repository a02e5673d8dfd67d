"""The reward ``video_align``: VideoReward of VideoAlign (arXiv 2501.13918), a Qwen2-VL-2B that rates videos in three ways.

It is shown frames of the video, evenly spread, and asked what it was trained with; one linear layer reads its answers at three
tokens: VQ (visual quality), MQ (motion quality), TA (alignment with the prompt). Each is standardised with mean and std of the
checkpoint's model_config.json, if it has them, as the authors do (published: VQ 3.6757 and 2.2476, MQ 1.1646 and 1.3811, TA
2.8105 and 2.5121); value = vq_weight VQ + mq_weight MQ + ta_weight TA.
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
from torch import nn

from digenrl.config.settings.qwen_rewards import VideoAlignSettings
from digenrl.ids import SampleId
from digenrl.rewards.base import RewardSample, Score
from digenrl.rewards.neural import device_of, read_tensors, reading
from digenrl.rewards.qwen_reward import PLACEHOLDER, QwenRewardNetwork, merged, read_template, reward_network
from digenrl.rewards.qwen_vl import VIDEO_MARK, QwenVlInputs, dtype_of, plain_text
from digenrl.rewards.self_test import GoodAndBad, motion_and_noise

DIMENSIONS = ("VQ", "MQ", "TA")
WORDS = tuple(f"<|{name}_reward|>" for name in DIMENSIONS)
_LEAST_PIXELS = 128 * 28 * 28
_LEAST_FRAMES, _MOST_FRAMES = 4, 768
_FILES = ("model.safetensors", "model.pth")


class VideoAlignReward:
    """How good a video looks, moves, and follows its prompt."""

    Settings = VideoAlignSettings
    media = ("video",)

    def __init__(self, settings: VideoAlignSettings) -> None:
        """Raises ConfigError where the weights, the base's files or the template are not there."""
        device = device_of(settings.device)
        self._settings = settings
        with reading(
            f"VideoReward {settings.path!r} (base: {settings.base_path!r}, template: {settings.template_path!r})",
            needs=f"It needs model_config.json and checkpoint-N with {' or '.join(_FILES)}, the JSON files of "
            f"{settings.base_path}, and the text that it was trained to be asked.",
            fix="Fetch them where there is a network (hf download KwaiVGI/VideoReward --local-dir FOLDER, and hf download "
            'Qwen/Qwen2-VL-2B-Instruct --include "*.json" "*.txt" --local-dir BASE), and set path=FOLDER and base_path=BASE; '
            "docs/rewards/video_align.md says where the text is.",
        ):
            self._template = read_template(settings.template_path, WORDS)
            folder = Path(settings.path).expanduser()
            self._made = Checkpoint.from_json((folder / "model_config.json").read_text(encoding="utf-8"))
            most = self._made.max_frame_pixels
            self._inputs = QwenVlInputs(settings.base_path, min_pixels=_LEAST_PIXELS, max_pixels=most, words=WORDS)
            tensors = self._made.merged(read_tensors(str(_newest(folder)), _FILES))
            self._network: QwenRewardNetwork = reward_network(
                tensors,
                nn.Linear(tensors["rm_head.weight"].shape[1], 1, bias=False),
                settings.base_path,
                self._inputs.tokenizer,
                words=WORDS,
                mark=VIDEO_MARK,
                dtype=dtype_of(settings.dtype, device),
            )
        self.to(device)

    def score(self, samples: Sequence[RewardSample]) -> Mapping[SampleId, Score]:
        """One score for each video, with the parts ``VQ``, ``MQ`` and ``TA``."""
        questions = [
            self._inputs.video_question(self._made.shown(sample), self._template.replace(PLACEHOLDER, plain_text(sample.prompt)))
            for sample in samples
        ]
        weights = np.array([self._settings.vq_weight, self._settings.mq_weight, self._settings.ta_weight])
        scores: dict[SampleId, Score] = {}
        for batch in self._inputs.passes(questions, self._settings.forward_batch_size):
            rows = self._network(batch.to(self._device))[..., 0].double().cpu().numpy()
            for place, row in zip(batch.places, rows, strict=False):
                standard = (row - self._made.means) / self._made.stds
                parts = dict(zip(DIMENSIONS, standard.tolist(), strict=True))
                scores[samples[place].id] = Score(value=float(weights @ standard), parts=parts)
        return {sample.id: scores[sample.id] for sample in samples}

    def self_test(self) -> GoodAndBad | None:
        """A ball that flies must beat noise."""
        return motion_and_noise() if self._settings.self_test else None

    def to(self, device: torch.device | str) -> None:
        """Move the network."""
        self._device = torch.device(device)
        self._network.to(self._device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """How a checkpoint was made, from its model_config.json."""

    fps: float
    """Frames shown of each second, where ``num_frames`` does not say how many there are."""
    num_frames: int | None
    max_frame_pixels: int
    means: NDArray[np.float64]
    """[3], of VQ, MQ and TA; 0 where the file has none."""
    stds: NDArray[np.float64]
    lora: Mapping[str, Any]

    @classmethod
    def from_json(cls, text: str) -> Checkpoint:
        """Raises KeyError or ValueError where it is not that of a VideoReward with three tokens."""
        plain = json.loads(text)
        data, model, norms = plain["data_config"], plain["model_config"], plain.get("inference_config") or {}
        made = (data.get("sample_type", "uniform"), model.get("use_special_tokens"), model.get("output_dim"))
        if made != ("uniform", True, 1):
            raise ValueError(f"sample_type, use_special_tokens and output_dim are {made}, not ('uniform', True, 1)")
        return cls(
            fps=float(data.get("fps") or 2),
            num_frames=data.get("num_frames"),
            max_frame_pixels=int(data["max_frame_pixels"]),
            means=np.array([norms[f"{name}_mean"] if norms else 0.0 for name in DIMENSIONS]),
            stds=np.array([norms[f"{name}_std"] if norms else 1.0 for name in DIMENSIONS]),
            lora=plain.get("peft_lora_config") or {},
        )

    def merged(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """The weights with the adapter in them, if there is one."""
        return merged(
            tensors,
            rank=int(self.lora.get("lora_r", 1)),
            alpha=float(self.lora.get("lora_alpha", 1)),
            rank_stabilized=bool(self.lora.get("use_rslora", False)),
        )

    def shown(self, sample: RewardSample) -> NDArray[np.uint8]:
        """The frames [n, H, W, 3] of a video that the model sees: an even number, evenly spread."""
        total = len(sample.frames)
        if self.num_frames is not None:
            count = round(self.num_frames / 2) * 2
        else:
            # As qwen-vl-utils counts; a video that does not say how fast it is has the shown number of frames a second.
            wanted = max(total / (sample.fps or self.fps) * self.fps, _LEAST_FRAMES)
            count = round(min(wanted, min(_MOST_FRAMES, total) // 2 * 2) / 2) * 2
        count = max(1, min(count, total))
        return sample.frames[torch.linspace(0, total - 1, count).round().long().tolist()]


def _newest(folder: Path) -> Path:
    """The checkpoint of the largest step in a folder."""
    found = {int(number): path for path in folder.glob("checkpoint-*") if (number := path.name.partition("-")[2]).isdigit()}
    if not found:
        raise FileNotFoundError(f"{folder} has no checkpoint-N")
    return found[max(found)]
