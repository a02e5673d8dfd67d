"""What a run is doing at this moment, and how well the last step used its workers; kept up from what goes into the trace.

Invariants: every worker's time is split without rest into kinds of work, waiting, ``done`` (no step is left) and lost, at the
same instants as in trace.spans, so that shares are the ones that trace.utilization finds afterwards. Taking in a record costs
what its events cost, whatever the number of workers; the end of a step and a snapshot cost one look at each worker.
``snapshot`` may be called from another thread; no lock is held while other recorders write.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from threading import Lock

from digenrl.driver import Recorder
from digenrl.ids import MicroBatchId, WorkerId
from digenrl.metrics.live import LiveState, QueueView, WorkerView
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
from digenrl.scheduling.events import CommandFailed, Event, Finished, WorkerJoined, WorkerLost, WorkerOverdue
from digenrl.scheduling.scheduler import Scheduler
from digenrl.scheduling.settings import SchedulerSettings
from digenrl.trace.timeline import Kind, describe


class Absence(StrEnum):
    """What a worker without a command is at."""

    WAITING = "waiting"
    """A step is unfinished."""
    DONE = "done"
    LOST = "lost, restarting"


Doing = Kind | Absence

_WORK: dict[type[WorkerCommand], tuple[Kind, str]] = {
    Encode: (Kind.ENCODE, "encoding"),
    Generate: (Kind.GENERATE, "generating"),
    Score: (Kind.SCORE, "scoring"),
    Accumulate: (Kind.UPDATE, "updating with"),
    SwitchMode: (Kind.SWITCH, "switching"),
    OptimizerStep: (Kind.OPTIMIZER, "optimizing in"),
    SyncWeights: (Kind.SYNC, "loading weights of"),
    SaveCheckpoint: (Kind.SAVE, "saving"),
    Evaluate: (Kind.EVALUATE, "evaluating"),
}


class Watch:
    """A recorder that keeps an eye on the run, and hands everything on to other recorders."""

    def __init__(self, scheduler: Scheduler, recorders: Sequence[Recorder] = ()) -> None:
        self._scheduler = scheduler
        self._settings = settings = scheduler.settings
        self._recorders = tuple(recorders)
        self._lock = Lock()
        self._pools = _pools(settings)
        self._idle = Absence.WAITING if settings.first_version < settings.steps else Absence.DONE
        self._meters = {name: _Meter(self._idle) for name in settings.workers}
        self._start_us: int | None = None
        self._now_us = 0
        self._step_us = 0
        """When the step in training began; counts from the second one on."""
        self._authors: dict[MicroBatchId, Generate] = {}
        """Who generated what is not accumulated yet, and with which version."""
        self._accumulated: Counter[str] = Counter()
        """Micro-batches of the step so far: all, stale, by the trainer."""
        self._last_step: dict[str, float] = {}
        self._queues = QueueView()
        self._version = settings.first_version

    def record(self, events: Sequence[Event], commands: Sequence[Command]) -> None:
        """Take in one instant; the scheduler has answered it already."""
        for recorder in self._recorders:
            recorder.record(events, commands)
        with self._lock:
            if self._start_us is None:
                self._begin(max((event.at_us for event in events), default=0))
            # By time: what ended before a step did, and is reported with its end, belongs into that step.
            for event in sorted(events, key=lambda event: event.at_us):
                self._event(event)
            self._now_us = max((event.at_us for event in events), default=self._now_us)
            for command in commands:
                if not isinstance(command, StopRun):
                    self._meters[command.worker].turn(self._kind(command), self._now_us, command)
            self._version = self._scheduler.state.policy_version
            self._queues = self._look()

    def step_metrics(self, now_us: int) -> dict[str, float]:
        """How the step in training has used its workers, from the end of the step before until now.

        To be called when its last optimizer step has been carried out. ``bubble_fraction/POOL``: share of the time, in which
        its workers were there, that they waited; not given in a run of one worker, which waits for nobody. ``stale_fraction``
        and, where there is a trainer of its own, ``tag_fraction``: shares of the micro-batches accumulated.
        """
        with self._lock:
            return self._metrics(max(now_us, self._now_us))

    def busy_us(self, worker: WorkerId) -> Mapping[Kind, int]:
        """Microseconds of a worker by kind of work, from the start to the last record."""
        with self._lock:
            return {kind: us for kind, us in self._meters[worker].spent(self._now_us).items() if isinstance(kind, Kind)}

    def snapshot(self, now_us: int) -> LiveState:
        """The run as it is at ``now_us``, by the executor's clock."""
        with self._lock:
            now, settings = max(now_us, self._now_us), self._settings
            start = now if self._start_us is None else self._start_us
            last = self._last_step
            return LiveState(
                step=self._version,
                steps=settings.steps,
                workers=tuple(self._view(name, pool, now) for pool, names in self._pools.items() for name in names),
                queues=self._queues,
                elapsed_s=(now - start) / 1e6,
                left_s=self._left_s(start, now),
                bubbles=tuple((pool, last[_bubble(pool)]) for pool in self._pools if _bubble(pool) in last),
                stale_fraction=last.get("stale_fraction") if settings.stale_quota else None,
                tag_fraction=last.get("tag_fraction") if settings.tag != "never" else None,
            )

    def _begin(self, at_us: int) -> None:
        self._start_us = at_us
        for meter in self._meters.values():
            meter.since_us = at_us

    def _event(self, event: Event) -> None:
        match event:
            case Finished():
                self._meters[event.command.worker].turn(self._idle, event.at_us)
                self._finish(event.command, event.at_us)
            case CommandFailed():
                self._meters[event.command.worker].turn(self._idle, event.at_us)
            case WorkerLost():
                self._meters[event.worker].turn(Absence.LOST, event.at_us)
            case WorkerJoined():
                self._meters[event.worker].turn(self._idle, event.at_us)
            case WorkerOverdue():
                self._meters[event.worker].overdue = True

    def _finish(self, command: WorkerCommand, at_us: int) -> None:
        if isinstance(command, Generate):
            self._authors[command.micro_batch] = command
        elif isinstance(command, Accumulate):
            author = self._authors.pop(command.micro_batch)
            self._accumulated["all"] += 1
            self._accumulated["stale"] += author.policy_version < command.micro_batch.step
            self._accumulated["tag"] += self._by_trainer(author)
        elif isinstance(command, OptimizerStep) and command.update + 1 == self._settings.updates_per_rollout:
            self._close_step(command.step, at_us)

    def _close_step(self, step: int, at_us: int) -> None:
        self._last_step = self._metrics(at_us)
        self._step_us = at_us
        self._accumulated.clear()
        for meter in self._meters.values():
            meter.close_step(at_us)
        if step + 1 == self._settings.steps:
            self._idle = Absence.DONE
            for meter in self._meters.values():
                if meter.doing is Absence.WAITING:
                    meter.turn(Absence.DONE, at_us)

    def _metrics(self, now_us: int) -> dict[str, float]:
        found: dict[str, float] = {}
        for pool, names in self._pools.items() if len(self._meters) > 1 else ():
            spent = sum((self._meters[name].in_step(now_us) for name in names), Counter[Doing]())
            present = spent.total() - spent[Absence.LOST]
            if present:
                found[_bubble(pool)] = spent[Absence.WAITING] / present
        if count := self._accumulated["all"]:
            found["stale_fraction"] = self._accumulated["stale"] / count
            if not self._settings.one_pool:
                found["tag_fraction"] = self._accumulated["tag"] / count
        return found

    def _kind(self, command: WorkerCommand) -> Kind:
        if isinstance(command, Generate):
            if self._by_trainer(command):
                return Kind.TAG
            return Kind.STALE_GENERATE if command.policy_version < command.micro_batch.step else Kind.GENERATE
        return _WORK[type(command)][0]

    def _by_trainer(self, command: Generate) -> bool:
        return command.worker == self._settings.trainer and not self._settings.one_pool

    def _look(self) -> QueueView:
        """A copy of what is needed of the scheduler's state, which must not be read from another thread."""
        settings, steps = self._settings, self._scheduler.state.steps
        step, following = steps.get(self._version), steps.get(self._version + 1)
        if step is None:
            return QueueView()
        return QueueView(
            pending=step.pending,
            scoring=len(step.scoring_queue),
            update=len(step.update_queue),
            accumulated=step.accumulated,
            total=settings.micro_batches,
            stale_used=following.stale_used if following is not None else 0,
            stale_quota=settings.stale_quota if self._version + 1 < settings.steps else 0,
        )

    def _view(self, name: WorkerId, pool: str, now_us: int) -> WorkerView:
        meter = self._meters[name]
        state, shared = (str(meter.doing),) * 2 if meter.command is None else self._words(meter.command)
        late = "overdue: " if meter.overdue else ""
        recent = meter.recently(now_us)
        present = recent.total() - recent[Absence.LOST]
        busy = sum(us for doing, us in recent.items() if isinstance(doing, Kind))
        return WorkerView(
            name=name,
            pool=pool,
            state=late + state,
            shared_state=late + shared,
            for_s=max(0, now_us - meter.since_us) / 1e6,
            busy_fraction=busy / present if present else 0.0,
            trouble=meter.overdue or meter.doing is Absence.LOST,
        )

    def _words(self, command: WorkerCommand) -> tuple[str, str]:
        """What a command does, with and without the micro-batch that it does it to."""
        verb, note = _WORK[type(command)][1], ""
        if isinstance(command, SyncWeights) and command.worker == self._settings.trainer and not self._settings.one_pool:
            verb = "publishing"
        if isinstance(command, Generate):
            note = f" under version {command.policy_version}"
            note += ", stale" if command.policy_version < command.micro_batch.step else ""
        about = describe(command)
        shared = verb.removesuffix(" with") if isinstance(command, Generate | Score | Accumulate) else f"{verb} {about}"
        return f"{verb} {about}{note}", f"{shared}{note}"

    def _left_s(self, start_us: int, now_us: int) -> float | None:
        """Seconds until the last step is done, when steps go on taking as long as they did on average."""
        done, left = self._version - self._settings.first_version, self._settings.steps - self._version
        if not left:
            return 0.0
        if not done:
            return None
        mean = (self._step_us - start_us) / done
        return (mean * (left - 1) + max(0.0, mean - (now_us - self._step_us))) / 1e6


