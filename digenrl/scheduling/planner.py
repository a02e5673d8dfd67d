"""BTS+: how many of the pending micro-batches the trainer should generate, and whether back to back.

For a few promising numbers n, found from the lower bound, the rest of the step is looked ahead in two ways: n TAGs back
to back (one switch each way), or one at every bubble. The search ends as soon as a way meets the lower bound, which proves
it optimal. With stale generation allowed, a later finish can be worth it, since the pool makes micro-batches of the next step
in the meantime: what is minimised is then the finish plus the least that the next step takes with those already made.
"""

from __future__ import annotations

from typing import NamedTuple

from digenrl.scheduling.bounds import Pool, trainer_time
from digenrl.scheduling.rollout import Outcome, roll_out
from digenrl.scheduling.step_model import IDLE, Model, Position, StepCosts

MAX_LOOK_AHEADS = 24
"""Look-aheads of one search; reached only where the bound is loose."""


class Plan(NamedTuple):
    """What the trainer should do from this bubble on."""

    tags: int
    """Micro-batches to generate in the rest of the step; they are reserved for the trainer."""
    sticky: bool
    """Back to back, although updates wait."""
    finish: int
    """Ticks until the step's last update ends."""
    bound: int
    """Ticks that no schedule can beat."""
    skip_finish: int | None
    """Ticks when the trainer generates nothing; None where that was not looked at."""


class Planner:
    """Plans with one set of costs, for steps of ``micro_batches``."""

    def __init__(self, costs: StepCosts, micro_batches: int, *, by_index: bool = False, after_step: bool = False) -> None:
        self._costs = costs
        self._micro_batches = micro_batches
        self._by_index = by_index
        self._after_step = after_step
        self._model = Model(costs, by_index=by_index, after_step=after_step)
        self._rate = sum(1.0 / ticks for ticks in costs.generate)

    def plan(self, position: Position, *, stale_left: int = 0) -> Plan:
        """The best plan found for the rest of the step.

        ``position``: a bubble with something pending. ``stale_left``: micro-batches of the next step that may still be
        generated early; 0 also when there is no next step.
        """
        pool = Pool(position, self._costs)
        bounds = [
            max(pool.time(n), trainer_time(position, self._costs, n, pool.first_ready)) for n in range(position.pending + 1)
        ]
        bound = min(bounds)
        afterwards = self._next_step(stale_left) if stale_left else 0.0
        best, best_value, skip_finish, looks = Plan(0, False, 0, bound, None), float("inf"), None, 0
        for tags in sorted(range(len(bounds)), key=lambda n: (bounds[n], n)):
            if bounds[tags] + afterwards >= best_value or looks >= MAX_LOOK_AHEADS:
                break
            for sticky in (True, False) if tags else (False,):
                outcome = self._look(position, tags, sticky)
                looks += 1
                value = float(outcome.finish)
                if stale_left:
                    value += self._next_step(min(stale_left, self._credit(outcome)))
                if not tags:
                    skip_finish = outcome.finish
                if value < best_value:
                    best, best_value = Plan(tags, sticky, outcome.finish, bound, None), value
                if outcome.finish == bounds[tags]:
                    break
        return best._replace(skip_finish=skip_finish)

    def _look(self, position: Position, tags: int, sticky: bool) -> Outcome:
        if position.pending > tags and IDLE in position.task:
            # Replicas that stay idle because of an earlier plan may claim what this one does not leave to the trainer.
            position = position.copy()
            self._model.settle(position, tags)
        return roll_out(position, self._costs, tags, sticky=sticky, by_index=self._by_index, after_step=self._after_step)

    def _credit(self, outcome: Outcome) -> float:
        """Micro-batches of the next step, begun ones in part, that the pool can make until the optimizer step is over."""
        end = outcome.finish + self._costs.optimizer
        return sum(max(0, end - free) / ticks for free, ticks in zip(outcome.free, self._costs.generate, strict=True))

    def _next_step(self, made: float) -> float:
        """The least that the next step takes when ``made`` of its micro-batches exist already (bounds.py, with fractions)."""
        costs, size = self._costs, self._micro_batches
        score = min(costs.score) * size / len(costs.generate) if costs.score is not None else 0.0
        pool = (size - made) / self._rate + score + costs.update
        updates = size * costs.update
        best = max(pool, updates + (0 if made >= 1 else min(costs.generate)))
        trainer = updates + costs.switch_in + costs.switch_out
        crossing = int((pool - trainer) / (costs.tag + 1 / self._rate))
        for tags in {min(max(1, crossing), size), min(max(1, crossing + 1), size)}:
            best = min(best, max(pool - tags / self._rate, trainer + tags * costs.tag))
        return best
