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
    per_micro_batch = recipe.groups_in_micro_batch
    micro_batches = -(-groups // per_micro_batch)
    full, last = (_rank_sizes(recipe, groups, recipe.generating_pools[0].ranks) for groups in _group_counts(recipe))
    batches = [sum(-(-size // rollout.forward_batch_size) for size in sizes) for sizes in (full, last)]
    rollout_batches = (micro_batches - 1) * batches[0] + batches[1]
    samples = groups * rollout.num_generations
    trained = trained_steps(recipe)
    pairs_per_group = trained_samples(recipe) * trained
    asked = recipe.train.timestep_batch_size
    # What `auto` will find is not known here; at most this.
    timestep_batch = max(1, min(asked, pairs_per_group) if isinstance(asked, int) else pairs_per_group)
    batches_per_group = -(-pairs_per_group // timestep_batch)
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


def trained_samples(recipe: Recipe) -> int:
    """Samples of each group that are trained: all, unless the algorithm chooses."""
    size = recipe.rollout.num_generations
    count = getattr(recipe.algorithm.settings, "num_trained_samples", None)
    return int(count(size)) if count is not None else size


def padding_advice(recipe: Recipe) -> str | None:
    """The forward batch size without padding nearest (as a ratio) to the one asked for, or None where there is no padding."""
    asked = recipe.rollout.forward_batch_size
    sizes = {
        size
        for pool in recipe.generating_pools
        for groups in _group_counts(recipe)
        for size in _rank_sizes(recipe, groups, pool.ranks)
        if size
    }
    if all(size % asked == 0 for size in sizes):
        return None
    common = math.gcd(*sizes)
    divisors = {size for d in range(1, math.isqrt(common) + 1) if common % d == 0 for size in (d, common // d)}
    best = min(divisors, key=lambda size: (max(size / asked, asked / size), -size))
    whose = "micro-batch" if recipe.cluster.placement == "inline" else "rank"
    return f"rollout.forward_batch_size={best} divides the samples of every {whose}: no padding"


def _group_counts(recipe: Recipe) -> tuple[int, int]:
    """Prompt groups of a full and of the last micro-batch."""
    prompts, groups = recipe.rollout.prompts_per_step, recipe.groups_in_micro_batch
    return groups, prompts % groups or groups


def _rank_sizes(recipe: Recipe, groups: int, ranks: int) -> list[int]:
    """Samples of each rank of a replica that works on a micro-batch of so many groups (scheduling/micro_batches.py)."""
    ranks = 1 if recipe.cluster.placement == "inline" else ranks
    by_group = recipe.schedule.micro_batching == "batch_axis"
    units = groups if by_group else groups * recipe.rollout.num_generations
    each = recipe.rollout.num_generations if by_group else 1
    return [((rank + 1) * units // ranks - rank * units // ranks) * each for rank in range(ranks)]
