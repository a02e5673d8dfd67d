"""A schedule that is played by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from digenrl.ids import MicroBatchId, StepOutcome, WorkerId
from digenrl.scheduling.commands import Command, OptimizerStep, StopRun, WorkerCommand
from digenrl.scheduling.events import CommandFailed, Event, Finished, RunStarted, WorkerLost
from digenrl.scheduling.scheduler import Scheduler
from digenrl.scheduling.settings import SchedulerSettings


class Hand:
    """Has every worker's command in view, and ends the one that a test names."""

    def __init__(self, setup: SchedulerSettings) -> None:
        self.scheduler = Scheduler(setup)
        self.at: dict[WorkerId, WorkerCommand] = {}
        """What each worker is doing."""
        self.log: list[Command] = []
        self._now = 0
        self.tell(RunStarted(at_us=0))

    @property
    def now(self) -> int:
        """A new instant."""
        self._now += 1
        return self._now

    def wait(self, us: int) -> None:
        """Let time pass."""
        self._now += us

    def tell(self, *events: Event) -> list[Command]:
        """Events of one instant, and the commands that they lead to."""
        for event in events:
            if isinstance(event, Finished | CommandFailed):
                self.at.pop(event.command.worker)
            elif isinstance(event, WorkerLost):
                self.at.pop(event.worker, None)
        commands = self.scheduler.handle(*events)
        self.log += commands
        self.at |= {command.worker: command for command in commands if not isinstance(command, StopRun)}
        return commands

    def finished(self, worker: WorkerId) -> Finished:
        """The event that ends a worker's command."""
        command = self.at[worker]
        outcome = StepOutcome.APPLIED if isinstance(command, OptimizerStep) else None
        return Finished(at_us=self.now, command=command, outcome=outcome)

    def refused(self, worker: WorkerId) -> CommandFailed:
        """The event that a worker has not begun with its command."""
        return CommandFailed(at_us=self.now, command=self.at[worker], error="gone", untouched=True)

    def finish(self, worker: WorkerId, *, until: type[Command] | None = None) -> list[Command]:
        """End a worker's command, or one after the other until it gets one of a kind."""
        commands = self.tell(self.finished(worker))
        while until is not None and not isinstance(self.at[worker], until):
            commands = self.tell(self.finished(worker))
        return commands

    def finish_all(self) -> None:
        """Go on to the end, always with the worker that has waited longest."""
        while self.at:
            self.finish(next(iter(self.at)))
            assert len(self.log) < 1000, "the run does not end"

    def commands(self, *kinds: type[Command]) -> list[Any]:
        """All commands of these kinds so far."""
        return [command for command in self.log if isinstance(command, kinds)]

    def stage(self, micro_batch: MicroBatchId) -> str:
        """Where a micro-batch is."""
        return str(self.scheduler.state.steps[micro_batch.step].stages[micro_batch.index])


@pytest.fixture
def play() -> Callable[..., Hand]:
    """A function from settings, of which every test gives the ones that matter to it, to a run that has just started."""

    def started(**changes: Any) -> Hand:
        generators = tuple(WorkerId(f"generator-{index}") for index in range(changes.pop("replicas", 1)))
        small: dict[str, Any] = {
            "steps": 1,
            "micro_batches": 2,
            "generators": generators,
            "trainer": WorkerId("trainer"),
            "scoring": "inline",
            "max_attempts": 1,
        }
        return Hand(SchedulerSettings(**{**small, **changes}))

    return started
