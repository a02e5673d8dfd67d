from __future__ import annotations

import dataclasses

import pytest

from digenrl.simulation.measured import MeasuredModel
from digenrl.simulation.modes import MODES, Layout, Mode, Options, Schedule, cut, schedule_of
from digenrl.simulation.run import SimulationResult, simulate

MODEL = MeasuredModel(
    groups=12,
    samples_per_group=8,
    generate_s=40.0,
    score_s=2.0,
    update_s=20.0,
    tsp_factor=2.0,
    switch_s=(0.5, 0.7),
    optimizer_s=1.0,
    sync_s=0.5,
    encode_s=0.1,
)
LAYOUT = Layout(replicas=2, ranks=2, trainer_ranks=4, groups_per_micro_batch=1)


def of(mode: Mode, layout: Layout = LAYOUT, model: MeasuredModel = MODEL) -> Schedule:
    return schedule_of(mode, model, layout)


def run(mode: Mode, layout: Layout = LAYOUT) -> SimulationResult:
    schedule = of(mode, layout)
    return simulate(schedule.settings, schedule.costs)


def test_from_mode_to_mode_of_the_ladder_one_thing_changes() -> None:
    gap, tsp, tag, tcss = (of(mode) for mode in ("gap", "tsp", "tag", "tcss"))
    assert dataclasses.replace(gap.costs, update=gap.costs.update / 2) == tsp.costs == tag.costs == tcss.costs
    assert dataclasses.replace(gap.settings, costs=tsp.settings.costs) == tsp.settings
    assert dataclasses.replace(tsp.settings, tag="bts_plus") == tag.settings
    assert dataclasses.replace(tag.settings, max_stale_fraction=0.25) == tcss.settings


def test_a_colocated_pool_generates_all_then_trains_on_all() -> None:
    schedule = of("colocated")
    assert schedule.settings.one_pool
    assert schedule.settings.update_after == "step"
    result = run("colocated")
    assert result.trainer == result.generators
    assert result.trainer.bubble == pytest.approx(0.0)
    # Eight devices: 12 x (40 + 2 + 40) device-seconds, then encoding, optimizer and sync.
    assert result.step_time_s == pytest.approx(12 * 82 / 8 + 0.1 + 1.0 + 0.5)
    assert run("colocated+tsp").step_time_s == pytest.approx(12 * 62 / 8 + 0.1 + 1.0 + 0.5)


def test_the_naive_split_overlaps_nothing() -> None:
    assert of("naive").settings.micro_batches == 1
    assert run("naive").step_time_s == pytest.approx(12 * 42 / 4 + 12 * 40 / 4 + 0.1 + 1.0 + 0.5)


def test_a_micro_batch_along_the_batch_axis_is_a_prompt_for_every_rank() -> None:
    schedule = of("batch_axis")
    assert schedule.settings.micro_batches == 6
    assert schedule.costs.generate == (40.0, 40.0)  # all samples of a prompt on one device
    assert run("naive").step_time_s > run("batch_axis").step_time_s > run("gap").step_time_s


def test_a_micro_batch_along_the_batch_axis_has_no_more_prompts_than_are_left() -> None:
    wide = Layout(replicas=1, ranks=16, trainer_ranks=4, groups_per_micro_batch=1)
    schedule = of("batch_axis", wide)
    assert (schedule.settings.micro_batches, schedule.costs.generate) == (1, (40.0,))
    uneven = of("batch_axis", dataclasses.replace(wide, ranks=5))
    assert (uneven.settings.micro_batches, uneven.costs.last_share) == (3, pytest.approx(0.4))


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_trains_every_micro_batch_once_a_step(mode: Mode) -> None:
    schedule = schedule_of(mode, MODEL, dataclasses.replace(LAYOUT, groups_per_micro_batch=5), Options(steps=5))
    result = simulate(schedule.settings, schedule.costs)
    ranks = 8 if mode.startswith("colocated") else 4
    work = MODEL.update(12, ranks, "trainer", tsp=mode in ("tsp", "tag", "tcss", "colocated+tsp"))
    assert result.trainer.by_task["update"] * result.step_time_s == pytest.approx(work, rel=0.05)


@pytest.mark.parametrize(
    ("groups", "per", "count", "share"), [(12, 4, 3, 1.0), (12, 5, 3, 0.4), (12, 12, 1, 1.0), (7, 2, 4, 0.5)]
)
def test_the_last_micro_batch_is_what_is_left(groups: int, per: int, count: int, share: float) -> None:
    assert cut(groups, per) == (count, pytest.approx(share))


def test_a_partial_last_micro_batch_is_marked_and_cheaper() -> None:
    schedule = of("gap", dataclasses.replace(LAYOUT, groups_per_micro_batch=5))
    assert schedule.settings.partial_last
    assert schedule.costs.last_share == pytest.approx(0.4)
    assert not of("gap").settings.partial_last
