"""The simulated executor: commands take virtual time, workers can be slow, fail and come back.

Deterministic: the same seed gives the same durations, whatever order commands are submitted in, because every duration is
drawn from (seed, command).
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from digenrl.ids import StepOutcome, WorkerId
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
from digenrl.scheduling.events import Event, Finished, WorkerJoined, WorkerLost, WorkerOverdue
from digenrl.scheduling.settings import SchedulerSettings
from digenrl.simulation.costs import SimulationCosts, ticks


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """A worker is lost, or comes back, at a given time."""

    at_s: float
    worker: WorkerId
    joins: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """How durations scatter and what goes wrong."""

    jitter: float = 0.0
    """Coefficient of variation of every duration (log-normal)."""
    straggler_share: float = 0.0
    """Share of commands that are stragglers."""
    straggler_factor: float = 5.0
    """How many times longer a straggler takes."""
    overdue_factor: float = 3.0
    """A command that takes this many times its nominal duration is reported as overdue."""
    incidents: tuple[Incident, ...] = ()
    seed: int = 0


class SimulatedExecutor:
    """Carries commands out on a virtual clock; see driver.Executor."""

    def __init__(self, settings: SchedulerSettings, costs: SimulationCosts, disturbance: Disturbance | None = None) -> None:
        self._settings = settings
        self._costs = costs
        self._disturbance = disturbance or Disturbance()
        self._nominal = _Nominal(settings, costs)
        self._now = 0
        self._sequence = itertools.count()
        self._events: list[tuple[int, int, Event]] = []
        self._overdue: dict[int, WorkerCommand] = {}
        """Which command a WorkerOverdue (by its place in the queue) is about."""
        self._running: dict[WorkerId, WorkerCommand] = {}
        self._disturbed = bool(self._disturbance.jitter or self._disturbance.straggler_share)
        for incident in self._disturbance.incidents:
            at = ticks(incident.at_s)
            kind = WorkerJoined if incident.joins else WorkerLost
            self._push(at, kind(at_us=at, worker=incident.worker))

    def now_us(self) -> int:
        """Virtual microseconds since the run began."""
        return self._now

    def submit(self, command: WorkerCommand) -> None:
        """Start a command at the present instant."""
        nominal = self._nominal.ticks(command)
        duration = self._disturb(command, nominal) if self._disturbed else nominal
        self._running[command.worker] = command
        end = self._now + duration
        outcome = StepOutcome.APPLIED if isinstance(command, OptimizerStep) else None
        self._push(end, Finished(at_us=end, command=command, outcome=outcome))
        limit = nominal * self._disturbance.overdue_factor
        if duration > limit:
            at = self._now + int(limit)
            self._overdue[self._push(at, WorkerOverdue(at_us=at, worker=command.worker))] = command

    def next_events(self, timeout_s: float) -> Sequence[Event]:
        """All events of the next instant; empty when nothing will ever happen again."""
        del timeout_s  # virtual time does not wait
        while self._events:
            at = self._events[0][0]
            found = []
            while self._events and self._events[0][0] == at:
                _, place, event = heapq.heappop(self._events)
                if self._happens(event, place):
                    found.append(event)
            if found:
                self._now = at
                return found
        return ()

    def _happens(self, event: Event, place: int) -> bool:
        """Whether an event is still true: a lost worker finishes nothing, and is overdue with nothing."""
        if isinstance(event, Finished):
            if self._running.get(event.command.worker) is not event.command:
                return False
            del self._running[event.command.worker]
        elif isinstance(event, WorkerLost):
            self._running.pop(event.worker, None)
        elif isinstance(event, WorkerOverdue):
            return self._running.get(event.worker) is self._overdue.pop(place)
        return True

    def _push(self, at: int, event: Event) -> int:
        place = next(self._sequence)
        heapq.heappush(self._events, (at, place, event))
        return place

    def _disturb(self, command: WorkerCommand, nominal: int) -> int:
        if not nominal:
            return 0
        disturbance = self._disturbance
        text = f"{disturbance.seed}/{self._now}/{command!r}"
        draw = random.Random(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big"))
        factor = 1.0
        if disturbance.jitter:
            sigma = math.sqrt(math.log1p(disturbance.jitter**2))
            factor = draw.lognormvariate(-sigma * sigma / 2, sigma)
        if draw.random() < disturbance.straggler_share:
            factor *= disturbance.straggler_factor
        return max(1, round(nominal * factor))


class _Nominal:
    """Nominal ticks of every command."""

    def __init__(self, settings: SchedulerSettings, costs: SimulationCosts) -> None:
        self._last = settings.micro_batches - 1
        self._share = costs.last_share
        self._generate = {name: ticks(v) for name, v in zip(settings.generators, costs.generate, strict=True)}
        scorers = settings.scorers or settings.generators
        self._score = {name: ticks(v) for name, v in zip(scorers, costs.score, strict=True)} if costs.score is not None else {}
        tag = costs.tag if costs.tag is not None else max(costs.generate)
        self._generate.setdefault(settings.trainer, ticks(tag))
        self._update = ticks(costs.update)
        self._switch = {True: ticks(costs.switch_in), False: ticks(costs.switch_out)}
        self._once = {
            Encode: ticks(costs.encode),
            OptimizerStep: ticks(costs.optimizer),
            SyncWeights: ticks(costs.sync),
            Evaluate: ticks(costs.evaluate),
            SaveCheckpoint: ticks(costs.save),
        }

    def ticks(self, command: WorkerCommand) -> int:
        """Undisturbed duration."""
        if isinstance(command, Generate):
            whole = self._generate[command.worker]
        elif isinstance(command, Score):
            whole = self._score[command.worker]
        elif isinstance(command, Accumulate):
            whole = self._update
        elif isinstance(command, SwitchMode):
            return self._switch[command.generating]
        else:
            return self._once[type(command)]
        return whole if command.micro_batch.index != self._last else max(1, round(whole * self._share))
