"""What must always hold, whatever is slow, fails, joins or gets lost.

A random executor finishes, fails and loses things in any order, several at one instant; an auditor that sees only events
and commands, never the scheduler's state, checks that each command was allowed and that nothing is left undone.
"""

from __future__ import annotations

import pickle
import random
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from digenrl.driver import drive
from digenrl.errors import ProtocolError
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
from digenrl.scheduling.costs import MeasuredTask, Task
from digenrl.scheduling.events import (
    CommandFailed,
    ConditioningLost,
    Event,
    Finished,
    RunStarted,
    TrajectoryLost,
    WorkerJoined,
    WorkerLost,
    WorkerOverdue,
)
from digenrl.scheduling.scheduler import Scheduler
from digenrl.scheduling.settings import SchedulerSettings
from digenrl.scheduling.step_model import StepCosts
from digenrl.simulation.costs import SimulationCosts
from digenrl.simulation.executor import Disturbance, SimulatedExecutor
from digenrl.trace.record import TraceWriter, read_trace
from digenrl.trace.replay import replay

TRAINER = WorkerId("trainer")
POOL = tuple(WorkerId(f"generator-{i}") for i in range(4))
SCORERS = (WorkerId("scorer-0"), WorkerId("scorer-1"))


@st.composite
def schedules(draw: st.DrawFn, *, resumed: bool | None = None) -> SchedulerSettings:
    """resumed: whether the run continues one that had stale trajectories; None: perhaps."""
    generators = POOL[: draw(st.integers(1, 4))]
    resumed = draw(st.booleans()) if resumed is None else resumed
    one_pool = not resumed and draw(st.integers(0, 2)) == 0
    size = draw(st.integers(1, 8))
    fraction = 0.0 if one_pool else draw(st.sampled_from([0.5, 1.0] if resumed else [0.0, 0.25, 0.5, 1.0]))
    quota = int(fraction * size)
    first = draw(st.integers(1, 2)) if resumed else draw(st.integers(0, 1))
    steps = first + draw(st.integers(1, 3) if resumed else st.integers(0, 4))
    versions = st.sets(st.integers(first, steps), max_size=2).map(sorted).map(tuple)
    scoring = draw(st.sampled_from(["generator", "generator", "pool", "inline"]))
    tag = "never" if one_pool else draw(st.sampled_from(["never", "static", "greedy", "bts", "bts_plus", "bts_plus"]))
    known = draw(st.booleans())
    ticks = st.integers(1, 50)
    costs = StepCosts(
        generate=tuple(draw(ticks) for _ in generators),
        score=None if scoring == "inline" else tuple(draw(ticks) for _ in generators),
        update=draw(ticks),
        tag=draw(ticks),
        switch_in=draw(st.integers(0, 20)),
        switch_out=draw(st.integers(0, 20)),
    )
    return SchedulerSettings(
        steps=steps,
        first_version=first,
        stale_claims=tuple(sorted(draw(st.sets(st.integers(0, size - 1), max_size=quota)))) if resumed and quota else (),
        evaluate_at=draw(versions),
        save_at=draw(versions),
        micro_batches=size,
        generators=generators,
        encoders=tuple(sorted(draw(st.sets(st.sampled_from(generators))))),
        trainer=generators[0] if one_pool else TRAINER,
        scoring=scoring,
        scorers=SCORERS if scoring == "pool" else (),
        update_order=draw(st.sampled_from(["arrival", "index"])),
        update_after=draw(st.sampled_from(["group", "step"])),
        updates_per_rollout=draw(st.integers(1, min(3, size))),
        tag=tag,
        tag_static=draw(st.integers(0, size)),
        replan=draw(st.sampled_from(["bubble", "step"])),
        max_stale_fraction=fraction,
        max_attempts=1000,
        costs=costs if known else None,
    )


