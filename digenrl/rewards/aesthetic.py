"""The reward ``aesthetic``: the LAION aesthetic predictor, version 2, which has seen how people rate pictures from 1 to 10.

value = head(i), where i is the image embedding of CLIP ViT-L/14, of length 1, and the head five linear layers (768, 1024, 128,
64, 16, 1). Usual values lie between 4 and 7. The prompt plays no part.
Source: https://github.com/christophschuhmann/improved-aesthetic-predictor, the file that ends with linearMSE.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from digenrl.config.settings.aesthetic import AestheticSettings
from digenrl.ids import SampleId
from digenrl.rewards.base import RewardSample
from digenrl.rewards.clip import Clip
from digenrl.rewards.neural import by_row, device_of, linear_head, load_exactly, read_tensors, reading
from digenrl.rewards.self_test import GoodAndBad, sunset_and_noise

_LAION = "sac+logos+ava1-l14-linearMSE"
_FILES = ("aesthetic-model.safetensors", f"{_LAION}.safetensors", f"{_LAION}.pth", "aesthetic-model.pth")


class AestheticReward:
    """How beautiful people would find an image."""

    Settings = AestheticSettings

    def __init__(self, settings: AestheticSettings) -> None:
        """Raises ConfigError where the weights are not there."""
        self._clip = Clip.load(settings.clip_path, None, settings)
        with reading(
            f"The aesthetic predictor {settings.path!r}",
            needs=f"It needs the tensors of a head for embeddings of {self._clip.width} numbers, in one of {', '.join(_FILES)}.",
            fix="Fetch it where there is a network (hf download trl-lib/ddpo-aesthetic-predictor --local-dir FOLDER, or "
            f"{_LAION}.pth of the predictor's repository), and set path=FOLDER.",
        ):
            self._head = linear_head(self._clip.width).eval().requires_grad_(False)
            load_exactly(self._head, read_tensors(settings.path, _FILES))
        self._tests = settings.self_test
        self.to(device_of(settings.device))

    @torch.no_grad()
    def score(self, samples: Sequence[RewardSample]) -> Mapping[SampleId, float]:
        """One number for each image."""
        embeddings = self._clip.image_embeddings([sample.image for sample in samples])
        scores = by_row(self._head, embeddings.to(self._device))[:, 0].tolist()
        return {sample.id: score for sample, score in zip(samples, scores, strict=True)}

    def self_test(self) -> GoodAndBad | None:
        """A drawn sunset must beat noise."""
        return sunset_and_noise() if self._tests else None

    def to(self, device: torch.device | str) -> None:
        """Move the networks."""
        self._device = torch.device(device)
        self._head.to(self._device)
        self._clip.to(self._device)
