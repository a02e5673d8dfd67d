from __future__ import annotations

import pytest

from digenrl.errors import ConfigError
from digenrl.simulation.modes import MODES, Mode, Options, schedule_of
from digenrl.simulation.presets import CELLS, PaperRange, Preset, preset, presets
from digenrl.simulation.run import simulate

CELLS_OF_PRESETS = [(found, at) for found in presets().values() for at in CELLS]
IDS = [f"{found.name} at {at}" for found, at in CELLS_OF_PRESETS]


def step_times(found: Preset, at: float) -> dict[Mode, float]:
    times: dict[Mode, float] = {}
    for mode in MODES:
        schedule = schedule_of(mode, found.at(at), found.layout, Options(steps=8))
        times[mode] = simulate(schedule.settings, schedule.costs).step_time_s
    return times


def reported(each: PaperRange, at: float) -> float:
    return each.low if at == CELLS[0] else each.high


@pytest.mark.parametrize(("found", "at"), CELLS_OF_PRESETS, ids=IDS)
def test_every_cell_is_within_seven_per_cent_of_the_paper_or_above_it(found: Preset, at: float) -> None:
    times = step_times(found, at)
    assert found.paper
    for each in found.paper:
        assert times[each.over] / times[each.mode] >= 0.93 * reported(each, at), each


@pytest.mark.parametrize(("found", "at"), CELLS_OF_PRESETS, ids=IDS)
def test_what_was_fitted_is_close_from_above_too(found: Preset, at: float) -> None:
    # A preset that is far better than the paper is wrong as well. Ratios to colocated were not part of the calibration.
    times = step_times(found, at)
    for each in found.paper:
        limit = 1.06 if each.over == "naive" else 1.14
        assert times[each.over] / times[each.mode] <= limit * reported(each, at), each


@pytest.mark.parametrize(("found", "at"), CELLS_OF_PRESETS, ids=IDS)
def test_each_mode_of_the_ladder_is_at_least_as_fast_as_the_one_before(found: Preset, at: float) -> None:
    times = step_times(found, at)
    ladder = [times[mode] for mode in ("naive", "batch_axis", "gap", "tsp", "tag", "tcss")]
    assert ladder == sorted(ladder, reverse=True)
    assert times["colocated+tsp"] < times["colocated"] < times["naive"]


@pytest.mark.parametrize(
    ("name", "units"),
    [
        (
            "hunyuanvideo-32gpu",
            {"update": 1.17 / 4, "tag": 1.0, "score": 0.052, "switch": 0.136, "optimizer": 0.564, "sync": 0.132},
        ),
        ("wan2.1-14b-32gpu", {"update": 1.29 / 3.2, "tag": 1.0, "score": 0.077, "switch": 0.09, "optimizer": 0.0, "sync": 1.248}),
    ],
)
def test_calibrated_numbers_come_out_at_the_nominal_size(name: str, units: dict[str, float]) -> None:
    found = preset(name)
    schedule = schedule_of("tcss", found.model, found.layout)
    costs, unit = schedule.costs, schedule.costs.generate[0]
    assert schedule.settings.micro_batches == 12
    assert costs.score is not None
    assert costs.tag is not None
    taken = {"update": costs.update, "tag": costs.tag, "score": costs.score[0], "switch": costs.switch_in}
    taken |= {"optimizer": costs.optimizer, "sync": costs.sync}
    assert {task: seconds / unit for task, seconds in taken.items()} == pytest.approx(units, abs=1e-5)


@pytest.mark.parametrize(("name", "fractions"), [("hunyuanvideo-32gpu", (0.78, 1.17)), ("wan2.1-14b-32gpu", (0.86, 1.29))])
def test_updates_of_the_two_cells_are_as_two_to_three(name: str, fractions: tuple[float, float]) -> None:
    found = preset(name)
    for at, expected in zip(CELLS, fractions, strict=True):
        costs = schedule_of("gap", found.at(at), found.layout).costs
        assert costs.update / costs.generate[0] == pytest.approx(expected)


def test_the_mixed_preset_has_trainers_between_1_6_and_2_times_as_fast() -> None:
    model = preset("hunyuanvideo-8a8c").model
    assert 1.6 <= model.generate(4, 8, "generators") / model.generate(4, 8, "trainer") <= 2.0


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("hunyuanvido-32gpu", "hunyuanvideo-32gpu"),
        ("wan-14b", "wan2.1-14b-32gpu"),
        ("flux", "flux1-32gpu"),
        ("hunyuanvideo8a8c", "8a8c"),
    ],
)
def test_an_unknown_preset_is_refused_with_the_nearest_name(wrong: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"Did you mean .*{meant}"):
        preset(wrong)


@pytest.mark.parametrize("found", presets().values(), ids=presets())
def test_a_preset_fits_into_its_memory_and_states_what_it_assumes(found: Preset) -> None:
    layout, model = found.layout, found.model
    assert model.fits("generators", layout.ranks)
    assert model.fits("trainer", layout.trainer_ranks, tag=True)
    assert model.fits("all", layout.devices)
    assert len(found.assumptions) >= 3