class Chaos:
    """Finishes outstanding commands in random order, and makes things fail with a given probability."""

    def __init__(self, setup: SchedulerSettings, rng: random.Random, trouble: float) -> None:
        self.scheduler = Scheduler(setup)
        self.outstanding: dict[WorkerId, WorkerCommand] = {}
        self.log: list[tuple[list[Event], list[Command]]] = []
        self._setup, self._rng, self._trouble = setup, rng, trouble
        self._now = 0
        self._lost: set[WorkerId] = set()
        self._ready: set[MicroBatchId] = set()
        """Generated, there, and not accumulated."""
        self._encoded: set[int] = set()
        """Open steps whose encoded prompts are there."""
        self._optimized = 0
        """Optimizer steps so far."""

    def run(self) -> None:
        self._handle([RunStarted(at_us=0)])
        self.go_on()

    def go_on(self) -> None:
        for _ in range(20_000):
            if self.scheduler.finished:
                return
            self._now += self._rng.choice([0, 1, 7, 30])
            events = self._something()
            assert events, f"deadlock: {self._setup}, lost {self._lost}"
            self._handle(events)
        raise AssertionError("the run does not end")

    @property
    def version(self) -> int:
        """Completed steps."""
        return self._setup.first_version + self._optimized // self._setup.updates_per_rollout

    def _something(self) -> list[Event]:
        rng, at = self._rng, self._now
        assert self.outstanding or self._a_role_is_empty(), f"nobody works: {self._setup}, lost {self._lost}"
        if self._lost and (rng.random() < 0.3 or not self.outstanding):
            worker = rng.choice(sorted(self._lost))
            self._lost.discard(worker)
            return [WorkerJoined(at_us=at, worker=worker)]
        trouble = self._make_trouble(at) if rng.random() < self._trouble else []
        # An instant has one event of each worker.
        able = sorted(set(self.outstanding) - {event.worker for event in trouble if isinstance(event, WorkerOverdue)})
        if not able or (trouble and rng.random() < 0.5):
            return trouble
        chosen = rng.sample(able, rng.randint(1, min(3, len(able))))
        events = trouble + [self._finish(self.outstanding.pop(worker), at) for worker in chosen]
        rng.shuffle(events)
        return events

    def _a_role_is_empty(self) -> bool:
        """Whether everybody who could do some kind of work is lost, so that the others may have to wait."""
        setup = self._setup
        roles = [setup.generators, setup.encoders or setup.generators, setup.scorers]
        return any(role and self._lost.issuperset(role) for role in roles)

    def _make_trouble(self, at: int) -> list[Event]:
        rng = self._rng
        safe = [w for w in (*self._setup.generators, *self._setup.scorers) if w != self._setup.trainer]
        kind = rng.choice(["lose", "fail", "untouched", "trajectory", "conditioning", "objects", "overdue"])
        if kind == "lose" and (alive := [w for w in safe if w not in self._lost]):
            worker = rng.choice(alive)
            self._lost.add(worker)
            self.outstanding.pop(worker, None)
            return [WorkerLost(at_us=at, worker=worker, error="gone")]
        harmless = Encode | Generate | Score | SyncWeights | Evaluate
        if kind == "fail" and (able := [w for w, c in self.outstanding.items() if isinstance(c, harmless)]):
            return [CommandFailed(at_us=at, command=self.outstanding.pop(rng.choice(sorted(able))), error="boom")]
        if kind == "untouched" and self.outstanding:
            return [self._refuse(rng.choice(sorted(self.outstanding)), at)]
        if kind == "trajectory" and self._ready:
            return self._lose_objects(at, rng.choice(sorted(self._ready)), None)
        if kind == "conditioning" and self._encoded:
            return self._lose_objects(at, None, rng.choice(sorted(self._encoded)))
        of_a_micro_batch = {w: c for w, c in self.outstanding.items() if isinstance(c, Generate | Score | Accumulate)}
        if kind == "objects" and of_a_micro_batch:
            worker = rng.choice(sorted(of_a_micro_batch))
            its = of_a_micro_batch[worker].micro_batch
            events = self._lose_objects(at, *rng.choice([(its, None), (None, its.step), (its, its.step)]))
            return [*events, self._refuse(worker, at)]
        if kind == "overdue" and self.outstanding:
            return [WorkerOverdue(at_us=at, worker=rng.choice(sorted(self.outstanding)))]
        return []

    def _refuse(self, worker: WorkerId, at: int) -> Event:
        return CommandFailed(at_us=at, command=self.outstanding.pop(worker), error="gone", untouched=True)

    def _lose_objects(self, at: int, trajectory: MicroBatchId | None, prompts: int | None) -> list[Event]:
        """Those of a trajectory and of encoded prompts that are there are lost."""
        events: list[Event] = []
        if trajectory in self._ready:
            self._ready.discard(trajectory)
            events.append(TrajectoryLost(at_us=at, micro_batch=trajectory))
        if prompts in self._encoded:
            self._encoded.discard(prompts)
            events.append(ConditioningLost(at_us=at, step=prompts))
        return events

    def _finish(self, command: WorkerCommand, at: int) -> Event:
        match command:
            case Generate():
                self._ready.add(command.micro_batch)
            case Accumulate():
                self._ready.discard(command.micro_batch)
            case Encode():
                self._encoded.add(command.step)
            case OptimizerStep():
                self._optimized += 1
        self._encoded = {step for step in self._encoded if step >= self.version}
        outcome = StepOutcome.APPLIED if isinstance(command, OptimizerStep) else None
        return Finished(at_us=at, command=command, outcome=outcome)

    def _handle(self, events: list[Event]) -> None:
        commands = self.scheduler.handle(*events)
        self.log.append((events, commands))
        for command in commands:
            assert not isinstance(command, StopRun)
            assert command.worker not in self.outstanding, "a worker has one command at a time"
            assert command.worker not in self._lost, "a lost worker gets no work"
            self.outstanding[command.worker] = command


