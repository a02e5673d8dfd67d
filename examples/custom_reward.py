"""A reward of your own in one file: how bright an image is.

Use it from the folder that holds this file (or install it): rewards: [{type: "custom_reward:Brightness"}]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from digenrl.ids import SampleId
from digenrl.rewards.base import RewardSample


class Brightness:
    """Mean of all pixel values, from 0 (black) to 1 (white)."""

    class Settings(BaseModel):
        """Keys beside ``type`` in the recipe; unknown ones are refused."""

        model_config = ConfigDict(frozen=True, extra="forbid")

        target: float = Field(default=1.0, ge=0, le=1, description="Brightness with the highest reward.")

    def __init__(self, settings: Settings) -> None:
        self._target = settings.target

    def score(self, samples: Sequence[RewardSample]) -> Mapping[SampleId, float]:
        """Minus the distance of each image's mean from the target."""
        return {sample.id: -abs(float(np.mean(sample.image)) / 255 - self._target) for sample in samples}
