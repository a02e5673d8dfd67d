"""An executor that lies: every illegal event raises ProtocolError, and the state is as if it had never come."""

from __future__ import annotations

import pickle
import random
from dataclasses import fields, replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from digenrl.errors import ProtocolError
from digenrl.ids import MicroBatchId, StepOutcome, WorkerId
from digenrl.scheduling.commands import (
    Accumulate,
    Encode,
    Evaluate,
    Generate,
    OptimizerStep,
    Score,
    StopRun,
    SyncWeights,
    WorkerCommand,
)
from digenrl.scheduling.events import CommandFailed, ConditioningLost, Event, Finished, RunStarted, TrajectoryLost
from digenrl.scheduling.scheduler import Scheduler
from digenrl.scheduling.settings import SchedulerSettings
from digenrl.scheduling.state import TRANSITIONS, Move, Stage, StepState

WORKERS = (WorkerId("generator-0"), WorkerId("generator-1"), WorkerId("trainer"))
SETTINGS = [
    SchedulerSettings(steps=2, micro_batches=2, generators=WORKERS[:2], trainer=trainer, evaluate_at=(0, 2))
    for trainer in (WORKERS[0], WORKERS[2])
]


def refused(scheduler: Scheduler, *events: Any) -> None:
    before = pickle.dumps(scheduler.state)
    for event in events:
        with pytest.raises(ProtocolError):
            scheduler.handle(event)
        assert pickle.dumps(scheduler.state) == before


def finished(command: Any, **changes: Any) -> Finished:
    outcome = StepOutcome.APPLIED if isinstance(command, OptimizerStep) else None
    return Finished(**{"at_us": 7, "command": command, "outcome": outcome, **changes})


def random_command(rng: random.Random) -> WorkerCommand:
    worker = rng.choice([*WORKERS, WorkerId("nobody")])
    micro_batch, number = MicroBatchId(rng.randint(-1, 3), rng.randint(-1, 3)), rng.randint(-1, 3)
    return rng.choice(
        [
            Encode(worker=worker, step=number),
            Generate(worker=worker, micro_batch=micro_batch, policy_version=number),
            Score(worker=worker, micro_batch=micro_batch),
            Accumulate(worker=worker, micro_batch=micro_batch),
            OptimizerStep(worker=worker, step=number),
            SyncWeights(worker=worker, policy_version=number),
            Evaluate(worker=worker, policy_version=number),
        ]
    )


def altered(command: WorkerCommand) -> list[WorkerCommand]:
    """The command with one field changed, for every field."""
    wrong = {
        "worker": WorkerId("generator-9"),
        "micro_batch": MicroBatchId(0, 9),
        "policy_version": 9,
        "step": 9,
        "update": 9,
        "reason": "another one",
    }
    return [replace(command, **{field.name: wrong[field.name]}) for field in fields(command)]


def losses_of_nothing(past: list[WorkerCommand]) -> list[Event]:
    """Losses of what is not there, after these commands have ended well."""
    over = {command.step for command in past if isinstance(command, OptimizerStep)}
    encoded = {command.step for command in past if isinstance(command, Encode)} - over
    accumulated = {command.micro_batch for command in past if isinstance(command, Accumulate)}
    there = {command.micro_batch for command in past if isinstance(command, Generate)} - accumulated
    anything = [MicroBatchId(step, index) for step, index in product(range(-1, 4), repeat=2)]
    return [
        *(ConditioningLost(at_us=7, step=step) for step in range(-1, 4) if step not in encoded),
        *(TrajectoryLost(at_us=7, micro_batch=its) for its in anything if its not in there),
    ]


