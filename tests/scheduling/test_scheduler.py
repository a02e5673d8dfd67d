"""The scheduler under every order of finishing: a tiny executor finishes outstanding commands at random, an auditor
that sees only events and commands (never the scheduler's state) checks that each one was allowed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
    SyncWeights,
    WorkerCommand,
)
from digenrl.scheduling.events import Event, Finished, RunStarted
from digenrl.scheduling.micro_batches import cut_into_micro_batches
from digenrl.scheduling.scheduler import Scheduler
from digenrl.scheduling.settings import SchedulerSettings

APPLIED, EMPTY, VOIDED = StepOutcome.APPLIED, StepOutcome.EMPTY, StepOutcome.VOIDED
TRAINER = WorkerId("trainer")
POOL = tuple(WorkerId(f"generator-{i}") for i in range(4))


@st.composite
def schedules(draw: st.DrawFn) -> SchedulerSettings:
    """1 to 4 generators with the trainer among them or of its own, B = 1..8, every order and hold of updates."""
    generators = POOL[: draw(st.integers(1, 4))]
    steps = draw(st.integers(0, 4))
    return SchedulerSettings(
        steps=steps,
        micro_batches=draw(st.integers(1, 8)),
        generators=generators,
        trainer=draw(st.sampled_from([*generators, TRAINER])),
        update_order=draw(st.sampled_from(["arrival", "index"])),
        update_after=draw(st.sampled_from(["group", "step"])),
        evaluate_at=tuple(sorted(draw(st.sets(st.integers(0, steps))))),
    )


class Play:
    """Finishes outstanding commands in random order until none is left; some workers are a hundred times slower."""

    def __init__(self, setup: SchedulerSettings, rng: random.Random, outcomes: Sequence[StepOutcome] = (APPLIED,)) -> None:
        self.scheduler = Scheduler(setup)
        self.outstanding: list[WorkerCommand] = []
        self.log: list[tuple[Event, list[Command]]] = []
        self._rng = rng
        self._outcomes = outcomes
        self._clock_us = 0
        self._speed = {worker: rng.choice([0.01, 1.0, 1.0]) for worker in setup.workers}

    def start(self) -> None:
        self._handle(RunStarted(at_us=0))

    def finish(self, command: WorkerCommand) -> None:
        outcome = self._outcomes[command.step % len(self._outcomes)] if isinstance(command, OptimizerStep) else None
        self._clock_us += self._rng.randint(0, 10)
        self.outstanding.remove(command)
        self._handle(Finished(at_us=self._clock_us, command=command, outcome=outcome))

    def run(self, before_each: Callable[[Play], None] = lambda play: None) -> None:
        self.start()
        while self.outstanding:
            before_each(self)
            (command,) = self._rng.choices(self.outstanding, [self._speed[c.worker] for c in self.outstanding])
            self.finish(command)

    def _handle(self, event: Event) -> None:
        commands = self.scheduler.handle(event)
        self.log.append((event, commands))
        self.outstanding += [command for command in commands if not isinstance(command, StopRun)]

    def commands(self, *kinds: type[Command]) -> list[Command]:
        return [command for _, commands in self.log for command in commands if isinstance(command, kinds)]


@dataclass
class Audit:
    """What must hold, told by events and commands alone."""

    setup: SchedulerSettings
    version: int = 0
    running: dict[WorkerId, WorkerCommand] = field(default_factory=dict)
    holds: Counter[WorkerId] = field(default_factory=Counter)
    """Version of the weights that a worker has loaded, or made."""
    encoded: set[int] = field(default_factory=set)
    begun: dict[type, list[MicroBatchId]] = field(default_factory=lambda: {Generate: [], Score: [], Accumulate: []})
    done: dict[type, list[MicroBatchId]] = field(default_factory=lambda: {Generate: [], Score: [], Accumulate: []})
    evaluated: list[int] = field(default_factory=list)
    voided: int = 0
    stopped: bool = False

    def check(self, log: Sequence[tuple[Event, list[Command]]]) -> None:
        for event, commands in log:
            self.event(event)
            stop_is_due = isinstance(event, Finished) and self.voided == self.setup.max_skipped_steps and not self.stopped
            assert stop_is_due == any(isinstance(command, StopRun) for command in commands)
            if self.stopped:
                assert commands == [], "a stopped run gives no work"
            for command in commands:
                self.command(command)
            assert self.running or self.stopped or self.version == self.setup.steps, "deadlock: work is left, and nobody works"
        assert not self.running
        if not self.stopped:
            assert self.version == self.setup.steps
            assert self.evaluated == list(self.setup.evaluate_at)

    def event(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            return
        command = event.command
        assert self.running.pop(command.worker) == command
        match command:
            case Encode(step=step):
                self.encoded.add(step)
            case SyncWeights(worker=worker, policy_version=version):
                self.holds[worker] = version
            case Evaluate(policy_version=version):
                self.evaluated.append(version)
            case OptimizerStep():
                self.version += 1
                self.voided = self.voided + 1 if event.outcome is VOIDED else 0
            case Generate() | Score() | Accumulate():
                self.done[type(command)].append(command.micro_batch)

    def command(self, command: Command) -> None:
        assert command.reason.strip(), f"{command} does not say why"
        if isinstance(command, StopRun):
            self.stopped = True
            return
        assert command.worker not in self.running, "a worker has one command at a time"
        self.running[command.worker] = command
        of_the_trainer = isinstance(command, Accumulate | OptimizerStep | Evaluate)
        if of_the_trainer:
            assert command.worker == self.setup.trainer
        elif not isinstance(command, SyncWeights):  # which the trainer does too: it publishes
            assert command.worker in self.setup.generators
        match command:
            case Encode(step=step):
                assert step == self.version < self.setup.steps
                assert step not in self.encoded
            case SyncWeights(worker=worker, policy_version=version):
                assert self.holds[worker] < version == self.version
            case Evaluate(worker=worker, policy_version=version):
                assert version == self.version == self.holds[worker]
            case OptimizerStep(step=step):
                everything = [MicroBatchId(step, index) for index in range(self.setup.micro_batches)]
                assert step == self.version
                for kind in (Generate, Score, Accumulate):
                    assert sorted(m for m in self.done[kind] if m.step == step) == everything, f"{kind.__name__} exactly once"
            case Generate() | Score() | Accumulate():
                self.micro_batch(command)

    def micro_batch(self, command: Generate | Score | Accumulate) -> None:
        its = command.micro_batch
        assert its.step == self.version < self.setup.steps, "no work of a step before the one before it is over"
        assert 0 <= its.index < self.setup.micro_batches
        assert its not in self.begun[type(command)], "exactly once"
        self.begun[type(command)].append(its)
        match command:
            case Generate(worker=worker, policy_version=version):
                assert version == self.version == self.holds[worker], "under the synced and published version"
                assert its.step in self.encoded
                assert set(self.done[Generate]) == set(self.begun[Score]), "scoring goes before new generation"
                assert its.index == sum(m.step == its.step for m in self.begun[Generate]) - 1, "lowest pending index first"
            case Score():
                assert its in self.done[Generate]
                assert its == next(m for m in self.done[Generate] if m not in self.begun[Score][:-1]), "oldest first"
            case Accumulate():
                self.update(its)

    def update(self, its: MicroBatchId) -> None:
        scored = [m for m in self.done[Score] if m.step == its.step]
        so_far = [m for m in self.begun[Accumulate] if m.step == its.step]
        assert its in scored
        if self.setup.update_after == "step":
            assert len(scored) == self.setup.micro_batches, "updates wait for the rewards of the whole step"
        in_order = sorted(scored) if self.setup.update_order == "index" else scored
        assert so_far == in_order[: len(so_far)]
        if self.setup.update_order == "index":
            assert its.index == len(so_far) - 1


outcome_lists = st.lists(st.sampled_from([APPLIED, EMPTY, VOIDED]), min_size=1, max_size=4)


@settings(max_examples=400, deadline=None, database=None)
@given(setup=schedules(), seed=st.integers(0, 2**32), outcomes=outcome_lists)
def test_every_finishing_order_trains_each_micro_batch_exactly_once_in_the_right_order(
    setup: SchedulerSettings, seed: int, outcomes: list[StepOutcome]
) -> None:
    play = Play(setup, random.Random(seed), outcomes)
    play.run()
    audit = Audit(setup)
    audit.check(play.log)
    assert play.scheduler.finished


@settings(max_examples=100, deadline=None, database=None)
@given(setup=schedules(), seed=st.integers(0, 2**32))
def test_the_run_is_finished_exactly_when_nothing_is_outstanding(setup: SchedulerSettings, seed: int) -> None:
    def not_yet(play: Play) -> None:
        assert not play.scheduler.finished

    play = Play(setup, random.Random(seed))
    assert not play.scheduler.finished
    play.run(before_each=not_yet)
    assert play.scheduler.finished


@settings(max_examples=100, deadline=None, database=None)
@given(
    prompts=st.integers(1, 20),
    groups=st.integers(1, 20),
    group_size=st.integers(1, 6),
    pool=st.integers(1, 4),
    seed=st.integers(),
)
def test_all_workers_together_generate_every_sample_of_every_prompt_once(
    prompts: int, groups: int, group_size: int, pool: int, seed: int
) -> None:
    cut = cut_into_micro_batches(prompts, groups)
    setup = SchedulerSettings(steps=2, micro_batches=len(cut), generators=POOL[:pool], trainer=TRAINER)
    play = Play(setup, random.Random(seed))
    play.run()
    generated = Counter(
        (command.micro_batch.step, prompt, sample)
        for command in play.commands(Generate)
        for prompt in cut[command.micro_batch.index].prompts
        for sample in range(group_size)
    )
    assert generated == Counter((s, p, g) for s in range(2) for p in range(prompts) for g in range(group_size))


def test_one_pool_works_in_turn_and_says_so() -> None:
    inline = WorkerId("inline")
    setup = SchedulerSettings(steps=1, micro_batches=2, generators=(inline,), trainer=inline, evaluate_at=(0, 1))
    play = Play(setup, random.Random(0))
    play.run()
    first, second = MicroBatchId(0, 0), MicroBatchId(0, 1)
    assert [replace(c, reason="") for c in play.commands(*WorkerCommand.__args__)] == [
        Evaluate(worker=inline, policy_version=0),
        Encode(worker=inline, step=0),
        Generate(worker=inline, micro_batch=first, policy_version=0),
        Score(worker=inline, micro_batch=first),
        Accumulate(worker=inline, micro_batch=first),
        Generate(worker=inline, micro_batch=second, policy_version=0),
        Score(worker=inline, micro_batch=second),
        Accumulate(worker=inline, micro_batch=second),
        OptimizerStep(worker=inline, step=0),
        SyncWeights(worker=inline, policy_version=1),
        Evaluate(worker=inline, policy_version=1),
    ]


def test_a_trainer_of_its_own_updates_while_the_next_micro_batch_is_generated() -> None:
    setup = SchedulerSettings(steps=1, micro_batches=2, generators=POOL[:1], trainer=TRAINER)
    play = Play(setup, random.Random(0))
    play.start()
    for _ in range(3):  # encode, generate 0, score 0
        play.finish(play.outstanding[0])
    assert [type(command) for command in play.outstanding] == [Generate, Accumulate]


def test_updates_by_index_wait_for_the_next_index_although_a_later_one_is_scored() -> None:
    setup = SchedulerSettings(steps=1, micro_batches=2, generators=POOL[:2], trainer=TRAINER, update_order="index")
    play = Play(setup, random.Random(0))
    play.start()
    play.finish(play.outstanding[0])  # encode
    slow, fast = play.outstanding
    play.finish(fast)
    play.finish(play.outstanding[-1])  # score of micro-batch 1
    assert play.outstanding == [slow], "micro-batch 1 is scored, and 0 comes first"
    play.finish(slow)
    play.finish(play.outstanding[-1])
    assert [c.micro_batch.index for c in play.outstanding if isinstance(c, Accumulate)] == [0]


def test_updates_by_arrival_take_what_is_scored_first() -> None:
    setup = SchedulerSettings(steps=1, micro_batches=2, generators=POOL[:2], trainer=TRAINER, update_order="arrival")
    play = Play(setup, random.Random(0))
    play.start()
    play.finish(play.outstanding[0])
    play.finish(play.outstanding[1])
    play.finish(play.outstanding[-1])
    assert [c.micro_batch.index for c in play.outstanding if isinstance(c, Accumulate)] == [1]


def test_updates_after_the_step_wait_for_every_score() -> None:
    setup = SchedulerSettings(steps=1, micro_batches=3, generators=POOL[:1], trainer=TRAINER, update_after="step")
    play = Play(setup, random.Random(0))
    play.run()
    kinds = [type(command) for command in play.commands(Score, Accumulate)]
    assert kinds == [Score] * 3 + [Accumulate] * 3


def test_a_slow_generator_that_missed_a_version_loads_the_newest_before_it_generates() -> None:
    setup = SchedulerSettings(steps=3, micro_batches=1, generators=POOL[:2], trainer=TRAINER)
    play = Play(setup, random.Random(0))
    play.start()
    while True:
        slow = [c for c in play.outstanding if isinstance(c, SyncWeights) and c.worker == POOL[1]]
        others = [c for c in play.outstanding if c not in slow]
        if not others:
            break
        play.finish(others[0])
    assert slow[0].policy_version == 1
    play.finish(slow[0])
    assert play.scheduler.finished, "nothing is left for it"
    Audit(setup).check(play.log)


@pytest.mark.parametrize("limit", [1, 2, 3, 4])
def test_so_many_voided_steps_in_a_row_stop_the_run(limit: int) -> None:
    setup = SchedulerSettings(
        steps=9, micro_batches=1, generators=POOL[:2], trainer=TRAINER, max_skipped_steps=limit, evaluate_at=(9,)
    )
    play = Play(setup, random.Random(0), [APPLIED, *[VOIDED] * 8])
    play.run()
    (stop,) = play.commands(StopRun)
    assert f"{limit} optimizer steps in a row" in stop.reason
    assert f"steps 1 to {limit}" in stop.reason
    assert len(play.commands(OptimizerStep)) == 1 + limit
    assert play.scheduler.finished


@pytest.mark.parametrize("good", [APPLIED, EMPTY])
def test_a_step_that_is_not_voided_starts_the_count_anew(good: StepOutcome) -> None:
    setup = SchedulerSettings(steps=8, micro_batches=1, generators=POOL[:1], trainer=POOL[0])
    play = Play(setup, random.Random(0), [VOIDED, VOIDED, good, VOIDED])  # repeated: two, good, three in a row
    play.run()
    assert len(play.commands(StopRun)) == 1
    assert play.scheduler.state.policy_version == 6, "steps 3, 4 and 5 are the first three in a row"


def test_a_stopped_run_gives_no_more_work_not_even_a_due_evaluation() -> None:
    setup = SchedulerSettings(
        steps=3, micro_batches=1, generators=POOL[:2], trainer=TRAINER, max_skipped_steps=1, evaluate_at=(2, 3)
    )
    play = Play(setup, random.Random(0), [APPLIED, VOIDED])
    play.start()
    while not play.commands(StopRun):  # generator 1 takes its time to load version 1
        play.finish(next(c for c in play.outstanding if not (isinstance(c, SyncWeights) and c.worker == POOL[1])))
    assert not play.scheduler.finished, "generator 1 is still at work"
    play.finish(play.outstanding[0])
    assert play.log[-1][1] == []
    assert play.scheduler.finished


def test_a_voided_step_advances_the_version_like_any_other() -> None:
    setup = SchedulerSettings(steps=2, micro_batches=1, generators=POOL[:1], trainer=TRAINER)
    play = Play(setup, random.Random(0), [VOIDED, APPLIED])
    play.run()
    assert [c.policy_version for c in play.commands(Generate)] == [0, 1]
    assert play.scheduler.state.policy_version == 2


def test_a_run_of_no_steps_is_finished_at_once() -> None:
    scheduler = Scheduler(SchedulerSettings(steps=0, micro_batches=3, generators=POOL[:1], trainer=TRAINER))
    assert scheduler.handle(RunStarted(at_us=0)) == []
    assert scheduler.finished


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"steps": -1}, "steps"),
        ({"micro_batches": 0}, "micro_batches"),
        ({"max_skipped_steps": 0}, "max_skipped_steps"),
        ({"generators": ()}, "generators"),
        ({"generators": (POOL[0], POOL[0])}, "generators"),
        ({"evaluate_at": (1, 0)}, "evaluate_at"),
        ({"evaluate_at": (1, 1)}, "evaluate_at"),
        ({"evaluate_at": (3,)}, "evaluate_at"),
        ({"evaluate_at": (-1,)}, "evaluate_at"),
    ],
)
def test_settings_that_no_schedule_can_carry_out_are_refused(change: dict[str, object], named: str) -> None:
    good = {"steps": 2, "micro_batches": 1, "generators": POOL[:1], "trainer": TRAINER}
    with pytest.raises(ValueError, match=named):
        SchedulerSettings(**{**good, **change})
