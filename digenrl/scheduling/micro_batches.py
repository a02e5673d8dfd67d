"""How a step is cut into micro-batches, and a micro-batch into the shares of a replica's ranks (GAP).

Invariants: every prompt of a step is in exactly one micro-batch, in order, and only the last micro-batch may be smaller;
every sample of a micro-batch is on exactly one rank, and along the generation axis the shares differ by at most one sample;
ranks that hold a network together make equally many forward passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

MicroBatching = Literal["generation_axis", "batch_axis", "none"]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Prompt groups that are generated, scored and accumulated together."""

    index: int
    prompts: tuple[int, ...]
    """Prompt indices of the step; all samples of each."""


def cut_into_micro_batches(prompts_per_step: int, groups: int) -> tuple[MicroBatch, ...]:
    """The micro-batches of a step, ``groups`` prompt groups each; the same cut in every step."""
    starts = range(0, prompts_per_step, groups)
    return tuple(
        MicroBatch(index, tuple(range(start, min(start + groups, prompts_per_step)))) for index, start in enumerate(starts)
    )


def spread_over_ranks(
    micro_batch: MicroBatch, num_generations: int, ranks: int, micro_batching: MicroBatching = "generation_axis"
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Which (prompt, sample) pairs each rank of a replica generates.

    Along the generation axis, contiguous even shares of all samples; along the batch axis, whole groups. A rank may get
    nothing when there are more ranks than samples (or groups).
    """
    if micro_batching == "batch_axis":
        groups = micro_batch.prompts
        return tuple(
            tuple((prompt, sample) for prompt in groups[low:high] for sample in range(num_generations))
            for low, high in _shares(len(groups), ranks)
        )
    samples = [(prompt, sample) for prompt in micro_batch.prompts for sample in range(num_generations)]
    return tuple(tuple(samples[low:high]) for low, high in _shares(len(samples), ranks))


def filling(shares: Sequence[int], batch_size: int, shard: int) -> list[int]:
    """How many more samples each rank has to generate, so that ranks which hold a network together make their passes together.

    shares: samples of each rank; batch_size: of one forward pass; shard: neighbouring ranks that hold one network together.
    """
    passes = [-(-share // batch_size) for share in shares]
    found = []
    for rank, (share, own) in enumerate(zip(shares, passes, strict=True)):
        first = rank - rank % shard
        most = max(passes[first : first + shard])
        found.append((most - 1) * batch_size + 1 - share if own < most else 0)
    return found


def idle_share(micro_batch: MicroBatch, num_generations: int, ranks: int, micro_batching: MicroBatching) -> float:
    """Share of the ranks' time that an uneven spread wastes: the ranks with fewer samples wait for the others."""
    sizes = [len(share) for share in spread_over_ranks(micro_batch, num_generations, ranks, micro_batching)]
    return 1 - sum(sizes) / (ranks * max(sizes))


def _shares(count: int, ranks: int) -> list[tuple[int, int]]:
    return [(rank * count // ranks, (rank + 1) * count // ranks) for rank in range(ranks)]
