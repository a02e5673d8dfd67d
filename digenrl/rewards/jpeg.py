"""The reward ``jpeg``: compressibility, the smallest reward that still has a visible effect (DDPO, arXiv 2305.13301).

DDPO and flow_grpo compress at quality 95, and flow_grpo divides by 500; here the quality is a setting and the value
stays in kilobytes, because advantages do not depend on the scale.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from digenrl.config.settings.rewards import JpegSettings
from digenrl.ids import SampleId
from digenrl.rewards.base import RewardSample, Score


class JpegReward:
    """Minus the size of the image as a JPEG, in kilobytes of 1000 bytes; smooth pictures score higher."""

    Settings = JpegSettings

    def __init__(self, settings: JpegSettings) -> None:
        self._quality = settings.quality

    def score(self, samples: Sequence[RewardSample]) -> Mapping[SampleId, Score]:
        """One score for each sample, with the part ``kilobytes``, the size itself."""
        return {sample.id: self._score_one(sample) for sample in samples}

    def self_test(self) -> tuple[Sequence[RewardSample], Sequence[RewardSample]]:
        """A flat grey image must beat one of noise."""
        flat = np.full((64, 64, 3), 128, dtype=np.uint8)
        noise = np.random.default_rng(0).integers(0, 256, size=flat.shape, dtype=np.uint8)
        return [_sample(flat, SampleId(0, 0, 0))], [_sample(noise, SampleId(0, 0, 1))]

    def _score_one(self, sample: RewardSample) -> Score:
        kilobytes = jpeg_kilobytes(sample.image, self._quality)
        return Score(value=-kilobytes, parts={"kilobytes": kilobytes})


def jpeg_kilobytes(image: NDArray[np.uint8], quality: int) -> float:
    """Size of an image [H, W, 3] uint8 as a JPEG file of this quality (1..100), in units of 1000 bytes."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="JPEG", quality=quality)
    return len(buffer.getvalue()) / 1000


def _sample(image: NDArray[np.uint8], sample_id: SampleId) -> RewardSample:
    return RewardSample(id=sample_id, prompt="", metadata={}, image=image)
