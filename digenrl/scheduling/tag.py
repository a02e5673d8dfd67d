"""What an idle trainer does at a bubble: generate (TAG) or wait. One function per policy.

never: waits. static: generates a fixed number first. greedy: always generates. bts: the paper's search, exact. bts_plus: the
planner, which may generate several back to back and tells replicas how many micro-batches are the trainer's.
With running estimates the two searches generate at the first bubbles of a run until two durations of the trainer are known:
one cold sample alone could otherwise lock TAG out for good.
"""

from __future__ import annotations

from dataclasses import dataclass

from digenrl.scheduling.bts import ExactSearch
from digenrl.scheduling.planner import Planner
from digenrl.scheduling.settings import SchedulerSettings
from digenrl.scheduling.step_model import Position, StepCosts

FORCED_SAMPLES = 2


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do at a bubble, and why."""

    tag: bool
    reason: str
    reserved: int = 0
    """Further pending micro-batches that are the trainer's (bts_plus)."""
    sticky: bool = False
    """Generate them back to back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bubble:
    """What the policies may look at."""

    position: Position | None
    """The step as the searches see it; None while durations are unknown."""
    costs: StepCosts | None
    tag_samples: int
    """TAG durations measured so far; FORCED_SAMPLES or more where costs are given."""
    stale_left: int
    """Micro-batches of the next step that may still be generated early."""


class TagDecider:
    """Answers at bubbles; keeps the searches' memory while costs stay the same."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self._policy = settings.tag
        self._size = settings.micro_batches
        self._by_index = settings.update_order == "index"
        self._after_step = settings.update_after == "step"
        self._costs: StepCosts | None = None
        self._exact: ExactSearch | None = None
        self._planner: Planner | None = None

    def decide(self, bubble: Bubble) -> Decision:
        """The answer at an open bubble with something pending."""
        if self._policy == "greedy":
            return Decision(True, "TAG: the trainer is idle")
        if bubble.tag_samples < FORCED_SAMPLES or bubble.position is None or bubble.costs is None:
            return Decision(True, f"TAG: measuring, {bubble.tag_samples} of {FORCED_SAMPLES} samples known")
        self._remember(bubble.costs)
        if self._policy == "bts":
            assert self._exact is not None
            choice = self._exact.choose(bubble.position)
            verb = "TAG: finish in" if choice.tag else "skip: finish in"
            other = "when skipped" if choice.tag else "at best with TAG"
            otherwise = _seconds(choice.skip_finish if choice.tag else choice.tag_finish)
            return Decision(choice.tag, f"{verb} {_seconds(choice.finish)} against {otherwise} {other}")
        assert self._planner is not None
        plan = self._planner.plan(bubble.position, stale_left=bubble.stale_left)
        proof = ", proved optimal" if plan.finish == plan.bound else f", at least {_seconds(plan.bound)}"
        if not plan.tags:
            return Decision(False, f"skip: finish in {_seconds(plan.finish)}{proof}")
        how = "back to back" if plan.sticky else "one a bubble"
        against = f" against {_seconds(plan.skip_finish)} when skipped" if plan.skip_finish is not None else ""
        reason = f"TAG: {plan.tags} more {how}, finish in {_seconds(plan.finish)}{proof}{against}"
        return Decision(True, reason, plan.tags - 1, plan.sticky)

    def _remember(self, costs: StepCosts) -> None:
        if costs == self._costs:
            return
        self._costs = costs
        options = {"by_index": self._by_index, "after_step": self._after_step}
        self._exact = ExactSearch(costs, **options) if self._policy == "bts" else None
        self._planner = Planner(costs, self._size, **options) if self._policy == "bts_plus" else None


def _seconds(ticks: int) -> str:
    return f"{ticks / 1e6:.4g} s"
