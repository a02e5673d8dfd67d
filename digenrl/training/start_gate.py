"""The start gate: before the first update, rollout and training must agree on the log-probabilities of the same steps.

The weights are the same, so a difference is numerical noise, or a mistake: importance ratios would be clipped for no reason, or
be plainly wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

from digenrl.config.arithmetic import step_arithmetic
from digenrl.config.schema import Recipe
from digenrl.errors import RunFailed

CAUSES = (
    "Likely causes: forward passes of unlike shapes (rollout.forward_batch_size, train.timestep_batch_size) or in bfloat16; "
    "unlike devices or libraries in generators and trainer; dropout, or anything else random, in the network; an adapter or an "
    "algorithm of your own that computes a step in two ways."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartGate:
    """How large the mean difference may be."""

    clip_range: float | None
    """Of the ratio, the narrower side; None where the algorithm names none."""
    warn: float
    """Clip ranges above which a user is warned."""
    refuse: float
    """Clip ranges above which a run does not start."""
    exact: bool
    """Whether there must be none: float32, equal shapes, and ``train.deterministic``."""

    def check(self, difference: float) -> None:
        """Raise RunFailed where the mean difference of log-probabilities is too large for a first update."""
        if self.exact and difference:
            raise RunFailed(
                f"Rollout and training disagree on log-probabilities before the first update, by {difference:.1e} on average.",
                why="In float32 and in passes of one shape they are the same to the last bit: train.deterministic promises it.",
                fix=f"{CAUSES} Without train.deterministic, small differences are let pass.",
            )
        if self.clip_range is not None and difference > self.refuse * self.clip_range:
            raise RunFailed(
                f"Rollout and training disagree on log-probabilities before the first update, by {difference:.1e} on average, "
                f"which is {difference / self.clip_range:.2g} times algorithm.clip_range ({self.clip_range:g}).",
                why="Importance ratios would be clipped for no reason, so most of the gradient would be noise.",
                fix=f"{CAUSES} algorithm.start_gate_refuse is the limit, in clip ranges.",
            )


def start_gate_of(recipe: Recipe) -> StartGate:
    """The gate of a run. An algorithm of the user's own may have the settings of the built-in ones, or none of them."""
    settings = recipe.algorithm.settings
    clip = getattr(settings, "effective_clip_range", None)
    equal_shapes = (
        recipe.cluster.trainer.ranks == 1 and step_arithmetic(recipe).timestep_batch_size == recipe.rollout.forward_batch_size
    )
    return StartGate(
        clip_range=min(clip) if isinstance(clip, tuple) else clip,
        warn=getattr(settings, "start_gate_warn", 0.1),
        refuse=getattr(settings, "start_gate_refuse", 1.0),
        exact=recipe.train.deterministic and recipe.model.dtype == "float32" and equal_shapes,
    )
