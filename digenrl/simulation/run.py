"""One simulated run, and what came of it: step times, how busy the pools were, what the trainer generated, what was stale.

Times of steps go from version to version. Figures of the steady state leave out the first step, in which the pipeline fills,
and the last, which has no next step to work ahead for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from digenrl.driver import Recorder, drive
from digenrl.errors import ConfigError
from digenrl.ids import WorkerId
from digenrl.scheduling.commands import Command, Generate, OptimizerStep, StopRun, WorkerCommand
from digenrl.scheduling.events import Event, Finished, WorkerJoined, WorkerLost
from digenrl.scheduling.scheduler import Scheduler
from digenrl.scheduling.settings import SchedulerSettings
from digenrl.simulation.costs import TICKS, SimulationCosts
from digenrl.simulation.executor import Disturbance, Incident, SimulatedExecutor

_NAMES = {
    "Encode": "encode",
    "Generate": "generate",
    "Score": "score",
    "Accumulate": "update",
    "SwitchMode": "switch",
    "OptimizerStep": "optimizer",
    "SyncWeights": "sync",
    "Evaluate": "evaluate",
    "SaveCheckpoint": "save",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolShares:
    """What the workers of a pool did with their time; shares of the time that they were alive."""

    busy: float
    bubble: float
    """Nothing to do."""
    by_task: dict[str, float]
    """Parts of ``busy``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """What a simulated run came to. Seconds are virtual."""

    step_time_s: float
    """Mean of the steady state; of all steps where there are fewer than three."""
    step_times_s: tuple[float, ...]
    """From version to version."""
    makespan_s: float
    trainer: PoolShares
    generators: PoolShares
    """The same as ``trainer`` where one pool does everything."""
    tags: tuple[int, ...]
    """Micro-batches that the trainer generated, by step, from ``first_version`` on."""
    stale: tuple[int, ...]
    """Micro-batches that were generated with the weights of the step before, by step."""
    samples_per_second: float | None
    """In the steady state; None where the samples of a step are not known."""
    events: int

    def to_plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def simulate(
    settings: SchedulerSettings,
    costs: SimulationCosts,
    disturbance: Disturbance | None = None,
    recorder: Recorder | None = None,
    *,
    samples_per_step: int | None = None,
) -> SimulationResult:
    """Run a schedule on the virtual clock. Raises ConfigError where costs and settings do not fit, RunFailed as a run would."""
    check_fit(settings, costs, disturbance)
    watch = _Watch(settings, recorder)
    executor = SimulatedExecutor(settings, costs, disturbance)
    drive(Scheduler(settings), executor, watch, command_timeout_s=1.0)
    return watch.result(executor.now_us(), samples_per_step)


def check_fit(settings: SchedulerSettings, costs: SimulationCosts, disturbance: Disturbance | None = None) -> None:
    """Raise ConfigError, naming the field, for what cannot be simulated together."""
    scorers = {"generator": len(settings.generators), "pool": len(settings.scorers), "inline": None}[settings.scoring]
    for name, found, wanted in (
        ("generate", len(costs.generate), len(settings.generators)),
        ("score", None if costs.score is None else len(costs.score), scorers),
    ):
        if found != wanted:
            raise ConfigError(
                f"costs.{name} has {found or 'no'} durations, and schedule.scoring: {settings.scoring} with "
                f"{len(settings.generators)} generators needs {wanted or 'none'}.",
                why="Every worker has its own duration; scoring: inline means that generation includes it.",
                fix=f"Give costs.{name} {wanted} values." if wanted else "Remove it, or set schedule.scoring: generator.",
            )
    if settings.tag != "never" and costs.tag is None:
        raise ConfigError(
            f"costs.tag is missing, and schedule.tag is {settings.tag}.",
            why="It is how long the trainer takes to generate one micro-batch.",
            fix="Give it in seconds, or set schedule.tag: never.",
        )
    if settings.steps < 1:
        raise ConfigError(f"schedule.steps ({settings.steps}) must be at least 1.", fix="Simulate at least one step.")
    for index, incident in enumerate(disturbance.incidents if disturbance is not None else ()):
        if incident.worker not in settings.workers:
            raise ConfigError(
                f"disturbance.incidents.{index}.worker: there is no worker {incident.worker!r}.",
                fix=f"The workers are: {', '.join(settings.workers[:8])}{', ...' if len(settings.workers) > 8 else ''}.",
            )
    _check_incidents(disturbance.incidents if disturbance is not None else ())


