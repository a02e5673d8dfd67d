"""The only loop: events of an executor go to the scheduler, its commands go back, both go into the trace.

The same loop drives every executor. Invariant: every wait has a deadline and names what it waits for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from digenrl.errors import RunFailed, WorkerError
from digenrl.scheduling.commands import Command, StopRun, WorkerCommand
from digenrl.scheduling.events import Event, RunStarted
from digenrl.scheduling.scheduler import Scheduler


class Executor(Protocol):
    """Carries commands out and reports events; the clock is its own."""

    def now_us(self) -> int:
        """Microseconds since the run began."""
        ...

    def submit(self, command: WorkerCommand) -> None:
        """Start a command; returns at once."""
        ...

    def next_events(self, timeout_s: float) -> Sequence[Event]:
        """What happened at the next instant at which anything did; empty when nothing did for ``timeout_s`` seconds."""
        ...


class Recorder(Protocol):
    """Takes down what happened; trace.record.TraceWriter is one."""

    def record(self, events: Sequence[Event], commands: Sequence[Command]) -> None:
        """The events of one instant and the commands that the scheduler answered with."""
        ...


def drive(scheduler: Scheduler, executor: Executor, recorder: Recorder | None, *, command_timeout_s: float) -> None:
    """Run the schedule to its end. Raises RunFailed when it stops early, WorkerError when nothing happens in time."""
    events: Sequence[Event] = (RunStarted(at_us=executor.now_us()),)
    while events:
        commands = scheduler.handle(*events)
        if recorder is not None:
            recorder.record(events, commands)
        for command in commands:
            if isinstance(command, StopRun):
                raise RunFailed(
                    f"The run was stopped: {command.reason}.",
                    why="Going on would train on nothing, or worse.",
                    fix="Look at metrics.jsonl and trace.jsonl for the first thing that went wrong. Once it is mended, "
                    "`digenrl train --resume RUN` goes on from the newest checkpoint.",
                )
            executor.submit(command)
        if scheduler.finished:
            return
        events = executor.next_events(command_timeout_s)
    workers = scheduler.state.workers.values()
    waiting = [str(worker.running) for worker in workers if worker.running]
    lost = [str(worker.name) for worker in workers if not worker.alive]
    if not waiting and lost:
        waiting = [f"lost workers that nobody can stand in for to come back: {', '.join(lost)}"]
    raise WorkerError(
        f"Nothing happened for {command_timeout_s:g} s.",
        why=f"Waiting for: {'; '.join(waiting) or 'nothing'}.",
        fix="Look at the workers' logs; a longer command needs a longer deadline.",
    )
