"""A reward that compares the samples of a prompt, in one file: how different an image is from the others of its group.

It keeps a policy from drawing the same picture again and again; give it a small weight beside a reward of quality. Use it from
the folder that holds this file (or install it): rewards: [{type: "group_reward:Variety", weight: 0.1}, ...]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from pydantic import BaseModel, ConfigDict

from digenrl.ids import SampleId
from digenrl.rewards.base import RewardSample


class Variety:
    """Mean difference of an image's pixels from those of each other image of its prompt, from 0 (all alike) to 1."""

    class Settings(BaseModel):
        """It has none; unknown keys are refused."""

        model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, settings: Settings) -> None:
        pass

    def score_group(self, samples: Sequence[RewardSample]) -> Mapping[SampleId, float]:
        """All samples of one prompt are here. One alone has nothing to be compared with: it is invalid."""
        images = np.stack([sample.image.astype(np.float32) / 255 for sample in samples])
        others = len(samples) - 1
        return {
            sample.id: float(np.abs(images - image).mean() * len(samples) / others) if others else float("nan")
            for sample, image in zip(samples, images, strict=True)
        }

    def self_test(self) -> tuple[Sequence[RewardSample], Sequence[RewardSample]]:
        """One white picture beside three black ones."""
        shades = (255, 0, 0, 0)
        picked = [
            RewardSample(id=SampleId(0, 0, n), prompt="", metadata={}, image=np.full((8, 8, 3), shade, dtype=np.uint8))
            for n, shade in enumerate(shades)
        ]
        return picked[:1], picked[1:]
