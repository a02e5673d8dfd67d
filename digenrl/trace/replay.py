"""Replay: feed a recorded run's events to a fresh scheduler and compare its commands with the recorded ones."""

from __future__ import annotations

from digenrl.errors import ProtocolError
from digenrl.scheduling.scheduler import Scheduler
from digenrl.trace.record import Trace


def replay(trace: Trace) -> int:
    """Number of commands that were replayed. Raises ProtocolError at the first instant that cannot be, or leads elsewhere."""
    return replay_to_the_end(trace)[0]


def replay_to_the_end(trace: Trace) -> tuple[int, bool]:
    """As ``replay``, and whether the record reaches the end of the run (it does not when the run was killed)."""
    scheduler = Scheduler(trace.settings)
    count = 0
    for number, entry in enumerate(trace.entries):
        try:
            commands = tuple(scheduler.handle(*entry.events))
        except ProtocolError as error:
            raise ProtocolError(f"Instant {number}: {error.what}", why=error.why, fix=error.fix) from error
        if commands != entry.commands:
            raise ProtocolError(
                f"Instant {number} ({entry.events}) replays to other commands.",
                why=f"Recorded: {entry.commands}; now: {commands}.",
                fix="The trace was written by another version of DigenRL, or it was edited.",
            )
        count += len(commands)
    return count, scheduler.finished
