"""An algorithm of a user's own that fails once in a run, on one rank, when this is about to generate the second step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from digenrl.algorithms.flow_grpo import FlowGRPO
from digenrl.config.schema import Recipe
from digenrl.config.settings.algorithms import FlowGRPOSettings
from digenrl.diffusion.sampler import StepPlan
from digenrl.ids import SampleId


class Stumbling(FlowGRPO):
    """Flow-GRPO, but for this."""

    class Settings(FlowGRPOSettings):
        """Flow-GRPO's."""

    def __init__(self, settings: FlowGRPOSettings, recipe: Recipe) -> None:
        super().__init__(settings, recipe)
        assert recipe.run.output_dir is not None
        self._mark = Path(recipe.run.output_dir) / "stumbled"

    def plan_steps(self, samples: Sequence[SampleId], num_inference_steps: int) -> StepPlan:
        """See Algorithm.plan_steps."""
        if samples[0].step == 1 and not self._mark.exists():
            try:
                self._mark.touch(exist_ok=False)
            except FileExistsError:
                return super().plan_steps(samples, num_inference_steps)
            raise RuntimeError("out of memory, say, on this rank alone")
        return super().plan_steps(samples, num_inference_steps)
