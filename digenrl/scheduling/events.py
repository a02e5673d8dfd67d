"""What executors report to the scheduler. Time arrives here, as whole microseconds since the run began."""

from __future__ import annotations

from dataclasses import dataclass

from digenrl.ids import MicroBatchId, StepOutcome, WorkerId
from digenrl.scheduling.commands import WorkerCommand


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted:
    """All workers are up and hold version 0, or the version that the run resumes from.

    Where there are ``SchedulerSettings.stale_claims`` they hold the version before that one.
    """

    at_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A worker has carried out its command."""

    at_us: int
    command: WorkerCommand
    outcome: StepOutcome | None = None
    """Of an OptimizerStep; None for every other command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandFailed:
    """A worker could not carry out its command and is alive; the command is tried again, on any worker."""

    at_us: int
    command: WorkerCommand
    error: str = ""
    untouched: bool = False
    """The command never began: what it works on is gone, or the worker refused before it did anything. Not counted as an
    attempt, and harmless whatever the command is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost:
    """A worker is gone, with the command that it was doing. What it had finished is still there."""

    at_us: int
    worker: WorkerId
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJoined:
    """A worker is back, or new, and holds no version yet: it loads the current one before it gets work."""

    at_us: int
    worker: WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOverdue:
    """A worker has been at its command for much longer than such commands take; it is not given up."""

    at_us: int
    worker: WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryLost:
    """A generated micro-batch is gone (a node took its objects with it); its scores are discarded with it.

    One that is being scored or accumulated is given back when that ends; accumulated all the same, it needs nothing more.
    """

    at_us: int
    micro_batch: MicroBatchId


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditioningLost:
    """The encoded prompts of a step are gone (a node took them with it); they are encoded again."""

    at_us: int
    step: int


Event = RunStarted | Finished | CommandFailed | WorkerLost | WorkerJoined | WorkerOverdue | TrajectoryLost | ConditioningLost
