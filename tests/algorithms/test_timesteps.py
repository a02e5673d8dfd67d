"""Which steps are noisy and which are trained: keyed, inside the schedule, never the last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from digenrl.algorithms.flow_grpo import FlowGRPO
from digenrl.config.schema import Recipe
from digenrl.diffusion.sampler import StepPlan
from digenrl.errors import ConfigError
from digenrl.ids import SampleId

SAMPLES = [SampleId(step, prompt, sample) for step in range(2) for prompt in range(3) for sample in range(4)]


def plan(
    make: Callable[..., Recipe], steps: int, *, seed: int = 0, samples: list[SampleId] = SAMPLES, **settings: Any
) -> StepPlan:
    recipe = make(run={"device": "cpu", "seed": seed}, algorithm={"type": "flow_grpo", **settings})
    return FlowGRPO(recipe.algorithm.settings, recipe).plan_steps(samples, steps)


@pytest.mark.parametrize("steps", [2, 3, 4, 10, 28])
@pytest.mark.parametrize(
    "settings",
    [
        {"timestep_fraction": 1.0},
        {"timestep_fraction": 0.01},
        {"timestep_selection": "random", "timestep_fraction": 1.0},
        {"timestep_selection": "random", "timestep_fraction": 0.6},
        {"timestep_selection": "window", "sde_window_size": 1},
    ],
)
def test_the_last_step_is_neither_noisy_nor_trained(
    steps: int, settings: dict[str, Any], tiny_recipe: Callable[..., Recipe]
) -> None:
    made = plan(tiny_recipe, steps, **settings)
    assert made.noise_levels.shape == (len(SAMPLES), steps)
    assert bool((made.noise_levels[:, -1] == 0).all())
    assert made.trained.shape[1] >= 1
    assert int(made.trained.max()) <= steps - 2
    assert int(made.trained.min()) >= 0
    assert bool((made.trained.diff(dim=1) > 0).all()), "ascending, each step once"


@pytest.mark.parametrize(
    ("steps", "fraction", "expected"),
    [
        (10, 0.99, 9),  # flow_grpo's own: all but the last
        (6, 0.99, 5),
        (20, 0.99, 19),
        (10, 1.0, 9),
        (10, 0.3, 3),
        (10, 0.6, 6),
        (100, 0.29, 29),  # 100 * 0.29 = 28.999999999999996
        (10, 0.7, 7),  # 7.000000000000001 or 6.999..., never 6
        (1000, 0.001, 1),
        (10, 0.25, 2),  # int, not round
        (16, 0.6, 9),
        (10, 0.05, 1),  # at least one
        (2, 0.99, 1),
    ],
)
@pytest.mark.parametrize("selection", ["first", "random"])
def test_the_share_of_trained_steps_is_t_times_f_rounded_down_without_float_noise(
    steps: int, fraction: float, expected: int, selection: str, tiny_recipe: Callable[..., Recipe]
) -> None:
    made = plan(tiny_recipe, steps, timestep_fraction=fraction, timestep_selection=selection)
    assert made.trained.shape == (len(SAMPLES), expected)


def test_first_trains_the_first_steps_and_adds_noise_to_all_but_the_last(tiny_recipe: Callable[..., Recipe]) -> None:
    made = plan(tiny_recipe, 10, timestep_fraction=0.4)
    assert made.trained.tolist() == [[0, 1, 2, 3]] * len(SAMPLES)
    assert torch.equal(made.noise_levels, torch.tensor([[0.7] * 9 + [0.0]] * len(SAMPLES)))


def test_random_steps_are_each_samples_own_and_repeat_with_the_seed(tiny_recipe: Callable[..., Recipe]) -> None:
    settings = {"timestep_selection": "random", "timestep_fraction": 0.5}
    made = plan(tiny_recipe, 10, **settings)
    assert len({tuple(row) for row in made.trained.tolist()}) > len(SAMPLES) // 2
    assert torch.equal(made.trained, plan(tiny_recipe, 10, **settings).trained)
    assert not torch.equal(made.trained, plan(tiny_recipe, 10, seed=1, **settings).trained)
    backwards = plan(tiny_recipe, 10, samples=SAMPLES[::-1], **settings)
    assert torch.equal(backwards.trained.flip(0), made.trained)
    assert torch.equal(made.noise_levels, torch.tensor([[0.7] * 9 + [0.0]] * len(SAMPLES)))


def test_random_steps_reach_all_steps_but_the_last_equally_often(tiny_recipe: Callable[..., Recipe]) -> None:
    many = [SampleId(0, 0, sample) for sample in range(3000)]
    made = plan(tiny_recipe, 6, samples=many, timestep_selection="random", timestep_fraction=0.34)
    count = Counter(made.trained.flatten().tolist())
    assert set(count) == {0, 1, 2, 3, 4}
    assert all(abs(count[step] - 1200) < 5 * (3000 * 0.4 * 0.6) ** 0.5 for step in count)  # five standard deviations


def test_a_window_is_the_only_noisy_part_and_all_of_it_is_trained(tiny_recipe: Callable[..., Recipe]) -> None:
    made = plan(tiny_recipe, 10, timestep_selection="window", sde_window_size=3, sde_window_range=[1, 6])
    for levels, trained in zip(made.noise_levels, made.trained, strict=True):
        start = int(trained[0])
        assert 1 <= start <= 3
        assert trained.tolist() == [start, start + 1, start + 2]
        assert levels.nonzero().flatten().tolist() == trained.tolist()


def test_all_samples_of_an_rl_step_share_one_window_and_other_steps_draw_theirs(tiny_recipe: Callable[..., Recipe]) -> None:
    settings: dict[str, Any] = {"timestep_selection": "window", "sde_window_size": 2}
    starts = []
    for step in range(60):
        samples = [SampleId(step, prompt, sample) for prompt in range(2) for sample in range(3)]
        trained = plan(tiny_recipe, 8, samples=samples, **settings).trained
        assert len({tuple(row) for row in trained.tolist()}) == 1
        starts.append(int(trained[0, 0]))
    assert set(starts) == set(range(6)), "every start that fits into steps 0 to 6, the end included"


def test_a_window_as_long_as_its_range_has_one_place(tiny_recipe: Callable[..., Recipe]) -> None:
    made = plan(tiny_recipe, 8, timestep_selection="window", sde_window_size=7)
    assert made.trained.tolist() == [list(range(7))] * len(SAMPLES)


@pytest.mark.parametrize(
    "settings",
    [
        {"sde_window_size": 4},
        {"sde_window_size": 2, "sde_window_range": [2, 4]},
        {"sde_window_size": 2, "sde_window_range": [1, 2]},
        {"sde_window_size": 1, "sde_window_range": [2, 2]},
        {"sde_window_size": 1, "sde_window_range": [-1, 2]},
    ],
)
def test_a_window_that_leaves_the_schedule_or_takes_the_last_step_is_refused(
    settings: dict[str, Any], tiny_recipe: Callable[..., Recipe]
) -> None:
    recipe = tiny_recipe(algorithm={"type": "flow_grpo", "timestep_selection": "window", **settings})
    with pytest.raises(ConfigError, match="sde_window"):
        recipe.algorithm.settings.check(recipe)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"algorithm": {"type": "flow_grpo", "dynamics": "ode"}}, "dynamics"),
        ({"rollout": {"noise_level": 0.0}}, "noise_level"),
        ({"rollout": {"num_inference_steps": 1}}, "num_inference_steps"),
        ({"rollout": {"num_generations": 1}}, "num_generations"),
    ],
)
def test_a_recipe_that_leaves_nothing_to_train_is_refused(
    changes: dict[str, Any], key: str, tiny_recipe: Callable[..., Recipe]
) -> None:
    recipe = tiny_recipe(**changes)
    with pytest.raises(ConfigError, match=key):
        recipe.algorithm.settings.check(recipe)  # type: ignore[attr-defined]
