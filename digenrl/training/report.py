"""What an optimizer step says of itself, and how the reports of several ranks and updates become one step's metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from digenrl.ids import StepOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Sums over some of a step's pairs, from which any share of them can be added up."""

    total: float
    squares: float = 0.0
    count: int = 0
    """Pairs; 0 for what is a total and not a mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one optimizer step did, as one rank saw it."""

    outcome: StepOutcome
    common: dict[str, float]
    """The same on all ranks."""
    sums: dict[str, Sums]
    """Of this rank's pairs."""

    @property
    def metrics(self) -> dict[str, float]:
        """Everything, by the name that the logs use."""
        return merged_metrics([self])


class Report(Protocol):
    """What is read of a StepReport; emulated workers have a stand-in."""

    @property
    def outcome(self) -> StepOutcome: ...  # noqa: D102

    @property
    def common(self) -> Mapping[str, float]: ...  # noqa: D102

    @property
    def sums(self) -> Mapping[str, Sums]: ...  # noqa: D102


def merged_metrics(reports: Sequence[Report]) -> dict[str, float]:
    """Metrics of an update from the reports of all ranks."""
    found: dict[str, float] = dict(reports[0].common)
    for name in dict.fromkeys(name for report in reports for name in report.sums):
        parts = [report.sums[name] for report in reports if name in report.sums]
        total, count = math.fsum(part.total for part in parts), sum(part.count for part in parts)
        if not count:
            found[name] = total
            continue
        mean = total / count
        if name.rpartition("/")[2] == "ratio":
            variance = max(0.0, math.fsum(part.squares for part in parts) / count - mean * mean)
            found |= {f"{name}_mean": mean, f"{name}_std": math.sqrt(variance)}
        else:
            found[name] = mean
    return found


def merged_updates(updates: Sequence[Sequence[Report]]) -> tuple[StepOutcome, dict[str, float]]:
    """Outcome and metrics of an RL step from the reports of all ranks of each of its updates.

    ``trained_pairs`` is a sum over updates; what else the ranks have in common (grad_norm, ...) is a mean. A step has changed
    something where one of its updates has.
    """
    found = merged_metrics([report for ranks in updates for report in ranks])
    commons = [ranks[0].common for ranks in updates]
    for name in dict.fromkeys(name for common in commons for name in common):
        values = [common[name] for common in commons if name in common]
        found[name] = math.fsum(values) / (1 if name == "trained_pairs" else len(values))
    outcomes = {ranks[0].outcome for ranks in updates}
    order = (StepOutcome.APPLIED, StepOutcome.VOIDED, StepOutcome.EMPTY)
    return next(outcome for outcome in order if outcome in outcomes), found
