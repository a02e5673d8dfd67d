"""What becomes of work that was never begun, and of what a node has taken with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from digenrl.errors import ProtocolError
from digenrl.ids import MicroBatchId, WorkerId
from digenrl.scheduling.commands import (
    Accumulate,
    Encode,
    Evaluate,
    Generate,
    OptimizerStep,
    SaveCheckpoint,
    Score,
    StopRun,
    SwitchMode,
    SyncWeights,
)
from digenrl.scheduling.events import CommandFailed, ConditioningLost, TrajectoryLost, WorkerJoined, WorkerLost
from digenrl.scheduling.step_model import StepCosts

Play = Callable[..., Any]
G0, G1, TRAINER = WorkerId("generator-0"), WorkerId("generator-1"), WorkerId("trainer")
FIRST, SECOND = MicroBatchId(0, 0), MicroBatchId(0, 1)


@pytest.mark.parametrize(
    ("worker", "kind"),
    [
        (G0, Encode),
        (G0, Generate),
        (G0, Score),
        (G0, SyncWeights),
        (TRAINER, SwitchMode),
        (TRAINER, Generate),
        (TRAINER, Accumulate),
        (TRAINER, OptimizerStep),
        (TRAINER, SyncWeights),
        (TRAINER, SaveCheckpoint),
        (TRAINER, Evaluate),
    ],
)
def test_what_never_began_is_tried_again_and_never_stops_the_run(play: Play, worker: WorkerId, kind: type) -> None:
    hand = play(steps=2, micro_batches=3, scoring="generator", tag="greedy", save_at=(1, 2), evaluate_at=(0, 2))
    while not isinstance(hand.at.get(worker), kind):
        hand.finish(next(iter(hand.at)))
    for _ in range(5):
        hand.tell(hand.refused(worker))
        assert isinstance(hand.at[worker], kind)
    assert hand.scheduler.state.failures == {}
    hand.finish_all()
    assert hand.scheduler.finished
    assert hand.commands(StopRun) == []
    assert hand.scheduler.state.policy_version == 2


@pytest.mark.parametrize("kind", [Generate, Score])
def test_an_attempt_that_never_began_does_not_count_and_one_that_failed_does(play: Play, kind: type) -> None:
    hand = play(scoring="generator", max_attempts=2)
    hand.finish(G0, until=kind)
    for _ in range(3):
        hand.tell(hand.refused(G0))
    assert hand.at[G0].micro_batch == FIRST
    assert isinstance(hand.at[G0], kind)
    hand.tell(CommandFailed(at_us=hand.now, command=hand.at[G0]))
    hand.tell(CommandFailed(at_us=hand.now, command=hand.at[G0], error="out of memory"))
    (stop,) = hand.commands(StopRun)
    assert "has failed 2 times: out of memory" in stop.reason


def test_an_update_that_never_began_is_the_next_one_again(play: Play) -> None:
    hand = play(micro_batches=3)
    hand.finish(G0, until=Generate)
    for _ in range(3):
        hand.finish(G0)
    assert list(hand.scheduler.state.step.update_queue) == [1, 2]
    (again,) = hand.tell(hand.refused(TRAINER))
    assert (type(again), again.micro_batch) == (Accumulate, FIRST)
    assert list(hand.scheduler.state.step.update_queue) == [1, 2]


def test_an_update_that_never_began_is_not_scored_once_more_where_updates_wait_for_all_scores(play: Play) -> None:
    hand = play(micro_batches=3, update_after="step")
    hand.finish(G0, until=Generate)
    for _ in range(3):
        hand.finish(G0)
    hand.tell(hand.refused(TRAINER), TrajectoryLost(at_us=hand.now, micro_batch=SECOND))
    assert TRAINER not in hand.at, "one of three has no rewards"
    hand.finish(G0)
    assert isinstance(hand.at[TRAINER], Accumulate)


def test_an_update_that_failed_half_way_stops_the_run(play: Play) -> None:
    hand = play()
    hand.finish(G0, until=Generate)
    hand.finish(G0)
    (stop,) = hand.tell(CommandFailed(at_us=hand.now, command=hand.at[TRAINER], error="boom"))
    assert isinstance(stop, StopRun)
    assert "boom" in stop.reason


def updating(play: Play, **changes: Any) -> Any:
    """The trainer is at the first micro-batch, the generator at the second, and no other is left."""
    hand = play(**changes)
    hand.finish(G0, until=Generate)
    hand.finish(G0)
    assert hand.at[TRAINER].micro_batch == FIRST
    return hand


@pytest.mark.parametrize("lost_first", [True, False])
def test_an_update_whose_trajectory_is_gone_waits_for_the_micro_batch_to_be_generated_again(play: Play, lost_first: bool) -> None:
    hand = updating(play)
    now = hand.now
    events = [TrajectoryLost(at_us=now, micro_batch=FIRST), CommandFailed(at_us=now, command=hand.at[TRAINER], untouched=True)]
    assert hand.tell(*events[:: 1 if lost_first else -1]) == []
    assert hand.stage(FIRST) == "pending"
    hand.finish(G0)
    assert hand.at[G0].micro_batch == FIRST
    assert hand.at[TRAINER].micro_batch == SECOND


def test_a_loss_that_is_known_before_the_update_fails_counts_when_it_fails(play: Play) -> None:
    hand = updating(play)
    assert hand.tell(TrajectoryLost(at_us=hand.now, micro_batch=FIRST)) == []
    assert hand.stage(FIRST) == "updating"
    assert hand.tell(hand.refused(TRAINER)) == []
    assert hand.stage(FIRST) == "pending"


@pytest.mark.parametrize("when", ["before", "with it"])
def test_an_update_that_ends_well_needs_its_trajectory_no_more(play: Play, when: str) -> None:
    hand = updating(play)
    lost = TrajectoryLost(at_us=hand.now, micro_batch=FIRST)
    if when == "before":
        hand.tell(lost)
        hand.finish(TRAINER)
    else:
        hand.tell(lost, hand.finished(TRAINER))
    assert hand.stage(FIRST) == "accumulated"
    assert not hand.scheduler.state.step.doomed
    hand.finish_all()
    assert [c.micro_batch for c in hand.commands(Generate)] == [FIRST, SECOND]
    assert hand.scheduler.finished


def test_a_trajectory_is_lost_once(play: Play) -> None:
    hand = updating(play)
    lost = TrajectoryLost(at_us=hand.now, micro_batch=FIRST)
    hand.tell(lost)
    with pytest.raises(ProtocolError, match=r"micro-batch 0\.0 cannot be lost"):
        hand.tell(lost)


def test_a_scoring_whose_trajectory_is_gone_is_generated_again_and_counts_no_attempt(play: Play) -> None:
    hand = play(scoring="generator")
    hand.finish(G0, until=Score)
    (command,) = hand.tell(hand.refused(G0), TrajectoryLost(at_us=hand.now, micro_batch=FIRST))
    assert (type(command), command.micro_batch) == (Generate, FIRST)
    assert hand.scheduler.state.step.attempts == [0, 0]


def test_prompts_that_are_gone_are_encoded_again_before_anything_is_generated_or_accumulated(play: Play) -> None:
    hand = updating(play, micro_batches=3, replicas=2, encoders=(G0,))
    hand.finish(G1)
    assert hand.tell(ConditioningLost(at_us=hand.now, step=0)) == []
    hand.finish(TRAINER)
    assert TRAINER not in hand.at, "the second one is scored, and its gradient needs the prompts"
    (encode,) = hand.finish(G0)
    assert isinstance(encode, Encode)
    assert "lost" in encode.reason
    assert [type(command) for command in hand.finish(G0)] == [Accumulate]
    hand.finish_all()
    assert hand.scheduler.finished
    assert len(hand.commands(Encode)) == 2


def test_scoring_goes_on_without_the_encoded_prompts(play: Play) -> None:
    hand = play(scoring="generator", replicas=2, encoders=(G0,))
    hand.finish(G0)
    hand.tell(ConditioningLost(at_us=hand.now, step=0))
    (score,) = hand.finish(G1)
    assert (type(score), score.worker) == (Score, G1)


def test_an_encoder_behind_an_idle_generator_encodes_again_although_nothing_is_left_to_generate(play: Play) -> None:
    hand = play(micro_batches=3, replicas=2, encoders=(G1,))
    hand.finish(G1)
    hand.finish(G0)  # the first; then the third
    hand.finish(G0)
    assert G0 not in hand.at
    hand.tell(ConditioningLost(at_us=hand.now, step=0))
    assert hand.finish(TRAINER) == [], "its encoder is busy"
    assert [type(c) for c in hand.finish(G1)] == [Encode], "although generator 0 is asked first, and has nothing to do"
    hand.finish_all()
    assert hand.scheduler.finished


def test_a_lost_encoder_that_is_the_only_one_encodes_when_it_is_back(play: Play) -> None:
    hand = play(replicas=2, encoders=(G1,), max_attempts=2)
    hand.finish(G1)
    hand.tell(WorkerLost(at_us=hand.now, worker=G1), ConditioningLost(at_us=hand.now, step=0))
    hand.finish(G0)
    assert not hand.at, "all wait for the encoder"
    hand.tell(WorkerJoined(at_us=hand.now, worker=G1))
    assert [type(command) for command in hand.finish(G1)] == [Encode]
    hand.finish_all()
    assert hand.scheduler.finished


@pytest.mark.parametrize("at_the_same_instant", [True, False])
def test_a_step_whose_updates_are_all_done_needs_its_prompts_no_more(play: Play, at_the_same_instant: bool) -> None:
    hand = play(steps=2)
    hand.finish(G0, until=Generate)
    hand.finish(G0)
    hand.finish(G0)
    hand.finish(TRAINER, until=OptimizerStep)
    lost = ConditioningLost(at_us=hand.now, step=0)
    if at_the_same_instant:
        hand.tell(hand.finished(TRAINER), lost)
    else:
        assert hand.tell(lost) == []
    hand.finish_all()
    assert hand.scheduler.finished
    assert [command.step for command in hand.commands(Encode)] == [0, 1]


def test_the_last_update_needs_its_prompts_again_only_if_it_never_began(play: Play) -> None:
    hand = play(micro_batches=1)
    hand.finish(G0)
    hand.finish(G0)
    hand.tell(ConditioningLost(at_us=hand.now, step=0))
    assert G0 not in hand.at, "the last update is under way"
    hand.tell(hand.refused(TRAINER))
    assert isinstance(hand.at[G0], Encode)
    assert TRAINER not in hand.at
    hand.finish_all()
    assert hand.scheduler.finished


@pytest.mark.parametrize("failed", [False, True])
def test_what_the_trainer_had_claimed_is_everybody_s_again_when_the_prompts_go_while_it_switches(
    play: Play, failed: bool
) -> None:
    hand = play(tag="greedy", micro_batches=4)
    hand.finish(G0)
    assert isinstance(hand.at[TRAINER], SwitchMode)
    assert hand.stage(SECOND) == "generating"
    lost = ConditioningLost(at_us=hand.now, step=0)
    hand.tell(lost, *([hand.refused(TRAINER)] if failed else []))
    assert hand.stage(SECOND) == "pending"
    if not failed:
        assert hand.finish(TRAINER) == [], "it waits for the prompts"
    hand.finish_all()
    assert hand.scheduler.finished
    assert hand.scheduler.state.policy_version == 1


@pytest.mark.parametrize("refused", [False, True])
def test_a_fixed_number_of_tags_is_made_although_one_came_to_nothing(play: Play, refused: bool) -> None:
    hand = play(tag="static", tag_static=1, micro_batches=4)
    hand.finish(G0)
    assert isinstance(hand.at[TRAINER], SwitchMode)
    if refused:
        hand.tell(hand.refused(TRAINER))
    else:
        hand.tell(ConditioningLost(at_us=hand.now, step=0))
    hand.finish_all()
    assert [command.worker for command in hand.commands(Generate)].count(TRAINER) == 1


@pytest.mark.parametrize("refused", [False, True])
def test_a_tag_of_a_plan_that_came_to_nothing_is_planned_anew(play: Play, refused: bool) -> None:
    costs = StepCosts(generate=(1000,), score=None, update=10, tag=100, switch_in=50, switch_out=50)
    hand = play(tag="bts_plus", micro_batches=6, costs=costs)
    hand.finish(G0)
    step = hand.scheduler.state.step
    assert hand.at[TRAINER].reason.startswith("TAG: 5 more back to back")
    hand.tell(hand.refused(TRAINER) if refused else ConditioningLost(at_us=hand.now, step=0))
    if refused:
        assert hand.at[TRAINER].reason.startswith("TAG: 5 more back to back"), "at once"
    assert step.reserved == (4 if refused else 0)
    hand.finish_all()
    assert hand.scheduler.finished
    if refused:
        assert [c.micro_batch.index for c in hand.commands(Generate) if c.worker == TRAINER] == [1, 2, 3, 4, 5]


def test_a_bubble_that_was_skipped_is_open_again_when_the_prompts_are_lost(play: Play) -> None:
    costs = StepCosts(generate=(100,), score=None, update=10, tag=500, switch_in=50, switch_out=50)
    hand = play(tag="bts", micro_batches=3, costs=costs)
    hand.finish(G0)
    assert hand.scheduler.state.step.bubble_closed
    hand.tell(ConditioningLost(at_us=hand.now, step=0))
    assert not hand.scheduler.state.step.bubble_closed


def test_the_prompts_of_the_next_step_are_encoded_again_for_stale_generation(play: Play) -> None:
    hand = play(steps=2, max_stale_fraction=1.0)
    hand.finish(G0, until=Generate)
    hand.finish(G0)
    hand.finish(G0)
    assert (type(hand.at[G0]), hand.at[G0].step) == (Encode, 1)
    hand.finish(G0)
    assert hand.at[G0].micro_batch == MicroBatchId(1, 0)
    hand.tell(ConditioningLost(at_us=hand.now, step=1), hand.refused(G0))
    assert (type(hand.at[G0]), hand.at[G0].step) == (Encode, 1)
    hand.finish_all()
    assert hand.scheduler.finished


@pytest.mark.parametrize("step", [-1, 0, 1, 2])
def test_prompts_that_are_not_encoded_cannot_be_lost(play: Play, step: int) -> None:
    hand = play(steps=2)
    with pytest.raises(ProtocolError, match=f"step {step} is not (open|encoded)"):
        hand.tell(ConditioningLost(at_us=hand.now, step=step))


def test_the_prompts_of_a_step_are_lost_once_at_one_instant(play: Play) -> None:
    hand = play()
    hand.finish(G0)
    lost = ConditioningLost(at_us=hand.now, step=0)
    with pytest.raises(ProtocolError, match="Two events of the encoded prompts of step 0"):
        hand.tell(lost, lost)
    hand.tell(lost)
    with pytest.raises(ProtocolError, match="not encoded"):
        hand.tell(lost)