def _check_incidents(incidents: Sequence[Incident]) -> None:
    """Raise ConfigError unless every worker is lost and comes back in turn, at different times."""
    lost: dict[WorkerId, float] = {}
    back: dict[WorkerId, float] = {}
    for index, incident in sorted(enumerate(incidents), key=lambda item: item[1].at_s):
        known = lost if incident.joins else back
        if incident.joins != (incident.worker in lost) or incident.at_s <= known.get(incident.worker, -1.0):
            state = "lost" if incident.worker in lost else "there"
            raise ConfigError(
                f"disturbance.incidents.{index}: {incident.worker} cannot {'join' if incident.joins else 'be lost'} at "
                f"{incident.at_s:g} s: it is {state}.",
                why="A worker is lost, and comes back later, in turn.",
                fix="Mend the times, or `joins`.",
            )
        if incident.joins:
            del lost[incident.worker]
            back[incident.worker] = incident.at_s
        else:
            lost[incident.worker] = incident.at_s


class _Watch:
    """A recorder that measures, and hands everything on to another one."""

    def __init__(self, settings: SchedulerSettings, recorder: Recorder | None) -> None:
        self._settings = settings
        self._recorder = recorder
        self._running: dict[WorkerId, int] = {}
        self._lost: dict[WorkerId, int] = {}
        self._spans: list[tuple[WorkerId, str, int, int]] = []
        self._ends: list[int] = []
        self._tags: Counter[int] = Counter()
        self._stale: Counter[int] = Counter()
        self._events = 0

    def record(self, events: Sequence[Event], commands: Sequence[Command]) -> None:
        """Take in one instant."""
        if self._recorder is not None:
            self._recorder.record(events, commands)
        self._events += len(events)
        for event in events:
            if isinstance(event, Finished):
                self._finished(event)
            elif isinstance(event, WorkerLost):
                self._running.pop(event.worker, None)
                self._lost[event.worker] = event.at_us
            elif isinstance(event, WorkerJoined) and event.worker in self._lost:
                self._spans.append((event.worker, "", self._lost.pop(event.worker), event.at_us))
        for command in commands:
            if not isinstance(command, StopRun):
                self._running[command.worker] = events[0].at_us

    def _finished(self, event: Finished) -> None:
        command = event.command
        self._spans.append((command.worker, self._task(command), self._running.pop(command.worker), event.at_us))
        if isinstance(command, OptimizerStep) and command.update == self._settings.updates_per_rollout - 1:
            self._ends.append(event.at_us)
        elif isinstance(command, Generate):
            self._tags[command.micro_batch.step] += self._is_tag(command)
            self._stale[command.micro_batch.step] += command.policy_version < command.micro_batch.step

    def _task(self, command: WorkerCommand) -> str:
        if isinstance(command, Generate):
            if self._is_tag(command):
                return "tag"
            return "generate" if command.policy_version == command.micro_batch.step else "stale"
        return _NAMES[type(command).__name__]

    def _is_tag(self, command: Generate) -> bool:
        return command.worker == self._settings.trainer and not self._settings.one_pool

    def result(self, now_us: int, samples_per_step: int | None) -> SimulationResult:
        """What was seen, after the last event at ``now_us``."""
        ends, settings = self._ends, self._settings
        self._spans.extend((worker, "", since, now_us) for worker, since in self._lost.items())
        times = [end - start for start, end in pairwise((0, *ends))]
        steady = times[1:-1] or times
        window = (ends[0], ends[-2]) if len(ends) > 2 else (0, now_us)
        step_time = sum(steady) / len(steady) / TICKS
        return SimulationResult(
            step_time_s=step_time,
            step_times_s=tuple(time / TICKS for time in times),
            makespan_s=now_us / TICKS,
            trainer=self._shares((settings.trainer,), window),
            generators=self._shares(settings.generators, window),
            tags=tuple(self._tags[step] for step in range(settings.first_version, settings.steps)),
            stale=tuple(self._stale[step] for step in range(settings.first_version, settings.steps)),
            samples_per_second=samples_per_step / step_time if samples_per_step is not None else None,
            events=self._events,
        )

    def _shares(self, workers: Iterable[WorkerId], window: tuple[int, int]) -> PoolShares:
        names = frozenset(workers)
        low, high = window
        ticks: Counter[str] = Counter()
        for worker, task, start, end in self._spans:
            if worker in names:
                ticks[task] += max(0, min(end, high) - max(start, low))
        alive = max(1, len(names) * (high - low) - ticks.pop("", 0))
        shares = {task: spent / alive for task, spent in sorted(ticks.items()) if spent}
        busy = sum(shares.values())
        return PoolShares(busy=busy, bubble=max(0.0, 1.0 - busy), by_task=shares)
