"""Group-relative advantages in float64: A = (r - mean) / (std + eps), over the valid rewards of a prompt's group.

Invariants: equal rewards give exactly 0 (a test on max and min: rounding alone can make a std of 1e-17, and 0.7 of
advantage out of nothing); NaN and infinite rewards are left out of the statistics and get no advantage; groups are
rows, never texts.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    trim: float = 0.0,
    skip_zero_variance: bool = False,
) -> list[GroupAdvantages]:
    """Advantages of P groups. rewards: [P, G] float64, NaN or infinite where invalid.

    ``std``: divide by the group's own standard deviation, by that of all valid rewards given, or not at all.
    ``trim``: share of a group's lowest rewards that its own mean and standard deviation do not see.
    A group with fewer than two valid rewards has advantage 0.
    """
    valid = np.isfinite(rewards)
    everything = rewards[valid]
    batch_std = float(everything.std(ddof=ddof)) if everything.size > ddof else 0.0
    found = []
    for row, ok in zip(rewards, valid, strict=True):
        values = np.zeros_like(row)
        good = row[ok]
        zero_variance = good.size < 2 or bool(good.max() == good.min())
        if not zero_variance:
            seen = _trimmed(good, trim)
            divisor = {"group": seen.std(ddof=ddof) + eps, "batch": batch_std + eps, "none": 1.0}[std]
            values[ok] = (good - seen.mean()) / divisor
        kept = ok & (not (zero_variance and skip_zero_variance))
        found.append(GroupAdvantages(values=values, kept=kept, zero_variance=zero_variance))
    return found


def joined_advantages(
    by_reward: Sequence[Sequence[GroupAdvantages]], weights: Sequence[float], *, apart: bool
) -> list[GroupAdvantages]:
    """Advantages of P groups out of those of K rewards: weighted and summed, or ``apart``, unweighted, as values [G, K].

    A group has zero variance where all of its rewards have.
    """
    found = []
    for groups in zip(*by_reward, strict=True):
        values = np.stack([group.values for group in groups], axis=1)
        found.append(
            GroupAdvantages(
                values=values if apart else values @ np.asarray(weights, dtype=np.float64),
                kept=np.logical_or.reduce([group.kept for group in groups]),
                zero_variance=all(group.zero_variance for group in groups),
            )
        )
    return found


def best_of_n(group: GroupAdvantages, count: int, score: NDArray[np.float64]) -> GroupAdvantages:
    """Keep the ceil(n / 2) samples of the highest score and the floor(n / 2) of the lowest. score: [G].

    Advantages stay those of the whole group. All are kept where there are no more than ``count``; of equal scores, the later
    sample counts as the higher.
    """
    rows = np.flatnonzero(group.kept)
    if len(rows) <= count:
        return group
    order = rows[np.argsort(score[rows], kind="stable")]
    kept = np.zeros_like(group.kept)
    kept[order[: count // 2]] = True
    kept[order[len(order) - (count - count // 2) :]] = True
    return GroupAdvantages(values=group.values, kept=kept, zero_variance=group.zero_variance)


def _trimmed(good: NDArray[np.float64], share: float) -> NDArray[np.float64]:
    """The rewards without the lowest; all of them where the rest has no variance to divide by."""
    rest = np.sort(good)[int(len(good) * share + 1e-9) :]
    return rest if share and rest.size > 1 and rest[0] != rest[-1] else good
