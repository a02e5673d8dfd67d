"""``train.timestep_batch_size: auto``: the most pairs that fit, what is tried on the way, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from digenrl.config.checks import check_recipe
from digenrl.config.schema import Recipe
from digenrl.errors import ConfigError
from digenrl.training.batch_size import GIB, Measured, largest_that_fits
from digenrl.training.memory import memory_meter

MIB = 2**20
RigMaker = Callable[..., Any]
REWARDS = ([0.0, 1.0, 3.0], [2.0, 5.0, 1.0])


class Machine:
    """A trainer whose passes take memory as they are told to; it remembers what was tried."""

    def __init__(self, rest: int, each: int, total: int = 10**6) -> None:
        self.rest, self.each, self.total = rest, each, total
        self.tried: list[int] = []

    def measure(self, pairs: int) -> Measured:
        self.tried.append(pairs)
        return Measured(rest=self.rest, peak=self.rest + self.each * pairs)

    def choose(self, most: int, budget: int) -> int:
        return largest_that_fits(most, budget, self.total, self.measure).pairs


@given(most=st.integers(1, 300), rest=st.integers(0, 1000), each=st.integers(1, 50), budget=st.integers(1, 3000))
@settings(max_examples=300, deadline=None, database=None)
def test_the_most_pairs_that_fit_are_found_and_evened_out_over_their_passes(most: int, rest: int, each: int, budget: int) -> None:
    machine, fits = Machine(rest, each), min(most, (budget - rest) // each)
    if fits < 1:
        with pytest.raises(ConfigError):
            machine.choose(most, budget)
        return
    found = machine.choose(most, budget)
    passes = -(-most // fits)
    assert -(-most // found) == passes, "no pass more than with the largest size"
    assert (found - 1) * passes < most <= found * passes, "and none of them larger than need be"
    assert len(machine.tried) <= 2 * most.bit_length() + 1


def test_sizes_are_doubled_and_then_halved_in_between() -> None:
    machine = Machine(rest=100, each=10)
    assert machine.choose(1000, budget=100 + 10 * 21) == 21
    assert machine.tried == [1, 2, 4, 8, 16, 32, 24, 20, 22, 21]


def test_what_is_left_over_is_evened_out() -> None:
    assert Machine(rest=0, each=1).choose(9, budget=8) == 5


def test_no_more_is_tried_than_a_rank_s_share() -> None:
    machine = Machine(rest=0, each=1)
    assert machine.choose(12, budget=10**5) == 12
    assert machine.tried == [1, 2, 4, 8, 12]


def test_nothing_is_tried_that_the_machine_has_no_room_for() -> None:
    machine = Machine(rest=100, each=10, total=100 + 10 * 15)
    assert machine.choose(1000, budget=100 + 10 * 11) == 11
    assert max(machine.tried) <= 15


def test_a_budget_for_not_one_pair_is_refused_with_one_that_is_enough() -> None:
    machine = Machine(rest=3 * GIB, each=GIB, total=100 * GIB)
    with pytest.raises(ConfigError) as refused:
        machine.choose(8, budget=2 * GIB)
    error = refused.value
    assert "train.memory_budget_gib (2) is less than the 4 GiB" in error.what
    assert "3 GiB" in error.why
    enough = float(error.fix.partition("memory_budget_gib=")[2].split()[0])
    assert machine.choose(8, budget=int(enough * GIB)) == 1


def test_the_line_for_people_names_the_number_and_how_to_repeat_it() -> None:
    line = largest_that_fits(9, 4 * GIB, 10 * GIB, lambda n: Measured(rest=GIB, peak=(1 + n) * GIB)).line()
    assert "takes 3 of 9 pairs" in line
    assert "train.timestep_batch_size=3" in line


def test_a_process_s_peak_is_measured_and_forgotten() -> None:
    meter = memory_meter(torch.device("cpu"))
    rest = meter.settle()
    held = torch.ones(64 * MIB, dtype=torch.uint8)
    del held
    peak = meter.peak_bytes() - rest
    assert 56 * MIB <= peak <= 96 * MIB
    again = meter.settle()
    assert meter.peak_bytes() - again <= 16 * MIB
    assert meter.total_bytes() > peak


def auto(make_rig: RigMaker, budget: float = 100.0) -> Any:
    return make_rig(train={"steps": 4, "learning_rate": 1e-3, "timestep_batch_size": "auto", "memory_budget_gib": budget})


def step(rig: Any, trajectory: Any) -> dict[str, float]:
    rig.trainer.accumulate(trajectory, rig.conditioning(), rig.advantages(*REWARDS))
    metrics: dict[str, float] = rig.trainer.optimizer_step().metrics
    return metrics


def test_a_trainer_measures_before_its_first_update_and_never_again(make_rig: RigMaker) -> None:
    rig = auto(make_rig)
    trajectory, passes = rig.trajectory(), []
    rig.adapter.transformer.register_forward_pre_hook(
        lambda _, __, inputs: passes.append(len(inputs["hidden_states"])), with_kwargs=True
    )
    found = rig.trainer.choose_batch_size(trajectory, rig.conditioning())
    assert (found.pairs, found.most) == (9, 9), "3 samples x 3 steps"
    assert passes == [1, 1, 2, 2, 4, 4, 8, 8, 9, 9], "each on an empty gradient, and on top of one"
    passes.clear()
    assert step(rig, trajectory)["timestep_batch_size"] == 9
    assert passes == [9, 9]
    assert rig.trainer.choose_batch_size(trajectory, rig.conditioning()) is None


def test_what_was_tried_leaves_nothing_behind(make_rig: RigMaker, rel: Callable[..., float]) -> None:
    measured = auto(make_rig)
    plain = make_rig(train={"steps": 4, "learning_rate": 1e-3, "timestep_batch_size": "all"})
    trajectory = plain.trajectory()
    ours, wanted = step(measured, trajectory), step(plain, trajectory)
    assert ours.pop("timestep_batch_size") == 9
    assert ours == wanted
    assert all(torch.equal(p, plain.policy.parameters[name]) for name, p in measured.policy.parameters.items())


def test_a_trainer_with_too_small_a_budget_says_so_before_it_changes_anything(make_rig: RigMaker) -> None:
    rig = auto(make_rig, budget=0.001)
    with pytest.raises(ConfigError, match="is less than the"):
        step(rig, rig.trajectory())


@pytest.mark.parametrize(
    ("train", "says"),
    [
        ({"timestep_batch_size": "auto"}, "needs train.memory_budget_gib"),
        ({"timestep_batch_size": "auto", "memory_budget_gib": 8, "deterministic": True}, "cannot be repeated"),
        ({"timestep_batch_size": "all", "memory_budget_gib": 8}, "is for train.timestep_batch_size: auto"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(
    train: dict[str, Any], says: str, tiny_recipe: Callable[..., Recipe]
) -> None:
    with pytest.raises(ConfigError, match=says):
        check_recipe(tiny_recipe(train=train))


def test_settings_that_go_together_are_taken(tiny_recipe: Callable[..., Recipe]) -> None:
    check_recipe(tiny_recipe(train={"timestep_batch_size": "auto", "memory_budget_gib": 8}))
