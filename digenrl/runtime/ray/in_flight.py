"""Commands on their way: who is at what, and how answers of worker processes become the end of a command.

Invariants: a command ends once, whatever is answered twice or too late; an error is told apart by whose it is: the process's,
the input's (nothing was done), the recipe's (the run ends), or the work's (it is tried again; where other ranks wait for it
in the middle of theirs, they are all started anew).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from ray import ObjectRef
from ray.exceptions import ObjectLostError, OutOfMemoryError, RayActorError, RayError, RaySystemError, RayTaskError

from digenrl.errors import DigenError, WorkerError
from digenrl.ids import WorkerId
from digenrl.runtime.ray.placement import DRIVER
from digenrl.runtime.ray.pool import Inbox, Process, WorkerPool, short, worker_exception
from digenrl.scheduling.commands import Generate, SyncWeights, WorkerCommand
from digenrl.scheduling.events import Event

Call = tuple[Process | None, "ObjectRef[Any] | Future[Any]"]
"""Who was called (None: this process), and what it will answer."""

_DOUBT_S = 3.0

GOES_ON: Any = object()
"""What ``finish`` returns when its command is not over yet."""


@dataclass(slots=True, eq=False)
class Running:
    """A command that a worker is at."""

    command: WorkerCommand
    began_us: int
    answers: list[Any]
    left: int
    finish: Callable[[list[Any]], Any]
    """Called with all answers, in order of the calls. Returns the outcome of an OptimizerStep, None, or GOES_ON."""
    doubted: bool = False
    """An error has come that may be the echo of a death."""


class Outcomes:
    """What becomes of commands; each method returns events."""

    def finished(self, running: Running, outcome: Any) -> Sequence[Event]:
        """All calls were answered."""
        raise NotImplementedError

    def failed(self, running: Running, error: str) -> Sequence[Event]:
        """The work went wrong in a worker that is well."""
        raise NotImplementedError

    def input_lost(self, running: Running, lost: str, error: str) -> Sequence[Event]:
        """Nothing was done: an object (its reference in hex; empty if unknown) is gone."""
        raise NotImplementedError

    def resend(self, running: Running, process: Process, error: str) -> Sequence[Event]:
        """Weights did not arrive whole."""
        raise NotImplementedError


class InFlight:
    """The commands that are being carried out, one for each worker."""

    def __init__(self, pool: WorkerPool, inbox: Inbox, outcomes: Outcomes, warn: Callable[[str, str], None]) -> None:
        self._pool = pool
        self._inbox = inbox
        self._outcomes = outcomes
        self._warn = warn
        self._running: dict[WorkerId, Running] = {}

    def of(self, worker: WorkerId) -> Running | None:
        """What a worker is at."""
        return self._running.get(worker)

    def forget(self, worker: WorkerId) -> None:
        """Whatever is still answered about a worker's command counts for nothing."""
        self._running.pop(worker, None)

    def run(self, command: WorkerCommand, calls: Sequence[Call], finish: Callable[[list[Any]], Any], *, now_us: int) -> None:
        """Have ``finish`` called with all answers, and end the command; or have it fail once.

        A command that goes on with other calls keeps the time at which it began.
        """
        known = self._running.get(command.worker)
        began_us = known.began_us if known is not None and known.command is command else now_us
        running = Running(command, began_us, [None] * len(calls), len(calls), finish)
        self._running[command.worker] = running
        for place, (process, answer) in enumerate(calls):
            future = answer if isinstance(answer, Future) else answer.future()
            self._inbox.watch(future, self._handler(running, place, process))

    def _handler(self, running: Running, place: int, process: Process | None) -> Callable[[Future[Any]], Sequence[Event]]:
        incarnation = process.incarnation if process is not None else 0

        def answered(future: Future[Any]) -> Sequence[Event]:
            if self._running.get(running.command.worker) is not running:
                return ()  # given up meanwhile
            error = future.exception()
            if error is not None:
                return self._wrong(running, process, incarnation, error)
            running.answers[place] = future.result()
            running.left -= 1
            if running.left:
                return ()
            outcome = running.finish(running.answers)
            if outcome is GOES_ON:
                return ()
            self.forget(running.command.worker)
            return self._outcomes.finished(running, outcome)

        return answered

    def _wrong(self, running: Running, process: Process | None, incarnation: int, error: BaseException) -> Sequence[Event]:
        command = running.command
        name = process.rank.name if process is not None else str(DRIVER)
        cause = error.cause if isinstance(error, RayTaskError) else error
        if isinstance(error, ObjectLostError):
            return self._input_lost(running, process, error.object_ref_hex, short(error))
        if isinstance(error, RayTaskError) and isinstance(cause, RayError):
            # What it was given never came to be: whoever was to make it died.
            return self._input_lost(running, process, "", short(error))
        if isinstance(error, RayActorError | OutOfMemoryError | RaySystemError):
            return self._gone(running, process, incarnation, short(error))
        if isinstance(cause, WorkerError) and isinstance(command, SyncWeights) and process is not None:
            self._warn(f"load-{command.policy_version}-{name}", f"{name}: {cause.what} It is sent again.")
            self.forget(command.worker)
            return self._outcomes.resend(running, process, cause.what)
        if isinstance(cause, DigenError):
            raise worker_exception(name, describe(command), error)
        if len(self._pool.processes(command.worker)) > 1 and not running.doubted:
            # The ranks of a crew fail when one of them dies; the death itself says more, and is heard of in a moment.
            running.doubted = True
            self._inbox.after(_DOUBT_S, lambda _: self._still(running, process, incarnation, error))
            return ()
        self._warn(f"{name}-{describe(command)}-{id(running)}", f"{name} failed while doing {describe(command)}:\n{error}")
        if process is not None and _waited_for(process, command):
            return self._gone(running, process, incarnation, short(error))
        self.forget(command.worker)
        return self._outcomes.failed(running, f"{name}: {short(error)}")

    def _input_lost(self, running: Running, process: Process | None, lost: str, error: str) -> Sequence[Event]:
        self.forget(running.command.worker)
        if process is not None and _waited_for(process, running.command):
            # A rank that still had the input waits for this one, in the middle of its work. Told next: one thing at a time.
            incarnation = process.incarnation
            self._inbox.after(0.0, lambda _: self._pool.lose(process, error) if process.incarnation == incarnation else ())
        return self._outcomes.input_lost(running, lost, error)

    def _still(self, running: Running, process: Process | None, incarnation: int, error: BaseException) -> Sequence[Event]:
        """The error is what it seemed, unless its worker was lost meanwhile."""
        if self._running.get(running.command.worker) is not running:
            return ()
        return self._wrong(running, process, incarnation, error)

    def _gone(self, running: Running, process: Process | None, incarnation: int, error: str) -> Sequence[Event]:
        assert process is not None, "this process calls itself without Ray"
        events = list(self._pool.lose(process, error)) if process.incarnation == incarnation else []
        if self._running.get(running.command.worker) is running:
            # Its own worker is well: a helper of an evaluation was lost.
            self.forget(running.command.worker)
            events.extend(self._outcomes.failed(running, f"{process.rank.name}: {error}"))
        return events


def _waited_for(process: Process, command: WorkerCommand) -> bool:
    """Whether others wait for what this process did not do, so that none of them can be given anything else.

    A trainer's ranks make no version without each other, and end the run with the command.
    """
    return isinstance(command, Generate) and process.rank.shard > 1 and "train" not in process.rank.roles


def describe(command: WorkerCommand) -> str:
    """``Generate 3.2``, ``Encode 3``."""
    about = getattr(command, "micro_batch", getattr(command, "step", getattr(command, "policy_version", "")))
    return f"{type(command).__name__} {about}".strip()
