"""The reward-hacking alarm: the held-out reward falls while the training reward rises.

An observation is one evaluation, together with the mean training reward of the steps since the one before. Over the last W of
them, the alarm asks for three things:

- The training reward rises and the held-out reward falls, each by Mann and Kendall's test: the share of all orders of W values
  that are as steady as the one seen is at most LEVEL. It looks at ranks alone, so it needs no guess of how noise is
  distributed. If both were noise, independent of each other, a window would raise a false alarm once in LEVEL ** -2 = 10,000.
- The held-out reward has fallen by more than a number of standard errors of the difference between the first and the last mean.
  That is what keeps a slow drift quiet that is too small to be told from the choice of prompts.

Fewer than 5 values cannot fall that steadily: 4 do so by chance in 1 of 24 cases.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

LEVEL = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One evaluation and the training before it."""

    version: int
    held_out: float
    """Mean reward on the held-out prompts."""
    standard_error: float
    """Of that mean."""
    trained: float
    """Mean training reward of the steps since the evaluation before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """From where to where the two rewards went."""

    first: Observation
    last: Observation

    def __str__(self) -> str:
        first, last = self.first, self.last
        return (
            f"reward hacking? The held-out reward fell from {first.held_out:.4g} (version {first.version}) to "
            f"{last.held_out:.4g} (version {last.version}), while the training reward rose from {first.trained:.4g} to "
            f"{last.trained:.4g}. Why it matters: the model learns what the training reward likes and people do not. What helps: "
            "look at the held-out pictures of both versions, keep the earlier checkpoint, lower train.learning_rate, raise "
            "algorithm.kl_beta, or add what is missing to rewards. This is said once, until the held-out reward is back; "
            "eval.alarm_window and eval.alarm_errors set how soon."
        )


def alarm_of(window: Sequence[Observation], *, errors: float) -> Alarm | None:
    """The alarm that these observations raise, oldest first; None if none."""
    if len(window) < 2:
        return None
    first, last = window[0], window[-1]
    fall = first.held_out - last.held_out
    if fall <= errors * math.hypot(first.standard_error, last.standard_error):
        return None
    falls = chance_of_falling([each.held_out for each in window])
    rises = chance_of_falling([-each.trained for each in window])
    return Alarm(first=first, last=last) if max(falls, rises) <= LEVEL else None


def chance_of_falling(values: Sequence[float]) -> float:
    """Share of all orders of as many different values that fall at least as steadily as these (Mann 1945, one-sided).

    Equal values count as rising.
    """
    count = len(values)
    not_falling = sum(values[i] <= values[j] for j in range(count) for i in range(j))
    # Orders by number of rising pairs: the k-th value can stand behind 0 to k of those before it.
    shares = np.ones(1)
    for k in range(2, count + 1):
        shares = np.convolve(shares, np.full(k, 1 / k))
    return float(min(1.0, shares[: not_falling + 1].sum()))


class HackingWatch:
    """Follows one run. An episode lasts until the held-out reward is back where it fell from, and is told of once."""

    def __init__(self, *, window: int, errors: float) -> None:
        """window: observations; 0 never alarms. errors: standard errors by which the held-out reward has to fall."""
        self._window = window
        self._errors = errors
        self._trained: dict[int, float] = {}
        """Training reward by step, of steps since the newest evaluation and those that ran ahead of it."""
        self._evaluated: int | None = None
        self._observations: list[Observation] = []
        self._level: float | None = None
        """Held-out reward from which it fell, in an episode."""

    @property
    def in_episode(self) -> bool:
        """Whether the held-out reward has fallen and not come back."""
        return self._level is not None

    def trained(self, step: int, reward: float) -> None:
        """A step is done. reward: its mean."""
        if math.isfinite(reward):
            self._trained[step] = reward

    def evaluated(self, version: int, held_out: float, standard_error: float) -> Alarm | None:
        """A version was evaluated. Returns the alarm of an episode that begins with it."""
        since, self._evaluated = self._evaluated, version
        steps = [step for step in self._trained if step < version]
        rewards = [self._trained.pop(step) for step in steps]
        if since is None or not rewards or not (math.isfinite(held_out) and math.isfinite(standard_error)):
            return None
        mean = sum(rewards) / len(rewards)
        seen = Observation(version=version, held_out=held_out, standard_error=standard_error, trained=mean)
        self._observations = [*self._observations, seen][-self._window :] if self._window else []
        if self._level is not None:
            if held_out >= self._level:
                self._level, self._observations = None, [seen]
            return None
        alarm = alarm_of(self._observations, errors=self._errors) if len(self._observations) == self._window else None
        self._level = alarm.first.held_out if alarm is not None else None
        return alarm

    def replay(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Take over what a run has logged before it goes on, in metrics.jsonl's rows."""
        for row in rows:
            if row["kind"] == "train":
                self.trained(row["step"], _number(row.get("reward_mean")))
            elif row["kind"] == "eval":
                valid = _number(row.get("num_images")) - _number(row.get("invalid_samples"))
                self.evaluated(row["step"], _number(row.get("reward")), standard_error(_number(row.get("reward_std")), valid))


def standard_error(std: float, count: float) -> float:
    """Of the mean of ``count`` values with this standard deviation; NaN where there are none."""
    return std / math.sqrt(count) if count > 0 else math.nan


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
