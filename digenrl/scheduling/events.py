"""What executors report to the scheduler. Time arrives here, as whole microseconds since the run began."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from digenrl.scheduling.commands import WorkerCommand


class StepOutcome(StrEnum):
    """How an optimizer step ended. The policy version advances in all three cases."""

    APPLIED = "applied"
    EMPTY = "empty"
    """Z = 0: no valid pair to learn from; weights and optimizer unchanged."""
    VOIDED = "voided"
    """The gradient was not finite; weights and optimizer unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted:
    """All workers are up and hold version 0 (or the version that the run resumes from)."""

    at_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A worker has carried out its command."""

    at_us: int
    command: WorkerCommand
    outcome: StepOutcome | None = None
    """Of an OptimizerStep; None for every other command."""


Event = RunStarted | Finished
