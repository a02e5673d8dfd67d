from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import pytest

from digenrl.errors import ConfigError
from digenrl.simulation.costs import SimulationCosts
from digenrl.simulation.modes import Layout, Options, pipelined
from digenrl.simulation.plan import Plan, plan
from digenrl.simulation.presets import presets
from digenrl.simulation.run import simulate
from digenrl.simulation.source import load_source
from digenrl.simulation.sweep import TIE, Row, steady_bound

QUICKSTART = str(Path(__file__).parents[2] / "recipes" / "quickstart.yaml")
NAMES = tuple(presets())


def rows_of(found: Plan) -> tuple[Row, ...]:
    return found.sweep.rows


@pytest.mark.parametrize("name", ["hunyuanvideo-32gpu", "qwen-image-32gpu-judge"])
def test_a_plan_for_64_devices_takes_less_than_five_seconds_and_is_always_the_same(name: str) -> None:
    source = load_source(name)
    began = time.perf_counter()
    first = plan(source, 64)
    assert time.perf_counter() - began < 5.0
    assert first.to_plain() == plan(source, 64).to_plain()


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    return {name: plan(load_source(name)) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_rows_stand_in_order_of_step_time_and_ties_in_order_of_simplicity(plans: dict[str, Plan], name: str) -> None:
    rows = rows_of(plans[name])
    assert len(rows) > 5
    for index, row in enumerate(rows):
        fastest = min(later.step_time_s for later in rows[index:])
        assert row.step_time_s <= fastest * (1 + TIE)
        tied = [later for later in rows[index:] if later.step_time_s <= fastest * (1 + TIE)]
        assert row.candidate.simplicity == min(later.candidate.simplicity for later in tied)


@pytest.mark.parametrize("name", NAMES)
def test_every_row_uses_all_devices_fits_into_memory_and_respects_its_bound(plans: dict[str, Plan], name: str) -> None:
    found, source = plans[name], load_source(name)
    for row in rows_of(found):
        layout = row.candidate.layout
        assert layout.devices == found.devices == source.layout.devices
        if row.bound_s is not None:
            assert row.step_time_s >= row.bound_s
            assert source.model.fits("generators", layout.ranks)
            assert source.model.fits("trainer", layout.trainer_ranks, tag=row.candidate.tag != "never")


@pytest.mark.parametrize("name", NAMES)
def test_the_first_row_is_no_slower_than_the_sources_own_schedule(plans: dict[str, Plan], name: str) -> None:
    source = load_source(name, steps=14)
    own = simulate(source.settings, source.costs).step_time_s
    assert rows_of(plans[name])[0].step_time_s <= own * (1 + TIE)


@pytest.mark.parametrize("name", NAMES)
def test_speed_ups_are_ratios_of_step_times_and_everything_is_json(plans: dict[str, Plan], name: str) -> None:
    plain = json.loads(json.dumps(plans[name].to_plain()))
    baselines, samples = plain["baselines"], load_source(name).samples_per_step
    for row in plain["rows"]:
        for key, mode in (("colocated", "colocated"), ("colocated_tsp", "colocated+tsp"), ("naive", "naive")):
            assert row[f"speedup_over_{key}"] == pytest.approx(baselines[mode]["step_time_s"] / row["step_time_s"])
        assert row["samples_per_second"] == pytest.approx(samples / row["step_time_s"])
        assert 0 <= row["bubble"] <= 1
    assert baselines["naive"]["speedup_over_naive"] == 1.0


def test_colocated_with_tsp_wins_where_generation_scales_and_the_reason_says_so(plans: dict[str, Plan]) -> None:
    found = plans["wan2.1-14b-32gpu"]
    assert rows_of(found)[0].candidate.mode == "colocated+tsp"
    assert found.reason.startswith("colocated+tsp wins")
    assert "Two pools pay where" in found.reason


def test_two_pools_win_on_two_kinds_of_device_and_are_split_by_kind(plans: dict[str, Plan]) -> None:
    found = plans["hunyuanvideo-8a8c"]
    best = rows_of(found)[0]
    assert best.candidate.mode is None
    assert best.tags > 0
    assert {row.candidate.layout.trainer_ranks for row in rows_of(found)} == {8}
    assert "pace of the slower devices" in found.reason
    assert "TAG: " in found.reason
    assert "TCSS: " in found.reason


def test_two_pools_win_where_one_does_not_fit_into_memory() -> None:
    source = load_source("qwen-image-32gpu-judge")
    model = source.model
    tight = dataclasses.replace(model, generators=dataclasses.replace(model.generators, memory_gib=72.0))  # type: ignore[type-var]
    tight = dataclasses.replace(tight, trainers=dataclasses.replace(tight.generators, tflops=990.0))
    assert not tight.fits("all", 32)
    found = plan(dataclasses.replace(source, model=tight), 32)
    assert "one pool does not fit" in found.reason
    assert set(found.sweep.baselines) == {"naive"}
    assert rows_of(found)[0].candidate.mode is None


def test_the_table_names_the_baselines_and_ends_with_the_reason(plans: dict[str, Plan]) -> None:
    lines = plans["flux1-32gpu"].lines()
    text = "\n".join(lines)
    assert lines[-1] == f"first: {plans['flux1-32gpu'].reason}"
    for word in ("colocated+tsp", "naive", "two pools", "samples/s", "bubble"):
        assert word in text
    assert len({len(line) for line in lines[2:-1]}) == 1  # columns are aligned


def test_a_recipe_is_planned_on_two_devices_and_on_one() -> None:
    source = load_source(QUICKSTART)
    two, one = plan(source, 2), plan(source, 1)
    assert any(row.candidate.mode is None for row in rows_of(two))
    assert [row.candidate.colocated for row in rows_of(one)] == [True, True]
    assert one.to_plain()["rows"][0]["speedup_over_naive"] is None
    assert rows_of(two)[0].step_time_s < 0.6 * rows_of(one)[0].step_time_s


@pytest.mark.parametrize("devices", [0, -1, 10**6])
def test_an_impossible_number_of_devices_is_refused(devices: int) -> None:
    with pytest.raises(ConfigError, match=r"--devices \("):
        plan(load_source(QUICKSTART), devices)


def test_a_model_that_fits_nowhere_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match="Nothing fits on 2 devices"):
        plan(load_source("hunyuanvideo-32gpu"), 2)