@settings(max_examples=60, deadline=None, database=None)
@given(setup=st.sampled_from(SETTINGS), seed=st.integers(0, 2**32))
def test_no_lie_at_any_moment_changes_anything_and_the_run_ends_well(setup: SchedulerSettings, seed: int) -> None:
    rng, scheduler = random.Random(seed), Scheduler(setup)
    outstanding: list[WorkerCommand] = list(scheduler.handle(RunStarted(at_us=0)))
    past: list[WorkerCommand] = []
    while outstanding:
        lies = [random_command(rng) for _ in range(4)] + past[-2:]
        lies += [lie for command in outstanding for lie in altered(command)]
        lies += [replace(command, worker=worker) for command in outstanding for worker in WORKERS]
        wrong_outcomes = [
            finished(command, outcome=None if isinstance(command, OptimizerStep) else rng.choice(list(StepOutcome)))
            for command in outstanding
        ]
        lies = [lie for lie in lies if lie not in outstanding]
        refused(scheduler, RunStarted(at_us=1), *wrong_outcomes, *(finished(lie) for lie in lies))
        refused(scheduler, *(CommandFailed(at_us=7, command=lie, untouched=True) for lie in lies), *losses_of_nothing(past))
        done = rng.choice(outstanding)
        outstanding.remove(done)
        past.append(done)
        outstanding += scheduler.handle(finished(done))
        refused(scheduler, finished(done))
    assert scheduler.finished
    assert scheduler.state.policy_version == setup.steps


@pytest.mark.parametrize("setup", SETTINGS)
def test_nothing_can_finish_before_the_run_has_started(setup: SchedulerSettings) -> None:
    scheduler, rng = Scheduler(setup), random.Random(0)
    for _ in range(30):
        refused(scheduler, finished(random_command(rng)))
    assert scheduler.handle(RunStarted(at_us=0)), "and then it starts as usual"


@pytest.mark.parametrize("nonsense", [None, "RunStarted", StopRun(reason="?"), finished(StopRun(reason="?")), finished(None)])
def test_what_is_no_event_is_refused(nonsense: object) -> None:
    scheduler = Scheduler(SETTINGS[0])
    refused(scheduler, nonsense)
    scheduler.handle(RunStarted(at_us=0))
    refused(scheduler, nonsense)


def test_an_error_names_what_the_worker_is_really_doing() -> None:
    scheduler = Scheduler(SETTINGS[1])
    scheduler.handle(RunStarted(at_us=0))
    with pytest.raises(ProtocolError) as caught:
        scheduler.handle(finished(Score(worker=WORKERS[0], micro_batch=MicroBatchId(0, 0))))
    assert "generator-0" in str(caught.value)
    assert "Encode" in caught.value.why


MOVES = [(kind, move) for kind in (Generate, Score, Accumulate) for move in Move if move is not Move.LOSE]


@pytest.mark.parametrize(("stage", "move"), list(product(Stage, [*MOVES, (None, Move.LOSE)])))
def test_a_stage_changes_by_a_row_of_the_table_or_not_at_all(stage: Stage, move: Any) -> None:
    step = step_at(stage)
    before = pickle.dumps(step)
    target = TRANSITIONS.get((stage, *move))
    if target is None:
        with pytest.raises(ProtocolError):
            step.move(0, *move)
        assert pickle.dumps(step) == before
        return
    step.move(0, *move)
    assert step.stages[0] is target
    assert (0 in step.scoring_queue) == (target is Stage.SCORING_QUEUE)
    assert (0 in step.update_queue) == (target is Stage.UPDATE_QUEUE)
    assert step.pending == (2 if target is Stage.PENDING else 1), "the other one is pending all the time"


def step_at(stage: Stage) -> StepState:
    """A step whose first micro-batch was brought to a stage by legal moves."""
    step = StepState(0, SETTINGS[0])
    moves = [(kind, move) for kind in (Generate, Score, Accumulate) for move in (Move.START, Move.FINISH)]
    for kind, move in moves[: list(Stage).index(stage)]:
        step.move(0, kind, move)
    assert step.stages[0] is stage
    return step


@pytest.mark.parametrize("index", [-1, 2])
def test_a_micro_batch_of_another_index_cannot_move(index: int) -> None:
    with pytest.raises(ProtocolError, match="not of an open step"):
        StepState(0, SETTINGS[0]).move(index, Generate, Move.START)
