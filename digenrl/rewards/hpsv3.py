"""The reward ``hpsv3``: Human Preference Score, version 3 (arXiv 2508.03789), a Qwen2-VL-7B that has learned what people prefer.

It is shown the image (about 256 * 28 * 28 pixels) and asked what it was trained with; a head of three layers (width, 1024, 16, 2,
with ReLU between) reads mean and uncertainty of its score at the token <|Reward|>. value = the mean, about -5 to 15.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from digenrl.config.settings.qwen_rewards import HpsV3Settings
from digenrl.ids import SampleId
from digenrl.rewards.base import RewardSample
from digenrl.rewards.neural import device_of, read_tensors, reading
from digenrl.rewards.qwen_reward import PLACEHOLDER, QwenRewardNetwork, read_template, reward_network
from digenrl.rewards.qwen_vl import IMAGE_MARK, QwenVlInputs, dtype_of, plain_text
from digenrl.rewards.self_test import GoodAndBad, circle_and_noise

WORDS = ("<|Reward|>",)
_PIXELS = 256 * 28 * 28
_FILE = "HPSv3.safetensors"


class HpsV3Reward:
    """How much people would prefer an image for a prompt."""

    Settings = HpsV3Settings

    def __init__(self, settings: HpsV3Settings) -> None:
        """Raises ConfigError where the weights, the base's files or the template are not there."""
        device = device_of(settings.device)
        self._settings = settings
        with reading(
            f"HPSv3 {settings.path!r} (base: {settings.base_path!r}, template: {settings.template_path!r})",
            needs=f"It needs {_FILE}, the JSON files of {settings.base_path}, and the text that it was trained to be asked.",
            fix=f"Fetch them where there is a network (hf download MizzenAI/HPSv3 {_FILE} --local-dir FOLDER, and hf download "
            'Qwen/Qwen2-VL-7B-Instruct --include "*.json" "*.txt" --local-dir BASE), and set path=FOLDER and base_path=BASE; '
            "docs/rewards/hpsv3.md says where the text is.",
        ):
            self._template = read_template(settings.template_path, WORDS)
            self._inputs = QwenVlInputs(settings.base_path, min_pixels=_PIXELS, max_pixels=_PIXELS, words=WORDS)
            tensors = read_tensors(settings.path, (_FILE,))
            self._network: QwenRewardNetwork = reward_network(
                tensors,
                _head(tensors["rm_head.0.weight"].shape[1]),
                settings.base_path,
                self._inputs.tokenizer,
                words=WORDS,
                mark=IMAGE_MARK,
                dtype=dtype_of(settings.dtype, device),
            )
        self.to(device)

    def score(self, samples: Sequence[RewardSample]) -> Mapping[SampleId, float]:
        """One number for each image."""
        questions = [
            self._inputs.question(sample.frames, self._template.replace(PLACEHOLDER, plain_text(sample.prompt)))
            for sample in samples
        ]
        scores: dict[SampleId, float] = {}
        for batch in self._inputs.passes(questions, self._settings.forward_batch_size):
            means = self._network(batch.to(self._device))[:, 0, 0].tolist()
            scores |= {samples[place].id: mean for place, mean in zip(batch.places, means, strict=False)}
        return {sample.id: scores[sample.id] for sample in samples}

    def self_test(self) -> GoodAndBad | None:
        """A drawn circle must beat noise."""
        return circle_and_noise() if self._settings.self_test else None

    def to(self, device: torch.device | str) -> None:
        """Move the network."""
        self._device = torch.device(device)
        self._network.to(self._device)


def _head(width: int) -> nn.Module:
    """Its tensors have the published names: 0, 3 and 5, with dropout, which does nothing here, at 2."""
    return nn.Sequential(nn.Linear(width, 1024), nn.ReLU(), nn.Identity(), nn.Linear(1024, 16), nn.ReLU(), nn.Linear(16, 2))