@dataclass
class Audit:
    """What must hold, told by events and commands alone."""

    setup: SchedulerSettings
    version: int = field(init=False)
    updates: int = 0
    """Optimizer steps of the step in training that are over."""
    holds: dict[WorkerId, int] = field(init=False)
    encoded: set[int] = field(default_factory=set)
    encoding: dict[WorkerId, int] = field(default_factory=dict)
    made: dict[MicroBatchId, int] = field(default_factory=dict)
    """Version of every generated micro-batch."""
    scored: dict[MicroBatchId, None] = field(default_factory=dict)
    accumulated: list[MicroBatchId] = field(default_factory=list)
    generating: dict[WorkerId, tuple[MicroBatchId, int]] = field(default_factory=dict)
    stale: Counter[int] = field(default_factory=Counter)
    lost: set[WorkerId] = field(default_factory=set)
    claims: set[int] = field(init=False)
    """What an interrupted run had claimed, and nobody has generated with those weights yet."""
    updating: MicroBatchId | None = None
    doomed: bool = False
    """Whether the trajectory of what the trainer accumulates was lost meanwhile."""
    evaluated: list[int] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)
    trainer_generates: bool = False

    def __post_init__(self) -> None:
        self.version = self.setup.first_version
        self.claims = set(self.setup.stale_claims)
        self.holds = dict.fromkeys(self.setup.workers, self.version - bool(self.claims))

    def check(self, log: list[tuple[list[Event], list[Command]]]) -> None:
        for events, commands in log:
            for event in events:
                self.event(event)
            for command in commands:
                self.command(command)
        assert self.version == self.setup.steps
        assert (self.evaluated, self.saved) == (list(self.setup.evaluate_at), list(self.setup.save_at))
        steps = range(self.setup.first_version, self.setup.steps)
        everything = [MicroBatchId(s, i) for s in steps for i in range(self.setup.micro_batches)]
        assert sorted(self.accumulated) == everything, "every micro-batch is accumulated exactly once"

    def event(self, event: Event) -> None:
        match event:
            case Finished(command=command):
                self.finished(command)
            case CommandFailed(command=command):
                self.give_back(command.worker)
                if isinstance(command, Accumulate):
                    its, self.updating = command.micro_batch, None
                    if self.doomed:
                        self.lose(its)
                    self.doomed = False
            case WorkerLost(worker=worker):
                self.give_back(worker)
                self.lost.add(worker)
            case WorkerJoined(worker=worker):
                self.holds[worker] = -1
                self.lost.discard(worker)
            case TrajectoryLost(micro_batch=its):
                if its == self.updating:
                    self.doomed = True
                elif its not in self.accumulated:
                    self.lose(its)
            case ConditioningLost(step=step):
                self.encoded.discard(step)

    def lose(self, its: MicroBatchId) -> None:
        version = self.made.pop(its)
        self.stale[its.step] -= version < its.step
        self.scored.pop(its, None)

    def give_back(self, worker: WorkerId) -> None:
        self.encoding.pop(worker, None)
        if worker in self.generating:
            its, version = self.generating.pop(worker)
            self.stale[its.step] -= version < its.step

    def finished(self, command: WorkerCommand) -> None:
        match command:
            case Encode(step=step):
                self.encoded.add(step)
                del self.encoding[command.worker]
            case SyncWeights(worker=worker, policy_version=version):
                self.holds[worker] = version
            case Evaluate(policy_version=version):
                self.evaluated.append(version)
            case SaveCheckpoint(policy_version=version):
                self.saved.append(version)
            case Generate(worker=worker, micro_batch=its):
                self.made[its] = self.generating.pop(worker)[1]
                if self.setup.scoring == "inline":
                    self.scored[its] = None
            case Score(micro_batch=its):
                if its in self.made:
                    self.scored[its] = None
            case Accumulate(micro_batch=its):
                self.accumulated.append(its)
                self.updating, self.doomed = None, False
            case SwitchMode(generating=generating):
                self.trainer_generates = generating
            case OptimizerStep():
                self.updates += 1
                if self.updates == self.setup.updates_per_rollout:
                    self.version, self.updates = self.version + 1, 0

    def command(self, command: Command) -> None:
        assert command.reason.strip(), f"{command} does not say why"
        match command:
            case Encode(worker=worker, step=step):
                assert step not in self.encoded
                assert step not in self.encoding.values()
                assert worker in (self.setup.encoders or self.setup.generators)
                self.encoding[worker] = step
            case Generate():
                self.generate(command)
            case Score(micro_batch=its):
                assert its in self.made
                assert its not in self.scored
                assert self.setup.scoring != "pool" or command.worker in self.setup.scorers
            case Accumulate():
                self.accumulate(command)
            case SyncWeights(worker=worker, policy_version=version):
                assert self.holds[worker] < version == self.version, "a version never goes back"
                if worker in self.setup.generators and self.holds[worker] == self.setup.first_version - 1:
                    assert not self.claims, "it is needed with the weights that it holds"
            case Evaluate(worker=worker, policy_version=version) | SaveCheckpoint(worker=worker, policy_version=version):
                assert version == self.version == self.holds[worker]
            case OptimizerStep(step=step, update=update):
                low, high = self.setup.update_range(update)
                due = {MicroBatchId(step, i) for i in range(low, high)}
                assert (step, update) == (self.version, self.updates)
                assert due <= set(self.accumulated), "the optimizer step comes after the last micro-batch of its range"
                assert not self.trainer_generates

    def generate(self, command: Generate) -> None:
        its, version, worker = command.micro_batch, command.policy_version, command.worker
        assert its.step in self.encoded
        assert its not in self.made, "nothing is generated twice unless it was lost"
        assert its not in self.accumulated
        assert its not in [flying for flying, _ in self.generating.values()]
        assert version == self.holds[worker], "a worker generates with the weights that it holds"
        assert version in (its.step, its.step - 1), "at most one version old"
        if version < its.step:
            self.stale[its.step] += 1
            assert self.stale[its.step] <= int(self.setup.max_stale_fraction * self.setup.micro_batches)
            assert worker != self.setup.trainer, "TAG is never stale"
            if its.step == self.setup.first_version:
                assert its.index in self.claims, "only what was claimed before, and that once"
        if its.step == self.setup.first_version and its.index in self.claims:
            self.claims.discard(its.index)
            holders = [w for w in self.setup.generators if self.holds[w] == its.step - 1 and w not in self.lost]
            assert version < its.step or not holders, "as long as anybody has the weights for it"
        if worker == self.setup.trainer and not self.setup.one_pool:
            assert self.setup.tag != "never"
            assert self.trainer_generates
            assert self.updates == 0, "no TAG between the updates of one rollout"
        self.generating[worker] = (its, version)

    def accumulate(self, command: Accumulate) -> None:
        its = command.micro_batch
        low, high = self.setup.update_range(self.updates)
        assert command.worker == self.setup.trainer
        assert its.step == self.version, "gradients belong to one step"
        assert low <= its.index < high
        assert its in self.scored
        assert its not in self.accumulated
        assert its.step in self.encoded, "a gradient needs the encoded prompts"
        self.updating = its
        assert not self.trainer_generates
        if self.setup.update_after == "step":
            assert sum(m.step == its.step for m in self.scored) == self.setup.micro_batches
        if self.setup.update_order == "index":
            assert its.index == sum(m.step == its.step for m in self.accumulated)


