"""What training needs of the workers, wherever they are: one process (inline.py) or a cluster (ray/)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from digenrl.driver import Executor
from digenrl.ids import MicroBatchId
from digenrl.runtime.build import Start
from digenrl.runtime.interrupt import Interrupt
from digenrl.runtime.journal import Journal
from digenrl.scheduling.commands import (
    Accumulate,
    Encode,
    Evaluate,
    Generate,
    OptimizerStep,
    SaveCheckpoint,
    Score,
    SwitchMode,
    SyncWeights,
    WorkerCommand,
)
from digenrl.scheduling.scheduler import Scheduler
from digenrl.scheduling.settings import SchedulerSettings


class RunExecutor(Executor, Protocol):
    """An executor that trains real weights, on its own or along a record (replay.py)."""

    @property
    def policy_version(self) -> int:
        """Completed RL steps."""
        ...

    def digests(self) -> dict[str, str]:
        """Digests of the trainer's parameters, optimizer state and average."""
        ...

    def finish(self) -> None:
        """The run is over, or was stopped: save what may be saved. Called once, with no event afterwards."""
        ...

    def ahead(self, command: WorkerCommand) -> bool:
        """Whether a command of a record is done as soon as it is given, rather than when it is due to end."""
        ...

    def forget(self, micro_batch: MicroBatchId) -> None:
        """A record says that the trajectory of a micro-batch was lost."""
        ...

    def forget_conditioning(self, step: int) -> None:
        """A record says that the encoded prompts of a step were lost."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run, wired."""

    scheduler: Scheduler
    executor: RunExecutor


class System(Protocol):
    """All workers of a run, loaded."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a user should know before the run."""
        ...

    def describe(self) -> str:
        """One line for the console: what is trained, and where."""
        ...

    def settings(self, start: Start) -> SchedulerSettings:
        """The schedule that the recipe asks for, with these workers."""
        ...

    def begin(self, settings: SchedulerSettings, start: Start, journal: Journal, interrupt: Interrupt, checkpoints: Path) -> Run:
        """Connect the workers to a scheduler, at the place where the run begins."""
        ...


_TIMING_NAMES: dict[type[WorkerCommand], str] = {
    Encode: "encode",
    Generate: "generate",
    Score: "score",
    Accumulate: "update",
    SwitchMode: "switch",
    OptimizerStep: "optimizer",
    SyncWeights: "sync",
    SaveCheckpoint: "save",
    Evaluate: "evaluate",
}


def timing_name(command: WorkerCommand) -> str:
    """The name of a kind of command in ``timing_s/*``."""
    return _TIMING_NAMES[type(command)]
