"""What must always hold, whatever is slow, fails, joins or gets lost.

A random executor finishes, fails and loses things in any order, several at one instant; an auditor that sees only events
and commands, never the scheduler's state, checks that each command was allowed and that nothing is left undone.
"""

from __future__ import annotations

import pickle
import random
import tempfile
from collections import Counter, defaultdict
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
    Score,
    StopRun,
    SwitchMode,
    SyncWeights,
    WorkerCommand,
)
from digenrl.scheduling.events import (
    CommandFailed,
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
def schedules(draw: st.DrawFn) -> SchedulerSettings:
    generators = POOL[: draw(st.integers(1, 4))]
    one_pool = draw(st.integers(0, 5)) == 0
    size = draw(st.integers(1, 8))
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
        steps=draw(st.integers(0, 4)),
        micro_batches=size,
        generators=generators,
        trainer=generators[0] if one_pool else TRAINER,
        scoring=scoring,
        scorers=SCORERS if scoring == "pool" else (),
        update_order=draw(st.sampled_from(["arrival", "index"])),
        update_after=draw(st.sampled_from(["group", "step"])),
        updates_per_rollout=draw(st.integers(1, min(3, size))),
        tag=tag,
        tag_static=draw(st.integers(0, size)),
        replan=draw(st.sampled_from(["bubble", "step"])),
        max_stale_fraction=0.0 if one_pool else draw(st.sampled_from([0.0, 0.25, 0.5, 1.0])),
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
        """Generated, and their update not started."""

    def run(self) -> None:
        self._handle([RunStarted(at_us=0)])
        for _ in range(20_000):
            if self.scheduler.finished:
                return
            self._now += self._rng.choice([0, 1, 7, 30])
            events = self._something()
            assert events, f"deadlock: {self._setup}, lost {self._lost}"
            self._handle(events)
        raise AssertionError("the run does not end")

    def _something(self) -> list[Event]:
        rng, at = self._rng, self._now
        if self._lost and (rng.random() < 0.3 or not self.outstanding):
            worker = rng.choice(sorted(self._lost))
            self._lost.discard(worker)
            return [WorkerJoined(at_us=at, worker=worker)]
        if rng.random() < self._trouble:
            trouble = self._make_trouble(at)
            if trouble:
                return [trouble]
        count = rng.randint(1, max(1, min(3, len(self.outstanding))))
        chosen = rng.sample(sorted(self.outstanding), min(count, len(self.outstanding)))
        return [self._finish(self.outstanding.pop(worker), at) for worker in chosen]

    def _make_trouble(self, at: int) -> Event | None:
        rng = self._rng
        safe = [w for w in (*self._setup.generators, *self._setup.scorers) if w != self._setup.trainer]
        kind = rng.choice(["lose", "fail", "trajectory", "overdue"])
        if kind == "lose" and (alive := [w for w in safe if w not in self._lost]):
            worker = rng.choice(alive)
            self._lost.add(worker)
            self.outstanding.pop(worker, None)
            return WorkerLost(at_us=at, worker=worker, error="gone")
        harmless = Encode | Generate | Score | SyncWeights | Evaluate
        if kind == "fail" and (able := [w for w, c in self.outstanding.items() if isinstance(c, harmless)]):
            return CommandFailed(at_us=at, command=self.outstanding.pop(rng.choice(sorted(able))), error="boom")
        if kind == "trajectory" and (ready := sorted(self._ready)):
            lost = rng.choice(ready)
            self._ready.discard(lost)
            return TrajectoryLost(at_us=at, micro_batch=lost)
        if kind == "overdue" and self.outstanding:
            return WorkerOverdue(at_us=at, worker=rng.choice(sorted(self.outstanding)))
        return None

    def _finish(self, command: WorkerCommand, at: int) -> Event:
        if isinstance(command, Generate):
            self._ready.add(command.micro_batch)
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
            if isinstance(command, Accumulate):
                self._ready.discard(command.micro_batch)


@dataclass
class Audit:
    """What must hold, told by events and commands alone."""

    setup: SchedulerSettings
    version: int = 0
    updates: int = 0
    """Optimizer steps of the step in training that are over."""
    holds: defaultdict[WorkerId, int] = field(default_factory=lambda: defaultdict(int))
    encoded: set[int] = field(default_factory=set)
    made: dict[MicroBatchId, int] = field(default_factory=dict)
    """Version of every generated micro-batch."""
    scored: dict[MicroBatchId, None] = field(default_factory=dict)
    accumulated: list[MicroBatchId] = field(default_factory=list)
    generating: dict[WorkerId, tuple[MicroBatchId, int]] = field(default_factory=dict)
    stale: Counter[int] = field(default_factory=Counter)
    trainer_generates: bool = False

    def check(self, log: list[tuple[list[Event], list[Command]]]) -> None:
        for events, commands in log:
            for event in events:
                self.event(event)
            for command in commands:
                self.command(command)
        assert self.version == self.setup.steps
        everything = [MicroBatchId(s, i) for s in range(self.setup.steps) for i in range(self.setup.micro_batches)]
        assert sorted(self.accumulated) == everything, "every micro-batch is accumulated exactly once"

    def event(self, event: Event) -> None:
        match event:
            case Finished(command=command):
                self.finished(command)
            case CommandFailed(command=Generate(worker=worker)):
                self.give_back(worker)
            case WorkerLost(worker=worker):
                self.give_back(worker)
            case WorkerJoined(worker=worker):
                self.holds[worker] = -1
            case TrajectoryLost(micro_batch=its):
                version = self.made.pop(its)
                self.stale[its.step] -= version < its.step
                self.scored.pop(its, None)

    def give_back(self, worker: WorkerId) -> None:
        if worker in self.generating:
            its, version = self.generating.pop(worker)
            self.stale[its.step] -= version < its.step

    def finished(self, command: WorkerCommand) -> None:
        match command:
            case Encode(step=step):
                self.encoded.add(step)
            case SyncWeights(worker=worker, policy_version=version):
                self.holds[worker] = version
            case Generate(worker=worker, micro_batch=its):
                self.made[its] = self.generating.pop(worker)[1]
                if self.setup.scoring == "inline":
                    self.scored[its] = None
            case Score(micro_batch=its):
                if its in self.made:
                    self.scored[its] = None
            case Accumulate(micro_batch=its):
                self.accumulated.append(its)
            case SwitchMode(generating=generating):
                self.trainer_generates = generating
            case OptimizerStep():
                self.updates += 1
                if self.updates == self.setup.updates_per_rollout:
                    self.version, self.updates = self.version + 1, 0

    def command(self, command: Command) -> None:
        assert command.reason.strip(), f"{command} does not say why"
        match command:
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
        assert its not in [flying for flying, _ in self.generating.values()]
        assert version == self.holds[worker], "a worker generates with the weights that it holds"
        assert version in (its.step, its.step - 1), "at most one version old"
        if version < its.step:
            self.stale[its.step] += 1
            assert self.stale[its.step] <= int(self.setup.max_stale_fraction * self.setup.micro_batches)
            assert worker != self.setup.trainer, "TAG is never stale"
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
    chaos = Chaos(replace(setup, max_stale_fraction=0.0), random.Random(seed), 0.1)
    chaos.run()
    commands = [c for _, commands in chaos.log for c in commands if isinstance(c, Generate)]
    assert all(c.policy_version == c.micro_batch.step for c in commands)


@given(schedules(), st.integers(0, 2**32), st.integers(0, 60))
@settings(max_examples=200, deadline=None, database=None)
def test_an_illegal_event_is_refused_and_changes_nothing(setup: SchedulerSettings, seed: int, after: int) -> None:
    setup = replace(setup, steps=max(1, setup.steps))
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