@given(schedules(), st.integers(0, 2**32), st.sampled_from([0.0, 0.05, 0.3]))
@settings(max_examples=600, deadline=None, database=None)
def test_everything_is_trained_exactly_once_whatever_fails(setup: SchedulerSettings, seed: int, trouble: float) -> None:
    chaos = Chaos(setup, random.Random(seed), trouble)
    chaos.run()
    Audit(setup).check(chaos.log)


@given(schedules(), st.integers(0, 2**32))
@settings(max_examples=100, deadline=None, database=None)
def test_a_strictly_on_policy_schedule_has_no_stale_trajectory(setup: SchedulerSettings, seed: int) -> None:
    chaos = Chaos(replace(setup, max_stale_fraction=0.0, stale_claims=()), random.Random(seed), 0.1)
    chaos.run()
    commands = [c for _, commands in chaos.log for c in commands if isinstance(c, Generate)]
    assert all(c.policy_version == c.micro_batch.step for c in commands)


@given(schedules(), st.integers(0, 2**32), st.integers(0, 60))
@settings(max_examples=200, deadline=None, database=None)
def test_an_illegal_event_is_refused_and_changes_nothing(setup: SchedulerSettings, seed: int, after: int) -> None:
    setup = replace(setup, steps=max(setup.first_version + 1, setup.steps))
    chaos = Chaos(setup, random.Random(seed), 0.1)
    chaos._handle([RunStarted(at_us=0)])
    for _ in range(after):
        if chaos.scheduler.finished:
            break
        chaos._now += 1
        chaos._handle(chaos._something())
    now = chaos._now
    running = list(chaos.outstanding.values())
    foreign = Score(worker=WorkerId("nobody"), micro_batch=MicroBatchId(0, 0))
    bad: list[Any] = [
        RunStarted(at_us=now),
        Finished(at_us=now, command=foreign),
        WorkerLost(at_us=now, worker=WorkerId("nobody")),
        WorkerJoined(at_us=now, worker=setup.trainer),
        TrajectoryLost(at_us=now, micro_batch=MicroBatchId(99, 0)),
        TrajectoryLost(at_us=now, micro_batch=MicroBatchId(0, -1)),
        ConditioningLost(at_us=now, step=99),
        *(ConditioningLost(at_us=now, step=s) for s in range(-1, setup.steps + 1) if s not in chaos._encoded),
        *(TrajectoryLost(at_us=now, micro_batch=its) for its in micro_batches_of(setup) if its not in chaos._ready),
        "nonsense",
    ]
    for command in running:
        wrong = None if isinstance(command, OptimizerStep) else StepOutcome.APPLIED
        bad.append(Finished(at_us=now, command=command, outcome=wrong))
        bad.append(Finished(at_us=now, command=replace(command, reason="another one")))
        bad.append(Finished(at_us=-1, command=command))
    before = pickle.dumps(chaos.scheduler.state)
    for event in bad:
        with pytest.raises(ProtocolError):
            chaos.scheduler.handle(event)
        assert pickle.dumps(chaos.scheduler.state) == before
    if running:
        good = chaos._finish(running[0], now)
        with pytest.raises(ProtocolError, match="Two events"):
            chaos.scheduler.handle(good, good)
        with pytest.raises(ProtocolError):
            chaos.scheduler.handle(good, "nonsense")  # type: ignore[arg-type]
        assert pickle.dumps(chaos.scheduler.state) == before


