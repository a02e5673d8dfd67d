"""A run that continues from a checkpoint generates what was stale under the same weights as the run that was interrupted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from digenrl.ids import MicroBatchId, WorkerId
from digenrl.scheduling.commands import (
    Accumulate,
    Encode,
    Generate,
    OptimizerStep,
    SaveCheckpoint,
    Score,
    StopRun,
    SwitchMode,
    SyncWeights,
)
from digenrl.scheduling.events import CommandFailed, ConditioningLost, TrajectoryLost, WorkerJoined, WorkerLost
from digenrl.scheduling.settings import SchedulerSettings
from digenrl.scheduling.step_model import StepCosts

Play = Callable[..., Any]
G0, G1, TRAINER = WorkerId("generator-0"), WorkerId("generator-1"), WorkerId("trainer")


def resumed(play: Play, *claims: int, **changes: Any) -> Any:
    """A run from version 3 on, of steps 3 and 4, in which half of a step may be stale."""
    small = {"steps": 5, "first_version": 3, "micro_batches": 4, "max_stale_fraction": 0.5, "stale_claims": claims}
    return play(**{**small, **changes})


def versions(hand: Any, step: int = 3) -> dict[int, list[int]]:
    """Under which versions each micro-batch of a step was generated, or begun."""
    found: dict[int, list[int]] = {}
    for command in hand.commands(Generate):
        if command.micro_batch.step == step:
            found.setdefault(command.micro_batch.index, []).append(command.policy_version)
    return dict(sorted(found.items()))


def test_what_was_claimed_is_generated_with_the_old_weights_and_the_rest_with_the_new(play: Play) -> None:
    hand = resumed(play, 0, 2)
    assert (type(hand.at[G0]), type(hand.at[TRAINER])) == (Encode, SyncWeights)
    hand.finish_all()
    assert versions(hand) == {0: [2], 1: [3], 2: [2], 3: [3]}
    assert {c.micro_batch.step for c in hand.commands(Accumulate)} == {3, 4}
    assert hand.scheduler.finished


def test_the_trainer_publishes_the_version_of_the_checkpoint_first(play: Play) -> None:
    hand = resumed(play, 0, save_at=(3,))
    sync = hand.at[TRAINER]
    assert (type(sync), sync.policy_version) == (SyncWeights, 3)
    assert sync.reason == "publish version 3; holds 2"
    assert [type(command) for command in hand.finish(TRAINER)] == [SaveCheckpoint]


def test_without_claims_all_workers_hold_the_version_that_the_run_begins_with(play: Play) -> None:
    hand = resumed(play)
    assert TRAINER not in hand.at, "nothing to publish"
    hand.finish(G0)
    assert hand.at[G0].policy_version == 3


def test_a_generator_loads_the_new_weights_as_soon_as_all_claims_have_one(play: Play) -> None:
    hand = resumed(play, 1, replicas=2)
    assert G1 not in hand.at, "it waits for the encoded prompts, and keeps its weights"
    first, second = hand.finish(G0)
    assert (first.micro_batch, first.policy_version) == (MicroBatchId(3, 1), 2)
    assert first.reason == "stale: claimed before the run was interrupted"
    assert (type(second), second.worker, second.policy_version) == (SyncWeights, G1, 3)
    (ordinary,) = hand.finish(G1)
    assert (ordinary.micro_batch, ordinary.policy_version) == (MicroBatchId(3, 0), 3)


def test_the_oldest_claim_is_generated_first_and_scoring_goes_before_the_next(play: Play) -> None:
    hand = resumed(play, 1, 3, scoring="generator")
    hand.finish(G0)
    assert hand.at[G0].micro_batch == MicroBatchId(3, 1)
    assert [type(command) for command in hand.finish(G0)] == [Score]
    hand.finish(G0)
    assert (hand.at[G0].micro_batch, hand.at[G0].policy_version) == (MicroBatchId(3, 3), 2)


def test_a_worker_without_encoders_waits_for_the_prompts_with_the_old_weights(play: Play) -> None:
    hand = resumed(play, 0, replicas=2, encoders=(G1,))
    assert G0 not in hand.at
    hand.finish(TRAINER)
    assert G0 not in hand.at
    (claimed, sync) = hand.finish(G1)
    assert (claimed.worker, claimed.policy_version) == (G0, 2)
    assert (sync.worker, sync.policy_version) == (G1, 3)


def test_claims_wait_for_prompts_that_are_lost(play: Play) -> None:
    hand = resumed(play, 0, 1)
    hand.finish(G0)
    hand.tell(ConditioningLost(at_us=hand.now, step=3))
    hand.finish(G0)
    assert isinstance(hand.at[G0], Encode)
    hand.finish_all()
    assert versions(hand) == {0: [2], 1: [2], 2: [3], 3: [3]}


@pytest.mark.parametrize("untouched", [True, False])
def test_a_claim_that_fails_is_generated_like_any_other(play: Play, untouched: bool) -> None:
    hand = resumed(play, 0, 1, max_attempts=2)
    hand.finish(G0)
    hand.tell(CommandFailed(at_us=hand.now, command=hand.at[G0], untouched=untouched))
    assert hand.at[G0].micro_batch == MicroBatchId(3, 1), "the other claim still needs its weights"
    assert hand.scheduler.state.stale_claims == (1,)
    hand.finish_all()
    assert versions(hand) == {0: [2, 3], 1: [2], 2: [3], 3: [3]}


def test_a_claim_whose_trajectory_is_lost_is_generated_like_any_other(play: Play) -> None:
    hand = resumed(play, 0, update_after="step")
    hand.finish(G0)
    hand.finish(G0)
    hand.tell(TrajectoryLost(at_us=hand.now, micro_batch=MicroBatchId(3, 0)))
    assert hand.scheduler.state.step.stale_used == 0
    hand.finish_all()
    assert versions(hand)[0] == [2, 3]


def test_claims_that_nobody_can_generate_with_the_old_weights_any_more_are_everybody_s(play: Play) -> None:
    hand = resumed(play, 0, 3, replicas=2, max_attempts=3)
    hand.finish(TRAINER)
    hand.tell(WorkerLost(at_us=hand.now, worker=G0))
    assert hand.scheduler.state.stale_claims == (0, 3), "the other one still holds them"
    hand.tell(WorkerJoined(at_us=hand.now, worker=G0))
    assert hand.at[G0].policy_version == 3, "one that has joined loads the present ones"
    hand.tell(WorkerLost(at_us=hand.now, worker=G1))
    assert hand.scheduler.state.stale_claims == ()
    hand.finish_all()
    assert versions(hand) == {0: [3], 1: [3], 2: [3], 3: [3]}


def test_a_worker_with_the_new_weights_leaves_claims_alone_and_makes_the_next_step_rather_than_wait(play: Play) -> None:
    hand = resumed(play, 0, 1, replicas=2, micro_batches=3, max_stale_fraction=0.7, max_attempts=2)
    hand.tell(WorkerLost(at_us=hand.now, worker=G1))
    hand.finish(G0)
    hand.tell(WorkerJoined(at_us=hand.now, worker=G1))
    hand.finish(G1)
    assert hand.at[G1].micro_batch == MicroBatchId(3, 2)
    hand.finish(G1)
    assert (type(hand.at[G1]), hand.at[G1].step) == (Encode, 4)
    assert hand.at[G0].micro_batch == MicroBatchId(3, 0), "and 1 waits for it"
    hand.finish(G1)
    assert hand.at[G1].micro_batch == MicroBatchId(4, 0)
    hand.finish_all()
    assert versions(hand) == {0: [2], 1: [2], 2: [3]}


@pytest.mark.parametrize("tag", ["greedy", "static"])
def test_the_trainer_generates_no_claim(play: Play, tag: str) -> None:
    hand = resumed(play, 0, 1, tag=tag, tag_static=3)
    hand.finish(TRAINER)
    hand.finish(G0)
    while TRAINER in hand.at:
        hand.finish(TRAINER)
    assert versions(hand) == {0: [2], 2: [3], 3: [3]}
    assert hand.scheduler.state.step.pending == 1, "the second claim is the generator's"
    hand.finish_all()
    assert versions(hand) == {0: [2], 1: [2], 2: [3], 3: [3]}


def test_no_claim_is_reserved_for_the_trainer(play: Play) -> None:
    # With a trainer that is a hundred times faster the plan is to generate all that is pending there.
    costs = StepCosts(generate=(1000,), score=None, update=1, tag=10, switch_in=0, switch_out=0)
    hand = resumed(play, 0, 1, 2, micro_batches=6, tag="bts_plus", costs=costs)
    hand.finish(TRAINER)
    hand.finish(G0)
    step = hand.scheduler.state.step
    assert isinstance(hand.at[TRAINER], SwitchMode)
    assert (step.pending, step.available) == (4, 2)
    assert step.reserved == 2, "the one that is switched for is claimed"
    hand.finish_all()
    assert versions(hand) == {0: [2], 1: [2], 2: [2], 3: [3], 4: [3], 5: [3]}


def test_a_worker_with_the_new_weights_leaves_to_the_trainer_what_is_reserved_whatever_claims_there_are(play: Play) -> None:
    costs = StepCosts(generate=(1000, 1000), score=None, update=1, tag=10, switch_in=0, switch_out=0)
    hand = resumed(play, 0, 1, 2, micro_batches=6, tag="bts_plus", costs=costs, replicas=2, max_attempts=2)
    hand.finish(TRAINER)
    hand.finish(G0)
    step = hand.scheduler.state.step
    hand.tell(WorkerLost(at_us=hand.now, worker=G1))
    hand.tell(WorkerJoined(at_us=hand.now, worker=G1))
    hand.finish(G1)
    assert hand.at[G1].micro_batch == MicroBatchId(3, 1), "given back, and not reserved"
    assert (step.pending, step.available, step.reserved) == (3, 2, 2)
    hand.finish(G1)
    assert step.available == 2
    assert G1 not in hand.at


def test_updates_in_order_of_index_work_with_claims_anywhere(play: Play) -> None:
    hand = resumed(play, 1, 3, update_order="index", replicas=2)
    hand.finish_all()
    assert versions(hand) == {0: [3], 1: [2], 2: [3], 3: [2]}
    assert [c.micro_batch.index for c in hand.commands(Accumulate) if c.micro_batch.step == 3] == [0, 1, 2, 3]


def test_a_checkpoint_learns_what_is_stale_in_the_step_that_begins(play: Play) -> None:
    hand = play(steps=3, micro_batches=4, replicas=2, max_stale_fraction=0.5, save_at=(1,))
    assert hand.scheduler.state.stale_claims == ()
    while not isinstance(hand.at.get(TRAINER), SaveCheckpoint):
        hand.finish(next(iter(hand.at)))
    claims = hand.scheduler.state.stale_claims
    stale = [c.micro_batch.index for c in hand.commands(Generate) if c.micro_batch.step == 1 and c.policy_version == 0]
    assert claims == tuple(sorted(stale)) == (0, 1)
    hand.finish(TRAINER)
    while not isinstance(hand.at.get(TRAINER), OptimizerStep):
        hand.finish(next(iter(hand.at)))
    assert hand.scheduler.state.stale_claims == claims, "as long as the step is open, whatever has become of them"
    hand.finish_all()
    assert hand.scheduler.state.stale_claims == (), "no step is open"


def test_a_checkpoint_at_once_keeps_the_claims_that_are_not_generated_yet(play: Play) -> None:
    hand = resumed(play, 1, 2)
    assert hand.scheduler.state.stale_claims == (1, 2)
    hand.finish(G0)
    assert hand.scheduler.state.step.stale_used == 1
    assert hand.scheduler.state.stale_claims == (1, 2)
    hand.finish_all()
    assert hand.commands(StopRun) == []


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"stale_claims": (1, 0)}, "ascending indices"),
        ({"stale_claims": (1, 1)}, "ascending indices"),
        ({"stale_claims": (-1, 0)}, "ascending indices"),
        ({"stale_claims": (3, 4)}, "ascending indices of a step's 4 micro-batches"),
        ({"first_version": 0}, r"first_version \(0\)"),
        ({"first_version": 5}, r"first_version \(5\)"),
        ({"stale_claims": (0, 1, 2)}, "allows 2 of the 4"),
        ({"max_stale_fraction": 0.0}, "allows 0 of the 4"),
        ({"max_stale_fraction": 0.0, "trainer": G0}, "allows 0 of the 4"),
    ],
)
def test_claims_that_no_run_can_have_made_are_refused(change: dict[str, object], named: str) -> None:
    good: dict[str, Any] = {
        "steps": 5,
        "first_version": 3,
        "micro_batches": 4,
        "generators": (G0,),
        "trainer": TRAINER,
        "max_stale_fraction": 0.5,
        "stale_claims": (0, 1),
    }
    SchedulerSettings(**good)
    with pytest.raises(ValueError, match=named):
        SchedulerSettings(**{**good, **change})
