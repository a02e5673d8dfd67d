"""The only loop: events of an executor go to the scheduler, its commands go back, both go into the trace.

The same loop drives every executor. Invariant: every wait has a deadline and names what it waits for.
"""

from __future__ import annotations

from typing import Protocol

from digenrl.errors import RunFailed, WorkerError
from digenrl.scheduling.commands import StopRun, WorkerCommand
from digenrl.scheduling.events import Event, RunStarted
from digenrl.scheduling.scheduler import Scheduler
from digenrl.trace.record import TraceWriter


class Executor(Protocol):
    """Carries commands out and reports events; the clock is its own."""

    def now_us(self) -> int:
        """Microseconds since the run began."""
        ...

    def submit(self, command: WorkerCommand) -> None:
        """Start a command; returns at once."""
        ...

    def next_event(self, timeout_s: float) -> Event | None:
        """The next event, or None when nothing happened for ``timeout_s`` seconds."""
        ...


def drive(scheduler: Scheduler, executor: Executor, trace: TraceWriter, *, command_timeout_s: float) -> None:
    """Run the schedule to its end. Raises RunFailed when it stops early, WorkerError when nothing happens in time."""
    event: Event | None = RunStarted(at_us=executor.now_us())
    while event is not None:
        commands = scheduler.handle(event)
        trace.record(event, commands)
        for command in commands:
            if isinstance(command, StopRun):
                raise RunFailed(
                    f"The run was stopped: {command.reason}.",
                    why="Going on would train on nothing, or worse.",
                    fix="Look at metrics.jsonl for the first bad step; a smaller learning rate or float32 often helps.",
                )
            executor.submit(command)
        if scheduler.finished:
            return
        event = executor.next_event(command_timeout_s)
    running = [str(w.running) for w in scheduler.state.workers.values() if w.running]
    raise WorkerError(
        f"Nothing happened for {command_timeout_s:g} s.",
        why=f"Waiting for: {'; '.join(running) or 'nothing'}.",
        fix="Look at the worker's log; a longer command needs a longer deadline.",
    )