def micro_batches_of(setup: SchedulerSettings) -> list[MicroBatchId]:
    return [MicroBatchId(step, index) for step in range(setup.steps) for index in range(setup.micro_batches)]


@given(schedules(resumed=True), st.integers(0, 2**32))
@settings(max_examples=300, deadline=None, database=None)
def test_what_an_interrupted_run_had_claimed_is_generated_with_the_same_weights_when_nothing_fails(
    setup: SchedulerSettings, seed: int
) -> None:
    chaos = Chaos(setup, random.Random(seed), 0.0)
    chaos.run()
    Audit(setup).check(chaos.log)
    commands = [c for _, commands in chaos.log for c in commands if isinstance(c, Generate)]
    assert stale_in(commands, setup.first_version) == list(setup.stale_claims)


@given(schedules(), st.integers(0, 2**32), st.sampled_from([0.0, 0.1]), st.integers(0, 3))
@settings(max_examples=200, deadline=None, database=None)
def test_a_run_that_continues_from_any_version_has_the_same_stale_micro_batches(
    setup: SchedulerSettings, seed: int, trouble: float, later: int
) -> None:
    chaos = Chaos(setup, random.Random(seed), trouble)
    chaos._handle([RunStarted(at_us=0)])
    version = min(setup.first_version + later, setup.steps)
    while chaos.scheduler.state.policy_version < version:
        chaos._now += 1
        chaos._handle(chaos._something())
    claims = chaos.scheduler.state.stale_claims
    again = replace(setup, first_version=version, stale_claims=claims, evaluate_at=(), save_at=())
    other = Chaos(again, random.Random(seed + 1), 0.0)
    other.run()
    commands = [c for _, commands in other.log for c in commands if isinstance(c, Generate)]
    assert stale_in(commands, version) == list(claims)
    if not trouble:
        chaos.go_on()
        commands = [c for _, commands in chaos.log for c in commands if isinstance(c, Generate)]
        assert stale_in(commands, version) == list(claims), "as they would have been without the interruption"


