"""MixGRPO: a window that is never empty, never on the last step, and a function of the step's number and the seed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from digenrl.algorithms.mix_grpo import MixGRPO, flash_tail
from digenrl.algorithms.windows import window_places, window_start
from digenrl.config.checks import check_recipe
from digenrl.config.schema import Recipe
from digenrl.config.settings.algorithms import MixGRPOSettings
from digenrl.errors import ConfigError
from digenrl.ids import SampleId


def mix(make: Callable[..., Recipe], *, seed: int = 0, **settings: Any) -> MixGRPO:
    recipe = make(run={"device": "cpu", "seed": seed}, algorithm={"type": "mix_grpo", **settings})
    return MixGRPO(recipe.algorithm.settings, recipe)  # type: ignore[arg-type]


def samples(step: int) -> list[SampleId]:
    return [SampleId(step, prompt, sample) for prompt in range(2) for sample in range(3)]


@pytest.mark.parametrize("schedule", ["progressive", "random", "decay", "exp_decay"])
@pytest.mark.parametrize("flash", [None, 0.4])
def test_the_window_is_the_only_noisy_part_all_of_it_is_trained_and_all_samples_of_a_step_share_it(
    schedule: str, flash: float | None, tiny_recipe: Callable[..., Recipe]
) -> None:
    algorithm = mix(tiny_recipe, sde_window_size=3, window_schedule=schedule, window_steps=2, flash_fraction=flash)
    for step in range(40):
        plan = algorithm.plan_steps(samples(step), 10)
        (trained,) = {tuple(row) for row in plan.trained.tolist()}
        assert trained == tuple(range(trained[0], trained[0] + 3))
        assert trained[-1] <= 8, "never the last step"
        assert plan.noise_levels[0].nonzero().flatten().tolist() == list(trained)
        again = mix(tiny_recipe, sde_window_size=3, window_schedule=schedule, window_steps=2, flash_fraction=flash)
        alone = again.plan_steps(samples(step)[4:], 10)
        assert torch.equal(alone.trained, plan.trained[4:]), "whoever asks, and whenever"
        if flash is not None:
            assert plan.tail[0] == trained[-1] + 1
            assert plan.tail[-1] == 10


def test_a_random_window_stays_for_its_steps_reaches_every_place_and_follows_the_seed(tiny_recipe: Callable[..., Recipe]) -> None:
    algorithm = mix(tiny_recipe, sde_window_size=3, window_schedule="random", window_steps=2)
    starts = [algorithm.window_start(step, 8) for step in range(400)]
    assert starts[::2] == starts[1::2]
    count = Counter(starts[::2])
    assert set(count) == {0, 1, 2, 3, 4}
    other = mix(tiny_recipe, seed=1, sde_window_size=3, window_schedule="random", window_steps=2)
    assert starts != [other.window_start(step, 8) for step in range(400)]


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_in_every_schedule_the_window_is_whole_inside_its_range_and_comes_to_all_places(data: st.DataObject) -> None:
    low = data.draw(st.integers(0, 10))
    size = data.draw(st.integers(1, 8))
    high = low + size + data.draw(st.integers(0, 12))
    steps = data.draw(st.integers(1, 12))
    chosen = MixGRPOSettings(
        sde_window_size=size,
        window_schedule=data.draw(st.sampled_from(["progressive", "decay", "exp_decay"])),
        window_steps=steps,
        window_min_steps=data.draw(st.integers(1, steps)),
        window_stride=data.draw(st.none() | st.integers(1, 9)),
        window_decay_rate=data.draw(st.floats(0, 2)),
        window_decay_from=data.draw(st.integers(0, 20)),
    )
    places = window_places(low, high, size, chosen.window_stride or size)
    cycle = len(places) * steps
    starts = [window_start(step, chosen, low, high) for step in range(cycle)]
    assert all(low <= start and start + size <= high for start in starts)
    assert set(starts) == set(places)
    first_round = starts[: next((i for i in range(1, cycle) if starts[i] < starts[i - 1]), cycle)]
    assert first_round == sorted(first_round)


@given(start=st.integers(1, 40), left=st.integers(1, 40), fraction=st.floats(0.01, 1.0))
def test_a_flash_tail_has_at_least_one_step_and_always_ends_at_sigma_zero(start: int, left: int, fraction: float) -> None:
    tail = flash_tail(start, start + left, fraction)
    assert tail[0] == start
    assert tail[-1] == start + left
    assert all(a < b for a, b in pairwise(tail))
    assert len(tail) - 1 == max(1, int(left * fraction + 1e-9))


def test_a_late_window_leaves_flash_a_single_step_to_the_image() -> None:
    # MixGRPO re-spaces to max(int(2 * 0.4), 1) = 1 point, and stops at the noise level after the window.
    assert flash_tail(23, 25, 0.4) == (23, 25)
    assert flash_tail(4, 25, 0.4) == (4, 6, 9, 11, 14, 17, 19, 22, 25)


@pytest.mark.parametrize(
    ("settings_", "what"),
    [
        ({"sde_window_size": 4}, "sde_window_size"),
        ({"sde_window_size": 2, "sde_window_range": [2, 4]}, "sde_window_size"),
        ({"sde_window_size": 1, "window_schedule": "decay", "window_steps": 2, "window_min_steps": 3}, "window_min_steps"),
        ({"sde_window_size": 1, "dynamics": "ode"}, "dynamics"),
    ],
)
def test_a_window_that_cannot_be_is_refused(settings_: dict[str, Any], what: str, tiny_recipe: Callable[..., Recipe]) -> None:
    with pytest.raises(ConfigError, match=what):
        check_recipe(tiny_recipe(algorithm={"type": "mix_grpo", **settings_}))


def test_flash_trajectories_are_trained_on_ratios_of_exactly_one(make_rig: Callable[..., Any]) -> None:
    def built(recipe: Recipe) -> MixGRPO:
        return MixGRPO(recipe.algorithm.settings, recipe)  # type: ignore[arg-type]

    rig = make_rig(
        algorithm={"type": "mix_grpo", "sde_window_size": 1, "flash_fraction": 0.4},
        train={"steps": 1, "timestep_batch_size": 3},
        make_algorithm=built,
    )
    rig.trainer.accumulate(rig.trajectory(), rig.conditioning(), rig.advantages([0.0, 1.0, 3.0], [2.0, 5.0, 1.0]))
    metrics = rig.trainer.optimizer_step().metrics
    assert (metrics["ratio_mean"], metrics["ratio_std"], metrics["trained_pairs"]) == (1.0, 0.0, 6)
