"""How the prompts of a step are cut into micro-batches (GAP): whole prompt groups along the generation axis.

Invariant: every prompt of a step is in exactly one micro-batch, in order; only the last one may be smaller.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Prompt groups that are generated, scored and accumulated together."""

    index: int
    prompts: tuple[int, ...]
    """Prompt indices of the step; all samples of each."""


def cut_into_micro_batches(prompts_per_step: int, groups_per_micro_batch: int) -> tuple[MicroBatch, ...]:
    """The micro-batches of a step; the same cut in every step."""
    starts = range(0, prompts_per_step, groups_per_micro_batch)
    return tuple(
        MicroBatch(index, tuple(range(start, min(start + groups_per_micro_batch, prompts_per_step))))
        for index, start in enumerate(starts)
    )
