from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from digenrl.simulation.cost_model import CostModel, DeviceProfile, ModelProfile, Workload
from digenrl.simulation.presets import Preset, preset, presets

WORK = Workload(
    height=480,
    width=480,
    num_frames=13,
    num_inference_steps=20,
    timestep_fraction=0.5,
    prompts_per_step=16,
    num_generations=8,
    groups_per_micro_batch=2,
)
PROFILE = ModelProfile(parameters=1e9, layers=20, width=2048, text_tokens=100, vae_temporal=4, trained_parameters=1e9)
MODEL = CostModel(model=PROFILE, workload=WORK, nominal=WORK, tsp=((0.25, 2.0), (0.5, 3.0)))


def at(model: CostModel = MODEL, **changes: Any) -> CostModel:
    return dataclasses.replace(model, workload=dataclasses.replace(model.workload, **changes))


def all_costs(model: CostModel) -> dict[str, float]:
    return {
        "generate": model.generate(2, 4, "generators"),
        "score": model.score(2, 4, "generators"),
        "update": model.update(2, 4, "trainer", tsp=False),
        "update with TSP": model.update(2, 4, "trainer", tsp=True),
    }


@pytest.mark.parametrize("name", ["made up", *presets()])
@pytest.mark.parametrize(
    ("change", "grows"),
    [
        ({"height": 960}, {"generate", "score", "update", "update with TSP"}),
        ({"width": 960}, {"generate", "score", "update", "update with TSP"}),
        ({"num_frames": 101}, {"generate", "score", "update", "update with TSP"}),
        ({"num_generations": 96}, {"generate", "score", "update", "update with TSP"}),
        ({"num_inference_steps": 40, "timestep_fraction": 0.5}, {"generate", "update", "update with TSP"}),
    ],
)
def test_costs_grow_with_resolution_frames_denoising_steps_and_group_size(name: str, change: Any, grows: set[str]) -> None:
    model = MODEL if name == "made up" else preset(name).at(0.5)
    before, after = all_costs(model), all_costs(at(model, **change))
    assert {task for task in before if after[task] > before[task]} == grows
    assert all(after[task] == before[task] for task in before.keys() - grows)


@pytest.mark.parametrize("found", presets().values(), ids=presets())
def test_more_devices_are_never_slower_and_at_some_point_no_faster(found: Preset) -> None:
    model = found.model
    for times in (
        [model.generate(4, ranks, "generators") for ranks in range(1, 200)],
        [model.score(4, ranks, "generators") for ranks in range(1, 200)],
        [model.update(4, ranks, "trainer", tsp=True) for ranks in range(1, 1000)],
        [model.optimizer(ranks, "trainer") for ranks in range(1, 200)],
    ):
        assert times == sorted(times, reverse=True)
    samples = 4 * model.samples_per_group
    assert model.generate(4, samples, "generators") == model.generate(4, 2 * samples, "generators")


def test_samples_are_rounded_up_per_rank() -> None:
    one = MODEL.generate(1, 8, "generators")
    assert MODEL.generate(1, 7, "generators") == 2 * one
    assert MODEL.generate(1, 4, "generators") == 2 * one
    padded = at(forward_batch_size=8)
    assert padded.generate(1, 4, "generators") == pytest.approx(padded.generate(1, 1, "generators"))


def test_small_forward_batches_lose_where_a_device_has_an_overhead() -> None:
    device = DeviceProfile(overhead_tokens=3000)
    lossy = dataclasses.replace(MODEL, generators=device)
    single = lossy.generate(1, 1, "generators")
    assert single > at(lossy, forward_batch_size=8).generate(1, 1, "generators") > MODEL.generate(1, 1, "generators")


def test_attention_makes_cost_grow_faster_than_pixels() -> None:
    assert at(height=4 * 480).generate(1, 1, "generators") > 4 * MODEL.generate(1, 1, "generators")


@pytest.mark.parametrize(("fraction", "gain"), [(0.25, 2.0), (0.5, 3.0)])
def test_the_gain_of_tsp_comes_out_where_it_was_measured(fraction: float, gain: float) -> None:
    model = at(timestep_fraction=fraction)
    alone, shared = (model.update(2, 1, "trainer", tsp=tsp) for tsp in (False, True))
    assert alone / shared == pytest.approx(gain)


def test_the_gain_of_tsp_lies_in_between_elsewhere_and_shrinks_with_resolution() -> None:
    def gain(model: CostModel) -> float:
        return model.update(2, 1, "trainer", tsp=False) / model.update(2, 1, "trainer", tsp=True)

    assert 2.0 < gain(at(timestep_fraction=0.4)) < 3.0
    assert gain(MODEL) > gain(at(height=960)) > gain(at(height=1920)) > 1.0
    assert gain(at(timestep_fraction=0.05)) == 1.0  # one trained step has nothing to share


def test_updates_are_in_proportion_to_the_trained_steps_without_tsp() -> None:
    low, high = (at(timestep_fraction=f).update(2, 1, "trainer", tsp=False) for f in (0.2, 0.4))
    assert high == pytest.approx(2 * low)


def test_guidance_doubles_and_adapters_lower_the_cost() -> None:
    guided = dataclasses.replace(MODEL, model=dataclasses.replace(PROFILE, cfg_passes=2))
    assert guided.generate(1, 1, "generators") == 2 * MODEL.generate(1, 1, "generators")
    lora = dataclasses.replace(MODEL, model=dataclasses.replace(PROFILE, trained_parameters=1e7))
    assert lora.update(1, 1, "trainer", tsp=True) < MODEL.update(1, 1, "trainer", tsp=True)
    assert lora.sync() == pytest.approx(MODEL.sync() / 100)
    assert lora.optimizer(4, "trainer") == pytest.approx(MODEL.optimizer(4, "trainer") / 100)
    assert lora.switch(4) == MODEL.switch(4)


def test_a_mixed_pool_goes_at_the_pace_of_the_slower_device() -> None:
    fast = dataclasses.replace(MODEL, trainers=DeviceProfile(tflops=2 * 989.0))
    assert fast.generate(1, 1, "trainer") == pytest.approx(fast.generate(1, 1, "generators") / 2)
    assert fast.generate(1, 1, "all") == fast.generate(1, 1, "generators")
    assert fast.mixed
    assert not MODEL.mixed


def test_a_trainer_that_also_generates_needs_more_memory_and_more_ranks_need_less() -> None:
    big = dataclasses.replace(MODEL, model=dataclasses.replace(PROFILE, parameters=13e9, trained_parameters=13e9))
    needs = [big.memory_gib("trainer", ranks) for ranks in (4, 8, 16)]
    assert needs == sorted(needs, reverse=True)
    assert big.memory_gib("trainer", 8, tag=True) > big.memory_gib("trainer", 8)
    assert not big.fits("trainer", 1)
    assert big.fits("trainer", 16)
    assert not dataclasses.replace(big, model=dataclasses.replace(big.model, reward_parameters=40e9)).fits("generators", 16)
