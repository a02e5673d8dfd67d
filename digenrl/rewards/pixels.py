"""The rewards ``brightness`` and ``sharpness``: arithmetic on pixels, to try a set-up with before a real reward is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from digenrl.config.settings.rewards import BrightnessSettings, SharpnessSettings
from digenrl.ids import SampleId
from digenrl.rewards.base import RewardSample


class BrightnessReward:
    """Mean of all pixel values, from 0 (black) to 1 (white)."""

    Settings = BrightnessSettings

    def __init__(self, settings: BrightnessSettings) -> None:
        del settings  # it has none

    def score(self, samples: Sequence[RewardSample]) -> Mapping[SampleId, float]:
        """One number for each image."""
        return {sample.id: float(np.mean(sample.image)) / 255 for sample in samples}

    def self_test(self) -> tuple[Sequence[RewardSample], Sequence[RewardSample]]:
        """White must beat black."""
        return [_flat(255, 0)], [_flat(0, 1)]


class SharpnessReward:
    """Mean difference between the brightness of neighbouring pixels, from 0 (flat) to 1 (a chess board of pixels)."""

    Settings = SharpnessSettings

    def __init__(self, settings: SharpnessSettings) -> None:
        del settings  # it has none

    def score(self, samples: Sequence[RewardSample]) -> Mapping[SampleId, float]:
        """One number for each image."""
        return {sample.id: sharpness(sample.image) for sample in samples}

    def self_test(self) -> tuple[Sequence[RewardSample], Sequence[RewardSample]]:
        """A chess board must beat a flat image."""
        board = np.indices((8, 8)).sum(axis=0) % 2 * np.uint8(255)
        image = np.repeat(board[..., None], 3, axis=2).astype(np.uint8)
        return [RewardSample(id=SampleId(0, 0, 0), prompt="", metadata={}, image=image)], [_flat(128, 1)]


def sharpness(image: NDArray[np.uint8]) -> float:
    """Of an image [H, W, 3] with two pixels or more: mean over all pairs of neighbours, in rows and columns."""
    brightness = image.mean(axis=2) / 255
    across, down = np.abs(np.diff(brightness, axis=1)), np.abs(np.diff(brightness, axis=0))
    return float((across.sum() + down.sum()) / (across.size + down.size))


def _flat(value: int, number: int) -> RewardSample:
    image = np.full((8, 8, 3), value, dtype=np.uint8)
    return RewardSample(id=SampleId(0, 0, number), prompt="", metadata={}, image=image)
