"""Packing of (sample, denoising step) pairs into forward batches (TSP).

Pairs are ordered by sample, then denoising step; a batch holds pairs of one prompt group only and has always the same
number of rows, the tail padded with pairs of weight 0. So the packing, and with it every bit of the gradient, depends on
neither the micro-batches nor on who generated what.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from digenrl.diffusion.batching import row_batches


@dataclass(frozen=True, slots=True)
class PairBatch:
    """N pairs of one prompt group that go through the network together."""

    rows: Tensor
    """[N] int64, row of the trajectory."""
    slots: Tensor
    """[N] int64, which of the row's S trained steps."""
    weights: Tensor
    """[N] float32: 1, or 0 for padding."""


def pack_pairs(rows: Tensor, trained_steps: int, batch_size: int) -> Iterator[PairBatch]:
    """Pack all pairs of one group. rows: [n] int64, the trajectory rows of the group that are trained, ascending."""
    pair_rows = rows.repeat_interleave(trained_steps)
    pair_slots = torch.arange(trained_steps).repeat(len(rows))
    for batch in row_batches(len(pair_rows), batch_size):
        weights = torch.ones(batch_size)
        weights[batch.count :] = 0.0
        yield PairBatch(pair_rows[batch.rows], pair_slots[batch.rows], weights)


def share_of_rank(batches: Sequence[PairBatch], rank: int, ranks: int) -> list[PairBatch]:
    """What one of several ranks computes of a group's batches: every ``ranks``-th, and as many for each of them.

    Where the numbers do not come out even, a rank repeats the first batch with weight 0: all ranks must make the same number
    of passes, or their collectives hang. By group, so that sums over ranks do not depend on the micro-batches.
    """
    mine = list(batches[rank::ranks])
    wanted = -(-len(batches) // ranks)
    for _ in range(wanted - len(mine)):
        mine.append(replace(batches[0], weights=torch.zeros_like(batches[0].weights)))
    return mine


def turns_of_rank(batches: Sequence[PairBatch], first: int, rank: int, ranks: int) -> list[PairBatch]:
    """As ``share_of_rank``, for ranks that do not meet before the optimizer step, and so need not make as many passes.

    Batches go round the ranks through the whole step, so that one batch for each group keeps all of them busy. first: number in
    the step of the group's first batch, were nothing left out of it or the groups before; so it does not depend on micro-batches.
    """
    return list(batches[(rank - first) % ranks :: ranks])


def pairs_per_batch(asked: int | Literal["all"], trained_samples: int, trained_steps: int, ranks: int = 1) -> int:
    """Rows of a training forward: what the recipe asks for, at most a whole group; ``all`` is a rank's share of a group."""
    whole = trained_samples * trained_steps
    return -(-whole // ranks) if asked == "all" else min(asked, whole)