def stale_in(commands: list[Generate], step: int) -> list[int]:
    return sorted(c.micro_batch.index for c in commands if c.micro_batch.step == step and c.policy_version < step)


def test_a_micro_batch_that_always_fails_stops_the_run_and_names_its_prompts() -> None:
    setup = SchedulerSettings(
        steps=1, micro_batches=2, generators=POOL[:1], trainer=TRAINER, max_attempts=3, groups_per_micro_batch=4
    )
    scheduler = Scheduler(setup)
    (command,) = scheduler.handle(RunStarted(at_us=0))
    (command,) = scheduler.handle(Finished(at_us=1, command=command))
    for attempt in range(3):
        assert isinstance(command, Generate)
        (command,) = scheduler.handle(CommandFailed(at_us=2 + attempt, command=command, error="out of memory"))
    assert isinstance(command, StopRun)
    for part in ("micro-batch 0.0", "prompts 0 to 3 of step 0", "3 times", "out of memory"):
        assert part in command.reason
    assert scheduler.finished


def test_a_lost_trainer_stops_the_run() -> None:
    scheduler = Scheduler(SchedulerSettings(steps=1, micro_batches=1, generators=POOL[:1], trainer=TRAINER))
    scheduler.handle(RunStarted(at_us=0))
    (command,) = scheduler.handle(WorkerLost(at_us=5, worker=TRAINER, error="killed"))
    assert isinstance(command, StopRun)
    assert "killed" in command.reason


