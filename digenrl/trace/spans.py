"""What every worker did, rebuilt from a trace alone. No scheduler is run, so the trace of another version can be looked at too.

Invariants: the spans of one worker do not overlap; its spans and gaps together are the whole time from the first event to the
last; a micro-batch leaves its queue when the command that works on it is given (while the trainer switches its mode for that
command, it still counts as waiting).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Literal

from digenrl.errors import ConfigError
from digenrl.ids import MicroBatchId, StepOutcome, WorkerId
from digenrl.scheduling.commands import (
    Accumulate,
    Command,
    Encode,
    Evaluate,
    Generate,
    OptimizerStep,
    SaveCheckpoint,
    Score,
    StopRun,
    SwitchMode,
    SyncWeights,
    WorkerCommand,
)
from digenrl.scheduling.events import (
    CommandFailed,
    ConditioningLost,
    Event,
    Finished,
    TrajectoryLost,
    WorkerJoined,
    WorkerLost,
    WorkerOverdue,
)
from digenrl.scheduling.settings import SchedulerSettings
from digenrl.trace.queues import Queues
from digenrl.trace.record import Entry, Trace
from digenrl.trace.timeline import Gap, Instant, Kind, Mark, QueueLengths, Span, Spans

_KINDS: dict[type[WorkerCommand], Kind] = {
    Encode: Kind.ENCODE,
    Generate: Kind.GENERATE,
    Score: Kind.SCORE,
    Accumulate: Kind.UPDATE,
    SwitchMode: Kind.SWITCH,
    OptimizerStep: Kind.OPTIMIZER,
    SyncWeights: Kind.SYNC,
    SaveCheckpoint: Kind.SAVE,
    Evaluate: Kind.EVALUATE,
}


def spans(trace: Trace) -> Spans:
    """The timeline of a trace. Raises ConfigError at the first instant that contradicts what came before."""
    reader = _Reader(trace.settings)
    for number, entry in enumerate(trace.entries):
        try:
            reader.take(entry)
        except ConfigError as error:
            what = f"Instant {number} of the trace: {error.what}"
            raise ConfigError(what, fix="The trace was edited, or written by another version of DigenRL.") from error
    return reader.close(trace.source)


class _Reader:
    """Takes the entries of a trace in, one by one."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self._settings = settings
        self._start_us: int | None = None
        self._now_us = 0
        self._version = settings.first_version
        self._running: dict[WorkerId, tuple[int, WorkerCommand]] = {}
        self._authors: dict[MicroBatchId, Generate] = {}
        """Who generated a trajectory, and with which version; of open steps only."""
        self._encoders: dict[int, WorkerId] = {}
        """Who encoded the prompts of a step, as long as they are there."""
        self._absences: dict[WorkerId, list[tuple[int, int | None]]] = {worker: [] for worker in settings.workers}
        self._waiting = Queues(settings)
        self._spans: list[Span] = []
        self._instants: list[Instant] = []
        self._queues: list[QueueLengths] = []

    def take(self, entry: Entry) -> None:
        """The events and commands of one instant."""
        # As for the scheduler, what was lost was there before this instant; what works on it ends in it or later.
        for event in sorted(entry.events, key=lambda event: not isinstance(event, TrajectoryLost | ConditioningLost)):
            if event.at_us < self._now_us:
                raise ConfigError(f"{event} lies before {self._now_us} us, the time of the last event.")
            self._event(event)
        # Events of one instant share its time in a simulation; a real executor may report a few at once.
        self._now_us = max((event.at_us for event in entry.events), default=self._now_us)
        if self._start_us is None:
            self._start_us = self._now_us
        for command in entry.commands:
            self._command(command)
        self._sample_queues()

    def close(self, source: str) -> Spans:
        """Everything that was found, after the last entry."""
        for worker in list(self._running):
            self._end(worker, self._now_us, "open")
        order = {worker: index for index, worker in enumerate(self._settings.workers)}
        found = sorted(self._spans, key=lambda span: (span.start_us, order[span.worker], span.end_us))
        start = self._start_us or 0
        return Spans(
            settings=self._settings,
            source=source,
            start_us=start,
            end_us=self._now_us,
            spans=tuple(found),
            gaps=tuple(self._gaps(found, start)),
            instants=tuple(self._instants),
            queues=tuple(self._queues),
        )

    def _sample_queues(self) -> None:
        lengths = (self._version, *self._waiting.lengths(self._version))
        last = self._queues[-1] if self._queues else None
        if last is None or (last.policy_version, last.pending, last.scoring, last.update) != lengths:
            version, pending, scoring, update = lengths
            self._queues.append(
                QueueLengths(at_us=self._now_us, policy_version=version, pending=pending, scoring=scoring, update=update)
            )

    def _event(self, event: Event) -> None:
        match event:
            case Finished():
                self._finish(event)
            case CommandFailed():
                self._expect(event.command)
                self._give_back(self._end(event.command.worker, event.at_us, "failed"), untouched=event.untouched)
            case WorkerLost():
                absences = self._absences_of(event.worker)
                if absences and absences[-1][1] is None:
                    raise ConfigError(f"{event.worker} was lost, and had been lost before.")
                absences.append((event.at_us, None))
                text = f"{event.worker} was lost{_because(event.error)}"
                self._instants.append(Instant(at_us=event.at_us, mark=Mark.WORKER_LOST, worker=event.worker, text=text))
                if event.worker in self._running:
                    self._give_back(self._end(event.worker, event.at_us, "lost"))
            case WorkerJoined():
                absences = self._absences_of(event.worker)
                if not absences or absences[-1][1] is not None:
                    raise ConfigError(f"{event.worker} joined, and was not lost before.")
                absences[-1] = (absences[-1][0], event.at_us)
                text = f"{event.worker} joined"
                self._instants.append(Instant(at_us=event.at_us, mark=Mark.WORKER_JOINED, worker=event.worker, text=text))
            case WorkerOverdue():
                self._absences_of(event.worker)
                text = f"{event.worker} is overdue"
                self._instants.append(Instant(at_us=event.at_us, mark=Mark.WORKER_OVERDUE, worker=event.worker, text=text))
            case TrajectoryLost():
                self._lose_trajectory(event)
            case ConditioningLost():
                if event.step not in self._encoders:
                    raise ConfigError(f"the encoded prompts of step {event.step} were lost, and there were none.")
                worker, text = self._encoders.pop(event.step), f"the encoded prompts of step {event.step} were lost"
                self._instants.append(Instant(at_us=event.at_us, mark=Mark.CONDITIONING_LOST, worker=worker, text=text))

    def _lose_trajectory(self, event: TrajectoryLost) -> None:
        lost = event.micro_batch
        self._waiting.lose(lost)
        worker = self._authors[lost].worker
        text = f"the trajectory of {lost} was lost"
        self._instants.append(Instant(at_us=event.at_us, mark=Mark.TRAJECTORY_LOST, worker=worker, micro_batch=lost, text=text))

    def _finish(self, event: Finished) -> None:
        command = event.command
        self._expect(command)
        self._end(command.worker, event.at_us, "finished")
        if isinstance(command, Generate | Score | Accumulate):
            self._waiting.finish(command)
        elif isinstance(command, Encode):
            self._encoders[command.step] = command.worker
        elif isinstance(command, OptimizerStep) and command.update + 1 == self._settings.updates_per_rollout:
            self._waiting.forget(self._version)
            self._authors = {item: made for item, made in self._authors.items() if item.step > self._version}
            self._version += 1
            note = "" if event.outcome in (None, StepOutcome.APPLIED) else f", the same weights: the step was {event.outcome}"
            text = f"version {self._version}{note}"
            at, mark, version = event.at_us, Mark.PUBLISHED, self._version
            self._instants.append(Instant(at_us=at, mark=mark, worker=command.worker, policy_version=version, text=text))

    def _command(self, command: Command) -> None:
        if isinstance(command, StopRun):
            self._instants.append(Instant(at_us=self._now_us, mark=Mark.STOPPED, text=f"stopped: {command.reason}"))
            return
        absences = self._absences_of(command.worker)
        if command.worker in self._running or (absences and absences[-1][1] is None):
            raise ConfigError(f"{command.worker} gets {command} while it is busy or lost.")
        self._running[command.worker] = (self._now_us, command)
        if isinstance(command, Generate | Score | Accumulate):
            self._waiting.start(command)
        if isinstance(command, Generate):
            self._authors[command.micro_batch] = command

    def _expect(self, command: WorkerCommand) -> None:
        if self._running.get(command.worker, (0, None))[1] != command:
            raise ConfigError(f"the end of {command}, which {command.worker} was not doing.")

    def _end(self, worker: WorkerId, at_us: int, ended: Literal["finished", "failed", "lost", "open"]) -> WorkerCommand:
        start, command = self._running.pop(worker)
        version, stale, kind = self._version, False, _KINDS[type(command)]
        if isinstance(command, Generate | Score | Accumulate):
            author = command if isinstance(command, Generate) else self._authors.get(command.micro_batch)
            version = author.policy_version if author is not None else version
            stale = version < command.micro_batch.step
        elif isinstance(command, SyncWeights | Evaluate | SaveCheckpoint):
            version = command.policy_version
        if isinstance(command, Generate):
            tag = worker == self._settings.trainer and not self._settings.one_pool
            kind = Kind.TAG if tag else Kind.STALE_GENERATE if stale else kind
        self._spans.append(
            Span(
                worker=worker,
                kind=kind,
                start_us=start,
                end_us=at_us,
                command=command,
                policy_version=version,
                stale=stale,
                ended=ended,
            )
        )
        return command

    def _give_back(self, command: WorkerCommand, *, untouched: bool = False) -> None:
        if isinstance(command, Generate | Score) or (untouched and isinstance(command, Accumulate)):
            self._waiting.give_back(command)

    def _absences_of(self, worker: WorkerId) -> list[tuple[int, int | None]]:
        if worker not in self._absences:
            raise ConfigError(f"{worker} is no worker of this run.")
        return self._absences[worker]

    def _gaps(self, found: Sequence[Span], start_us: int) -> Iterator[Gap]:
        """What is left of every worker's time."""
        training_end = self._now_us
        if self._version >= self._settings.steps:
            training_end = max((i.at_us for i in self._instants if i.mark is Mark.PUBLISHED), default=start_us)
        taken: dict[WorkerId, list[tuple[int, int]]] = defaultdict(list)
        for span in found:
            taken[span.worker].append((span.start_us, span.end_us))
        for worker in self._settings.workers:
            why: Literal["bubble", "idle"] = "bubble" if worker == self._settings.trainer else "idle"
            absences = [(lost, self._now_us if joined is None else joined) for lost, joined in self._absences[worker]]
            yield from (Gap(worker=worker, start_us=a, end_us=b, why="lost") for a, b in absences if b > a)
            cursor = start_us
            for a, b in [*sorted([*taken[worker], *absences]), (self._now_us, self._now_us)]:
                if (end := min(a, training_end)) > cursor:
                    yield Gap(worker=worker, start_us=cursor, end_us=end, why=why)
                if a > (begin := max(cursor, training_end)):
                    yield Gap(worker=worker, start_us=begin, end_us=a, why="done")
                cursor = max(cursor, b)


def _because(error: str) -> str:
    return f": {error}" if error else ""
