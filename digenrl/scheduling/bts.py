"""Bubble-time search (BTS), exact: Algorithm 2 of the paper, memoised, with branch and bound.

At every bubble (the trainer is free and has nothing to update) there are two branches: generate one micro-batch (TAG) or
skip until the next one can be updated. The search finds the sequence of choices with the earliest end of the step; on a tie
skipping wins. States are remembered by their relative times, so that branches that meet are searched once, and a TAG branch
is entered only where a sound lower bound is below what skipping gives.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

from digenrl.scheduling.bounds import lower_bound
from digenrl.scheduling.bts_single import SingleReplicaSearch
from digenrl.scheduling.step_model import IDLE, Model, Position, StepCosts

_Key = tuple[object, ...]


class Choice(NamedTuple):
    """The answer at one bubble."""

    tag: bool
    finish: int
    """Ticks until the last update ends when this choice and all later ones are the best ones."""
    skip_finish: int
    """The same when this bubble is skipped, or a lower bound of it where that is already later than ``finish``."""
    tag_finish: int
    """The same when this bubble is used, or a lower bound of it."""


class ExactSearch:
    """Searches over all TAG/skip sequences. The memory is kept between calls, since later bubbles revisit earlier states."""

    def __init__(self, costs: StepCosts, *, by_index: bool = False, after_step: bool = False) -> None:
        self._model = Model(costs, by_index=by_index, after_step=after_step)
        self._costs = costs
        self._by_index = by_index
        self._memory: dict[_Key, int] = {}
        plain = len(costs.generate) == 1 and not by_index and not after_step
        self._single = SingleReplicaSearch(costs) if plain else None

    @property
    def visited(self) -> int:
        """Bubbles searched so far, for benchmarks."""
        return len(self._memory) if self._single is None else self._single.visited

    def choose(self, position: Position) -> Choice:
        """The best choice at a bubble; ``position`` is not changed."""
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(max(limit, 20 * position.left + 1000))
        try:
            return self._choose(position)
        finally:
            sys.setrecursionlimit(limit)

    def _choose(self, position: Position) -> Choice:
        if self._single is not None and not position.scored:
            skip, tag = self._single.finishes(position)
            return Choice(tag < skip, min(tag, skip), skip, tag)
        skip = self._branch(position, tag=False)
        bound = lower_bound(position, self._costs, at_least_one_tag=True)
        if not position.pending or bound >= skip:
            return Choice(False, skip, skip, bound)
        tag = self._branch(position, tag=True)
        return Choice(tag < skip, min(tag, skip), skip, tag)

    def _best(self, position: Position) -> int:
        """Ticks to the end of the step from a bubble."""
        key = self._key(position)
        known = self._memory.get(key)
        if known is not None:
            return known
        best = self._branch(position, tag=False)
        if best > lower_bound(position, self._costs, at_least_one_tag=True):
            best = min(best, self._branch(position, tag=True))
        self._memory[key] = best
        return best

    def _branch(self, position: Position, *, tag: bool) -> int:
        after = position.copy()
        elapsed = to_next_bubble(self._model, after, tag=tag)
        return elapsed + (self._best(after) if after.left else 0)

    def _key(self, position: Position) -> _Key:
        busy = tuple(
            (remaining, task, item - position.following if self._by_index else 0) if task != IDLE else None
            for remaining, task, item in zip(position.remaining, position.task, position.item, strict=True)
        )
        counts = (position.pending, position.left, position.generating)
        if not self._by_index:
            return (busy, len(position.queue), len(position.scored), *counts)
        queue = tuple(item - position.following for item in position.queue)
        return (busy, queue, frozenset(item - position.following for item in position.scored), *counts)


def to_next_bubble(model: Model, position: Position, *, tag: bool, reserve: int | None = None) -> int:
    """Take one choice and follow the schedule to the next bubble with something pending, or to the end of the step.

    Changes ``position`` and returns the ticks that passed; ``position.left`` is 0 at the end.
    """
    elapsed, item, updating = 0, -1, False
    busy = 0
    skipping = not tag
    if tag:
        busy, item = model.take_tag(position)
    while True:
        ticks = [remaining for remaining, task in zip(position.remaining, position.task, strict=True) if task != IDLE]
        if busy:
            ticks.append(busy)
        step = min(ticks)
        elapsed += step
        model.advance(position, step)
        if busy:
            busy -= step
            if not busy:
                if updating:
                    position.left -= 1
                    updating = False
                    if not position.left:
                        return elapsed
                else:
                    model.end_tag(position, item)
        model.settle(position, reserve)
        if busy:
            continue
        if model.updatable(position):
            busy, updating, skipping = model.take_update(position), True, False
        elif position.pending and not skipping:
            return elapsed