def test_a_joined_worker_loads_the_current_version_before_it_gets_work() -> None:
    scheduler = Scheduler(SchedulerSettings(steps=2, micro_batches=4, generators=POOL[:2], trainer=TRAINER))
    commands = scheduler.handle(RunStarted(at_us=0))
    scheduler.handle(WorkerLost(at_us=1, worker=POOL[1]))
    scheduler.handle(Finished(at_us=2, command=commands[0]))  # type: ignore[arg-type]
    (first,) = scheduler.handle(WorkerJoined(at_us=3, worker=POOL[1]))
    assert first == SyncWeights(worker=POOL[1], policy_version=0, reason=first.reason)


def test_an_overdue_worker_reopens_a_bubble_that_was_skipped() -> None:
    costs = StepCosts(generate=(100, 100), score=None, update=10, tag=500, switch_in=50, switch_out=50)
    setup = SchedulerSettings(
        steps=1, micro_batches=4, generators=POOL[:2], trainer=TRAINER, scoring="inline", tag="bts", costs=costs
    )
    scheduler = Scheduler(setup)
    (encode,) = scheduler.handle(RunStarted(at_us=0))
    started = scheduler.handle(Finished(at_us=0, command=encode))  # type: ignore[arg-type]
    assert all(command.worker != TRAINER for command in started)  # type: ignore[union-attr]
    again = scheduler.handle(WorkerOverdue(at_us=10_000, worker=POOL[0]), WorkerOverdue(at_us=10_000, worker=POOL[1]))
    assert [type(command) for command in again] == [SwitchMode]


def test_with_all_generators_lost_the_trainer_generates_rather_than_wait() -> None:
    setup = SchedulerSettings(steps=1, micro_batches=2, generators=POOL[:1], trainer=TRAINER, tag="static", scoring="inline")
    scheduler = Scheduler(setup)
    (encode,) = scheduler.handle(RunStarted(at_us=0))
    scheduler.handle(Finished(at_us=0, command=encode))  # type: ignore[arg-type]
    (switch,) = scheduler.handle(WorkerLost(at_us=1, worker=POOL[0]))
    assert isinstance(switch, SwitchMode)
    assert switch.generating


def test_one_slow_sample_does_not_lock_a_replica_out_for_good() -> None:
    names = tuple(WorkerId(f"g{i}") for i in range(16))
    setup = SchedulerSettings(steps=6, micro_batches=48, generators=names, trainer=TRAINER, tag="bts_plus")
    costs = SimulationCosts(generate=(1.0,) * 16, score=(0.05,) * 16, update=0.05, tag=1.0)
    last_step: Counter[WorkerId] = Counter()

    class Recorder:
        def record(self, events: Any, commands: Any) -> None:
            last_step.update(c.worker for c in commands if isinstance(c, Generate) and c.micro_batch.step == 5)

    stragglers = Disturbance(jitter=0.05, straggler_share=0.1, straggler_factor=6.0, seed=1)
    drive(Scheduler(setup), SimulatedExecutor(setup, costs, stragglers), Recorder(), command_timeout_s=1)
    assert set(names) <= set(last_step)


