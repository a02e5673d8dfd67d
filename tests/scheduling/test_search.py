"""The searches of TAG against enumeration, against each other, and against optima computed elsewhere (golden/schedules.json)."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from digenrl.scheduling.bounds import lower_bound
from digenrl.scheduling.bts import ExactSearch, to_next_bubble
from digenrl.scheduling.bts_single import SingleReplicaSearch
from digenrl.scheduling.planner import Planner
from digenrl.scheduling.rollout import roll_out
from digenrl.scheduling.step_model import IDLE, Model, Position, StepCosts, start_of_step

ORACLE = json.loads((Path(__file__).parents[1] / "golden" / "schedules.json").read_text(encoding="utf-8"))


def costs_of(instance: dict[str, Any]) -> StepCosts:
    score = instance["s"]
    return StepCosts(
        generate=tuple(instance["g"]),
        score=None if score is None else tuple(score),
        update=instance["t"],
        tag=instance["gT"],
        switch_in=instance["c_in"],
        switch_out=instance["c_out"],
    )


def first_bubble(costs: StepCosts, micro_batches: int, model: Model, reserve: int | None = None) -> Position:
    position = start_of_step(costs, micro_batches)
    model.settle(position, reserve)
    return position


def enumerate_all(model: Model, position: Position) -> int:
    """Plain Algorithm 2: both branches at every bubble, no memory, no bound."""
    ends = []
    for tag in (False, True) if position.pending else (False,):
        after = position.copy()
        elapsed = to_next_bubble(model, after, tag=tag)
        ends.append(elapsed + (enumerate_all(model, after) if after.left else 0))
    return min(ends)


@st.composite
def instances(draw: st.DrawFn, max_replicas: int = 3, max_size: int = 7) -> tuple[StepCosts, int]:
    replicas = draw(st.integers(1, max_replicas))
    ticks = st.integers(1, 100)
    small = st.one_of(st.just(0), st.integers(1, 50))
    scored = draw(st.booleans())
    costs = StepCosts(
        generate=tuple(draw(ticks) for _ in range(replicas)),
        score=tuple(draw(st.integers(1, 30)) for _ in range(replicas)) if scored else None,
        update=draw(ticks),
        tag=draw(ticks),
        switch_in=draw(small),
        switch_out=draw(small),
    )
    return costs, draw(st.integers(1, max_size))


@pytest.mark.parametrize("instance", ORACLE["small"], ids=lambda instance: str(instance["id"]))
def test_bts_finds_the_optimum_that_enumeration_found(instance: dict[str, Any]) -> None:
    costs = costs_of(instance)
    choice = ExactSearch(costs).choose(first_bubble(costs, instance["B"], Model(costs)))
    assert choice.finish == instance["bts_optimum"]


@pytest.mark.parametrize("instance", [i for i in ORACLE["large"] if i["bts_optimum"]], ids=lambda i: str(i["id"]))
def test_bts_finds_the_optimum_of_large_steps(instance: dict[str, Any]) -> None:
    costs = costs_of(instance)
    choice = ExactSearch(costs).choose(first_bubble(costs, instance["B"], Model(costs)))
    assert choice.finish == instance["bts_optimum"]


@given(instances(), st.booleans(), st.booleans())
@settings(max_examples=2000, deadline=None, database=None)
def test_bts_equals_enumeration_on_random_steps(instance: tuple[StepCosts, int], by_index: bool, after_step: bool) -> None:
    costs, size = instance
    model = Model(costs, by_index=by_index, after_step=after_step)
    bubble = first_bubble(costs, size, model)
    choice = ExactSearch(costs, by_index=by_index, after_step=after_step).choose(bubble)
    assert choice.finish == enumerate_all(model, bubble)


@given(instances(max_replicas=1, max_size=12))
@settings(max_examples=300, deadline=None, database=None)
def test_the_search_for_one_replica_is_the_general_one(instance: tuple[StepCosts, int]) -> None:
    costs, size = instance
    bubble = first_bubble(costs, size, Model(costs))
    general = ExactSearch(costs)
    general._single = None
    skip, tag = SingleReplicaSearch(costs).finishes(bubble)
    expected = general.choose(bubble)
    assert (tag < skip, min(tag, skip)) == (expected.tag, expected.finish)


@pytest.mark.parametrize("instance", ORACLE["small"], ids=lambda instance: str(instance["id"]))
def test_the_lower_bound_holds_for_the_best_schedule_known(instance: dict[str, Any]) -> None:
    bound = lower_bound(start_of_step(costs_of(instance), instance["B"]), costs_of(instance))
    known = [instance["trainer_unrestricted_optimum"], instance["full_unrestricted_optimum"]]
    assert bound <= min(optimum for optimum in known if optimum is not None)
    assert bound >= instance["lower_bound"], "at least as tight as the oracle's"


@given(instances(), st.integers(0, 7), st.booleans(), st.booleans(), st.booleans())
@settings(max_examples=300, deadline=None, database=None)
def test_no_look_ahead_ends_before_the_lower_bound(
    instance: tuple[StepCosts, int], tags: int, sticky: bool, by_index: bool, after_step: bool
) -> None:
    costs, size = instance
    position = first_bubble(costs, size, Model(costs), reserve=0)
    tags = min(tags, position.pending)
    outcome = roll_out(position, costs, tags, sticky=sticky, by_index=by_index, after_step=after_step)
    assert outcome.finish >= lower_bound(position, costs)


@given(instances(), st.booleans(), st.booleans())
@settings(max_examples=300, deadline=None, database=None)
def test_a_look_ahead_without_tag_follows_the_model(instance: tuple[StepCosts, int], by_index: bool, after_step: bool) -> None:
    costs, size = instance
    model = Model(costs, by_index=by_index, after_step=after_step)
    position = first_bubble(costs, size, model, reserve=0)
    expected, at = 0, position.copy()
    while at.left:
        expected += to_next_bubble(model, at, tag=False, reserve=0)
    look = roll_out(position, costs, 0, sticky=False, by_index=by_index, after_step=after_step)
    assert look.finish == expected


def test_with_one_replica_the_planner_is_on_average_better_than_the_exact_search_and_never_far_behind() -> None:
    # It may stay in generation mode, which the paper's rule does not allow; it does not look at skipping first and helping later.
    draw, ratios = random.Random(3), []
    for _ in range(500):
        costs = StepCosts(
            generate=(draw.randint(10, 100),),
            score=draw.choice([None, (draw.randint(1, 30),)]),
            update=draw.randint(5, 100),
            tag=draw.randint(10, 120),
            switch_in=draw.choice([0, draw.randint(1, 50)]),
            switch_out=draw.choice([0, draw.randint(1, 50)]),
        )
        size = draw.randint(1, 24)
        bubble = first_bubble(costs, size, Model(costs), reserve=0)
        plan = Planner(costs, size).plan(bubble)
        assert plan.bound <= plan.finish
        ratios.append(plan.finish / ExactSearch(costs).choose(bubble).finish)
    assert sum(ratios) / len(ratios) < 1.0
    assert max(ratios) <= 1.01


def test_with_one_replica_and_inline_scoring_the_planner_meets_the_bound_nearly_always() -> None:
    draw, met, count = random.Random(7), 0, 2000
    for _ in range(count):
        costs = StepCosts(
            generate=(1000,),
            score=None,
            update=draw.randint(100, 1000),
            tag=draw.randint(800, 1200),
            switch_in=draw.choice([0, 50, 200, 500]),
            switch_out=draw.choice([0, 50, 200, 500]),
        )
        size = draw.randint(2, 64)
        plan = Planner(costs, size).plan(first_bubble(costs, size, Model(costs), reserve=0))
        met += plan.finish == plan.bound
    assert met >= 0.995 * count


def test_a_slow_replica_declines_what_a_fast_one_finishes_earlier() -> None:
    costs = StepCosts(generate=(10, 100), score=None, update=1, tag=1000)
    position = Position(pending=3, left=3, remaining=[0, 0], task=[IDLE, IDLE], item=[0, 0], claimed=0)
    Model(costs).settle(position, reserve=0)
    assert position.task[1] == IDLE
    assert position.pending == 2


def test_without_a_reserve_replicas_take_whatever_is_pending() -> None:
    costs = StepCosts(generate=(10, 100), score=None, update=1, tag=1000)
    position = start_of_step(costs, 3)
    Model(costs).settle(position)
    assert position.pending == 1