class _Meter:
    """The time of one worker: what it does, since when, and microseconds by what it did."""

    def __init__(self, doing: Doing) -> None:
        self.doing: Doing = doing
        self.command: WorkerCommand | None = None
        self.since_us = 0
        self.overdue = False
        self._spent: Counter[Doing] = Counter()
        self._at_step: Counter[Doing] = Counter()
        """What was spent when the present step began."""
        self._at_step_before: Counter[Doing] = Counter()

    def turn(self, doing: Doing, at_us: int, command: WorkerCommand | None = None) -> None:
        """From now on it does something else."""
        self._spent[self.doing] += at_us - self.since_us
        self.doing, self.command, self.since_us, self.overdue = doing, command, at_us, False

    def close_step(self, at_us: int) -> None:
        """The present step ends."""
        self._at_step_before, self._at_step = self._at_step, self.spent(at_us)

    def spent(self, now_us: int) -> Counter[Doing]:
        """Microseconds by what it did, from the start."""
        spent = self._spent.copy()
        spent[self.doing] += now_us - self.since_us
        return spent

    def in_step(self, now_us: int) -> Counter[Doing]:
        """The same since the present step began."""
        return self.spent(now_us) - self._at_step

    def recently(self, now_us: int) -> Counter[Doing]:
        """The same since the step before began."""
        return self.spent(now_us) - self._at_step_before


def _pools(settings: SchedulerSettings) -> dict[str, tuple[WorkerId, ...]]:
    """Workers by role, with the names that trace.timeline gives them."""
    if settings.one_pool:
        return {"colocated": settings.generators}
    scorers = {"scorers": settings.scorers} if settings.scorers else {}
    return {"generators": settings.generators, **scorers, "trainer": (settings.trainer,)}


def _bubble(pool: str) -> str:
    return f"bubble_fraction/{pool}"