@given(schedules(), st.integers(0, 2**32), st.sampled_from([0.05, 0.3]))
@settings(max_examples=60, deadline=None, database=None)
def test_the_record_of_a_troubled_run_replays_to_identical_commands(setup: SchedulerSettings, seed: int, trouble: float) -> None:
    chaos = Chaos(setup, random.Random(seed), trouble)
    chaos.run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        with TraceWriter(path, setup) as trace:
            for events, commands in chaos.log:
                trace.record(events, commands)
        assert replay(read_trace(path)) == sum(len(commands) for _, commands in chaos.log)


@pytest.mark.parametrize("kind", [Encode, SyncWeights])
def test_a_command_that_always_fails_is_not_tried_for_ever(kind: type) -> None:
    scheduler = Scheduler(SchedulerSettings(steps=2, micro_batches=1, generators=POOL[:1], trainer=TRAINER, scoring="inline"))
    outstanding: list[Any] = list(scheduler.handle(RunStarted(at_us=0)))
    failures = 0
    for now in range(1, 100):
        if not outstanding:
            break
        command = outstanding.pop(0)
        if isinstance(command, StopRun):
            break
        if isinstance(command, kind):
            failures += 1
            outstanding += scheduler.handle(CommandFailed(at_us=now, command=command, error="no"))
        else:
            outcome = StepOutcome.APPLIED if isinstance(command, OptimizerStep) else None
            outstanding += scheduler.handle(Finished(at_us=now, command=command, outcome=outcome))
    assert isinstance(command, StopRun)
    assert 3 <= failures <= 4, "one more may have been on its way"
    assert f"{kind.__name__} has failed 3 times" in command.reason


def test_a_new_plan_that_leaves_less_to_the_trainer_gives_idle_generators_work_at_once(play: Callable[..., Any]) -> None:
    # Nobody else would: all that was not reserved is done, and a trainer that skips a bubble waits for them.
    expected = {Task.SCORE: 5, Task.UPDATE: 1, Task.TAG: 50, Task.SWITCH_IN: 10, Task.SWITCH_OUT: 10}
    measured = [MeasuredTask(task=task, worker=2, ticks=(ticks,) * 2) for task, ticks in expected.items()]
    measured += [MeasuredTask(task=Task.GENERATE, worker=worker, ticks=(ticks,)) for worker, ticks in enumerate((50, 80))]
    hand = play(micro_batches=6, replicas=2, scoring="generator", tag="bts_plus", measured=tuple(measured))
    hand.finish(POOL[0])
    assert hand.at[TRAINER].reason.startswith("TAG: 2 more one a bubble")
    while POOL[0] in hand.at or POOL[1] in hand.at:
        hand.finish(next(worker for worker in POOL if worker in hand.at))
    step = hand.scheduler.state.step
    assert (step.pending, step.reserved) == (1, 1)
    hand.finish(TRAINER)
    hand.wait(100_000)  # a TAG that takes so long is not worth while
    hand.finish(TRAINER)
    hand.finish(POOL[0])
    assert not any(worker in hand.at for worker in POOL)
    while TRAINER in hand.at:
        commands = hand.finish(TRAINER)
    assert [(type(c), c.micro_batch.index) for c in commands] == [(Generate, 5)]
    hand.finish_all()
    assert hand.scheduler.finished


def test_what_was_planned_for_the_trainer_is_everybody_s_again_between_the_updates_of_one_rollout() -> None:
    # TAG is forbidden there: with the reservation kept, generators and trainer would wait for each other for ever.
    costs = SimulationCosts(generate=(3.0,), update=0.05, tag=1.0, switch_out=0.2, optimizer=0.1, sync=0.1)
    setup = SchedulerSettings(
        steps=3,
        micro_batches=7,
        generators=POOL[:1],
        trainer=TRAINER,
        scoring="inline",
        tag="bts_plus",
        update_order="index",
        updates_per_rollout=3,
        max_stale_fraction=0.5,
        costs=costs.step_costs(),
    )
    scheduler = Scheduler(setup)
    drive(scheduler, SimulatedExecutor(setup, costs), None, command_timeout_s=1)
    assert scheduler.finished