def test_generators_that_cannot_hold_their_judge_are_no_way_at_all() -> None:
    source = load_source("qwen-image-32gpu-judge")
    profile = dataclasses.replace(source.model.model, reward_parameters=40e9)  # type: ignore[attr-defined]
    model = dataclasses.replace(source.model, model=profile)  # type: ignore[type-var]
    with pytest.raises(ConfigError, match="Nothing fits on 32 devices"):
        plan(dataclasses.replace(source, model=model), 32)


def test_the_steady_bound_is_where_the_two_pools_meet() -> None:
    costs = SimulationCosts(
        generate=(10.0,), score=(1.0,), update=2.0, tag=10.0, switch_in=1.0, switch_out=1.0, optimizer=1.0, sync=3.0
    )
    assert steady_bound(costs, 4, tag=False) == pytest.approx(4 * 11 + 3)
    # n = 1.65: (4 - 1.65) x 10 + 4 + 3 = 1.65 x 10 + 4 x 2 + 2 + 1 + 3.
    assert steady_bound(costs, 4, tag=True) == pytest.approx(30.5)
    assert steady_bound(dataclasses.replace(costs, update=20.0), 4, tag=True) == pytest.approx(4 * 20 + 1 + 3)


@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize("tag", ["never", "greedy", "bts_plus"])
@pytest.mark.parametrize("stale", [0.0, 0.25, 1.0])
def test_no_long_run_beats_the_steady_bound(replicas: int, tag: str, stale: float) -> None:
    model = load_source("flux1-32gpu").model
    layout = Layout(replicas=replicas, ranks=16 // replicas, trainer_ranks=16, groups_per_micro_batch=3)
    schedule = pipelined(model, layout, Options(steps=40), tsp=True, tag=tag, max_stale_fraction=stale)  # type: ignore[arg-type]
    bound = steady_bound(schedule.costs, schedule.settings.micro_batches, tag=tag != "never")
    # What is stale in the last steps was made in the first ones, hence the whole run and not its middle.
    assert simulate(schedule.settings, schedule.costs).makespan_s / 40 >= 0.995 * bound
