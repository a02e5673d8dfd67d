"""Group-relative advantages in float64: A = (r - mean) / (std + eps), over the valid rewards of a prompt's group.

Invariants: equal rewards give exactly 0 (a test on max and min: rounding alone can make a std of 1e-17, and 0.7 of
advantage out of nothing); NaN and infinite rewards are left out of the statistics and get no advantage; groups are
rows, never texts.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from digenrl.algorithms.base import GroupAdvantages


def group_advantages(
    rewards: NDArray[np.float64],
    *,
    std: Literal["group", "batch", "none"] = "group",
    ddof: int = 0,
    eps: float = 1e-4,
    skip_zero_variance: bool = False,
) -> list[GroupAdvantages]:
    """Advantages of P groups. rewards: [P, G] float64, NaN or infinite where invalid.

    ``std``: divide by the group's own standard deviation, by that of all valid rewards given, or not at all.
    A group with fewer than two valid rewards has advantage 0.
    """
    valid = np.isfinite(rewards)
    everything = rewards[valid]
    batch_std = float(everything.std(ddof=ddof)) if everything.size > ddof else 0.0
    return [_one_group(row, ok, std, ddof, eps, batch_std, skip_zero_variance) for row, ok in zip(rewards, valid, strict=True)]


def _one_group(
    rewards: NDArray[np.float64],
    valid: NDArray[np.bool_],
    std: str,
    ddof: int,
    eps: float,
    batch_std: float,
    skip_zero_variance: bool,
) -> GroupAdvantages:
    values = np.zeros_like(rewards)
    good = rewards[valid]
    zero_variance = good.size < 2 or bool(good.max() == good.min())
    if not zero_variance:
        divisor = {"group": good.std(ddof=ddof) + eps, "batch": batch_std + eps, "none": 1.0}[std]
        values[valid] = (good - good.mean()) / divisor
    kept = valid & (not (zero_variance and skip_zero_variance))
    return GroupAdvantages(values=values, kept=kept, zero_variance=zero_variance)
