"""Canonical forward batches: rows are cut into batches of one size, short ones padded, so that shapes never vary.

The last bits of a forward pass depend on the batch's shape, and not on a row's place or neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowBatch:
    """``size`` row indices, of which the first ``count`` are real and the rest repeat the last real one."""

    rows: Tensor
    """[size] int64."""
    count: int


def row_batches(num_rows: int, size: int) -> Iterator[RowBatch]:
    """Cut rows 0..num_rows-1 into batches of exactly ``size``."""
    for start in range(0, num_rows, size):
        count = min(size, num_rows - start)
        yield RowBatch(torch.arange(start, start + size).clamp(max=num_rows - 1), count)
