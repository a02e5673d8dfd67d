"""The arithmetic of one step: how many samples, pairs and forward batches a recipe asks for, and what padding costs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from digenrl.config.schema import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class StepArithmetic:
    """Sizes of one RL step. A pair is one (sample, denoising step) that is trained."""

    prompts: int
    num_generations: int
    samples: int
    num_inference_steps: int
    trained_steps: int
    pairs_per_group: int
    pairs: int
    micro_batches: int
    rollout_forward_batches: int
    """Forward batches of one denoising step, over all micro-batches."""
    rollout_padding: float
    """Share of rollout rows that are padding."""
    timestep_batch_size: int
    """Pairs in one training forward, after `all` and the size of a group are taken into account."""
    training_forward_batches: int
    training_padding: float
    """Share of training rows that are padding."""

    def lines(self) -> tuple[str, ...]:
        """The sums in words, as ``digenrl check`` prints them."""
        return (
            f"{self.prompts} prompts x {self.num_generations} = {self.samples} samples in {self.micro_batches} micro-batches; "
            f"{self.num_inference_steps} denoising steps x {self.rollout_forward_batches} forward batches, "
            f"padding {self.rollout_padding:.0%}".replace("%", " %"),
            f"{self.trained_steps} of {self.num_inference_steps} denoising steps trained = {self.pairs_per_group} pairs a group, "
            f"{self.training_forward_batches} forward batches, padding {self.training_padding:.0%}".replace("%", " %"),
        )


def step_arithmetic(recipe: Recipe) -> StepArithmetic:
    """The sizes of one step of this recipe, without loading anything."""
    rollout = recipe.rollout
    groups = rollout.prompts_per_step
    per_micro_batch = recipe.schedule.groups_per_micro_batch
    micro_batches = math.ceil(groups / per_micro_batch)
    sizes = [min(per_micro_batch, groups - i * per_micro_batch) * rollout.num_generations for i in range(micro_batches)]
    rollout_batches = sum(math.ceil(size / rollout.forward_batch_size) for size in sizes)
    samples = groups * rollout.num_generations
    trained = trained_steps(recipe)
    pairs_per_group = rollout.num_generations * trained
    asked = recipe.train.timestep_batch_size
    timestep_batch = pairs_per_group if asked == "all" else max(1, min(asked, pairs_per_group))
    batches_per_group = math.ceil(pairs_per_group / timestep_batch) if pairs_per_group else 0
    rows = groups * batches_per_group * timestep_batch
    return StepArithmetic(
        prompts=groups,
        num_generations=rollout.num_generations,
        samples=samples,
        num_inference_steps=rollout.num_inference_steps,
        trained_steps=trained,
        pairs_per_group=pairs_per_group,
        pairs=groups * pairs_per_group,
        micro_batches=micro_batches,
        rollout_forward_batches=rollout_batches,
        rollout_padding=1 - samples / (rollout_batches * rollout.forward_batch_size),
        timestep_batch_size=timestep_batch,
        training_forward_batches=groups * batches_per_group,
        training_padding=1 - groups * pairs_per_group / rows if rows else 0.0,
    )


def trained_steps(recipe: Recipe) -> int:
    """Denoising steps of each sample that are trained. A user's algorithm says so itself; all but the last if it does not."""
    steps = recipe.rollout.num_inference_steps
    count = getattr(recipe.algorithm.settings, "num_trained_steps", None)
    return int(count(steps)) if count is not None else steps - 1


def padding_advice(recipe: Recipe) -> str | None:
    """A forward batch size without padding near the one asked for, or None where there is nothing to gain."""
    sums = step_arithmetic(recipe)
    if sums.rollout_padding == 0:
        return None
    per_micro_batch = recipe.schedule.groups_per_micro_batch * recipe.rollout.num_generations
    divisors = [d for d in range(1, per_micro_batch + 1) if per_micro_batch % d == 0]
    best = min(divisors, key=lambda d: (abs(d - recipe.rollout.forward_batch_size), -d))
    return (
        f"rollout.forward_batch_size={best} divides the {per_micro_batch} samples of a micro-batch: "
        "no padding in full micro-batches"
    )
