"""Where MixGRPO's window stands at an RL step: a pure function of the step's number, the range and the settings.

Invariants: the window lies inside [lo, hi) with its full length; every place of it has at least one RL step.
"""

from __future__ import annotations

import math
from itertools import accumulate

from digenrl.config.settings.algorithms import MixGRPOSettings


def window_start(step: int, settings: MixGRPOSettings, low: int, high: int) -> int:
    """First denoising step of the window in RL step ``step``, in the schedules that move it from place to place."""
    places = window_places(low, high, settings.sde_window_size, settings.window_stride or settings.sde_window_size)
    ends = list(accumulate(steps_in_place(place, settings, high) for place in places))
    if step >= ends[-1]:
        if settings.window_at_end == "stay":
            return places[-1]
        step %= ends[-1]
    return next(place for place, end in zip(places, ends, strict=True) if step < end)


def window_places(low: int, high: int, size: int, stride: int) -> list[int]:
    """lo, lo + stride, ... and the last place that fits, ascending."""
    last = high - size
    return [*range(low, last, stride), last]


def steps_in_place(place: int, settings: MixGRPOSettings, high: int) -> int:
    """RL steps for which the window stays in one place."""
    most = settings.window_steps
    if settings.window_schedule == "decay":
        share = place / high
        # The epsilon keeps sums that are whole numbers from losing one to rounding.
        return max(1, settings.window_min_steps, int(most * (1 - share) + settings.window_min_steps * share + 1e-9))
    if settings.window_schedule == "exp_decay":
        decay = math.exp(-settings.window_decay_rate * max(0, place - settings.window_decay_from))
        return max(1, math.ceil(most * decay))
    return most
