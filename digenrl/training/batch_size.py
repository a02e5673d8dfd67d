"""``train.timestep_batch_size: auto``: the most pairs in one pass whose memory stays within a budget, found by trying.

Invariants: a number is chosen only after passes of that size, or of a larger one, were measured to fit; what is measured decides,
and every rank decides the same; nothing is tried that would not fit into the machine, as far as smaller passes tell.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from digenrl.errors import ConfigError

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Memory of a pass of some pairs, of the rank that needs most."""

    rest: int
    """Bytes in use beside it: weights, gradients, and the optimizer's state, also where that is still to come."""
    peak: int
    """Most bytes in use in the course of it, ``rest`` included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSize:
    """What was chosen, and from what."""

    pairs: int
    most: int
    """Pairs of a rank's share of a group; more were not asked for."""
    budget: int
    """Bytes."""
    measured: dict[int, Measured]
    """By number of pairs, in order of measurement."""

    def line(self) -> str:
        """One line for people, with the setting that repeats the choice."""
        sizes = ", ".join(f"{pairs}: {_gib(found.peak)}" for pairs, found in sorted(self.measured.items()))
        return (
            f"train.timestep_batch_size=auto takes {self.pairs} of {self.most} pairs in a pass, for a budget of "
            f"{_gib(self.budget)} GiB (GiB at the peak of passes that were measured: {sizes}); to use it again without "
            f"measuring: train.timestep_batch_size={self.pairs}"
        )


def largest_that_fits(most: int, budget: int, total: int, measure: Callable[[int], Measured]) -> BatchSize:
    """The largest number of pairs in 1..``most`` that fits: doubled until one does not, then halved in between.

    What is left over is evened out: where 9 pairs fit 8 at a time, two passes of 5 do. budget, total: bytes that may be used, and
    that there are. measure: called on all ranks with the same numbers, and says the same on all. Raises ConfigError where not
    even one pair fits.
    """
    found: dict[int, Measured] = {}

    def fits(pairs: int) -> bool:
        if _expected(pairs, found) > max(budget, total):
            return False
        found[pairs] = measure(pairs)
        return found[pairs].peak <= budget

    if not fits(1):
        raise _too_small(budget, found[1])
    good, bad = 1, most + 1
    while good < most and bad > most:
        asked = min(2 * good, most)
        good, bad = (asked, bad) if fits(asked) else (good, asked)
    while bad - good > 1 and good < most:
        asked = (good + bad) // 2
        good, bad = (asked, bad) if fits(asked) else (good, asked)
    passes = -(-most // good)
    return BatchSize(pairs=-(-most // passes), most=most, budget=budget, measured=found)


def _expected(pairs: int, found: dict[int, Measured]) -> float:
    """Peak bytes of a pass that is still to be tried, from the largest smaller ones: activations grow with the pairs."""
    smaller = sorted(size for size in found if size < pairs)
    if not smaller:
        return 0
    last = smaller[-1]
    peak = found[last].peak
    each = (peak - found[smaller[-2]].peak) / (last - smaller[-2]) if len(smaller) > 1 else peak - found[last].rest
    return peak + max(0, each) * (pairs - last)


def _too_small(budget: int, one: Measured) -> ConfigError:
    return ConfigError(
        f"train.memory_budget_gib ({_gib(budget)}) is less than the {_gib(one.peak)} GiB that a pass of one pair takes.",
        why=f"Weights, gradients and the optimizer's state take {_gib(one.rest)} GiB, with all else in the trainer's process; "
        f"the pass itself takes {_gib(one.peak - one.rest)} GiB.",
        fix=f"Use train.memory_budget_gib={math.ceil(1.05 * one.peak / GIB * 100) / 100:g} or more; "
        "model.gradient_checkpointing, model.lora and more trainer ranks need less.",
    )


def _gib(size: int) -> str:
    return f"{size / GIB:.3g}"
