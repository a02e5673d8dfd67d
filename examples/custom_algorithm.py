"""An algorithm of your own in one file: REINFORCE on the denoising steps, without a ratio and without a clip.

Use it from the folder that holds this file (or install it): algorithm: {type: "custom_algorithm:Reinforce"}. It needs one update
per rollout and no stale samples: it takes every step as one of the present policy. `digenrl.testing.check_algorithm` tests it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from digenrl.algorithms.advantages import group_advantages
from digenrl.algorithms.base import GroupAdvantages, LossInputs, LossOutputs, RewardTable
from digenrl.algorithms.timesteps import first_steps
from digenrl.config.schema import Recipe
from digenrl.diffusion.dynamics import FlowSDE
from digenrl.diffusion.sampler import StepPlan
from digenrl.ids import SampleId


class Reinforce:
    """loss = -A log p_theta(x' | x), with A = (R - mean) / std of the prompt's group."""

    class Settings(BaseModel):
        """Keys beside ``type`` in the recipe; unknown ones are refused."""

        model_config = ConfigDict(frozen=True, extra="forbid")

        trained_steps: int = Field(default=3, ge=1, description="Denoising steps that are trained, from the first on.")

        def num_trained_steps(self, num_inference_steps: int) -> int:
            """For the arithmetic of `digenrl check`: never the last step."""
            return min(self.trained_steps, num_inference_steps - 1)

    dynamics = FlowSDE()
    log_prob_reduction: Literal["mean", "sum"] = "mean"
    needs_reference = False

    def __init__(self, settings: Settings, recipe: Recipe) -> None:
        self._settings = settings
        self._noise_level = recipe.rollout.noise_level

    def plan_steps(self, samples: Sequence[SampleId], num_inference_steps: int) -> StepPlan:
        """Noise everywhere but on the last step; the first steps are trained."""
        count = self._settings.num_trained_steps(num_inference_steps)
        return first_steps(count, len(samples), num_inference_steps, self._noise_level)

    def advantages(self, rewards: RewardTable) -> list[GroupAdvantages]:
        """Of the weighted sum of all rewards."""
        return group_advantages(rewards.total)

    def loss(self, pairs: LossInputs) -> LossOutputs:
        """One loss per pair; the trainer sums them and divides by their number, once."""
        difference = (pairs.log_prob - pairs.old_log_prob).detach().abs()
        return LossOutputs(loss=-pairs.advantages * pairs.log_prob, metrics={"logprob_abs_diff": difference})
