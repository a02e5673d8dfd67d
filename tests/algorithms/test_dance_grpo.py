"""DanceGRPO: its own count of steps, the best and worst of each prompt, rewards apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from digenrl.algorithms.base import LossInputs, RewardTable
from digenrl.algorithms.dance_grpo import DanceGRPO
from digenrl.config.checks import check_recipe
from digenrl.config.schema import Recipe
from digenrl.diffusion.dynamics import DanceSDE
from digenrl.errors import ConfigError
from digenrl.ids import SampleId

NAN = float("nan")
TWO = [{"type": "jpeg", "name": "first", "weight": 1.0}, {"type": "jpeg", "name": "second", "weight": 0.5}]


def dance(make: Callable[..., Recipe], *, rewards: list[dict[str, Any]] | None = None, **settings: Any) -> DanceGRPO:
    sections: dict[str, Any] = {"rewards": rewards} if rewards else {}
    recipe = make(algorithm={"type": "dance_grpo", **settings}, **sections)
    return DanceGRPO(recipe.algorithm.settings, recipe)  # type: ignore[arg-type]


def table(first: list[list[float]], second: list[list[float]]) -> RewardTable:
    a, b = np.array(first), np.array(second)
    return RewardTable(total=a + 0.5 * b, by_reward={"first": a, "second": b})


@pytest.mark.parametrize(
    ("steps", "fraction", "expected"), [(16, 0.6, 9), (12, 0.6, 6), (10, 0.6, 5), (10, 1.0, 9), (20, 0.6, 11)]
)
def test_it_counts_the_share_of_the_steps_before_the_last(
    steps: int, fraction: float, expected: int, tiny_recipe: Callable[..., Recipe]
) -> None:
    algorithm = dance(tiny_recipe, timestep_fraction=fraction)
    plan = algorithm.plan_steps([SampleId(0, 0, sample) for sample in range(5)], steps)
    assert plan.trained.shape == (5, expected)
    assert int(plan.trained.max()) < steps - 1
    assert len({tuple(row) for row in plan.trained.tolist()}) > 1 or expected == steps - 1
    assert isinstance(algorithm.dynamics, DanceSDE)


def test_the_best_and_the_worst_of_every_prompt_are_kept_with_the_advantages_of_the_whole_group(
    tiny_recipe: Callable[..., Recipe],
) -> None:
    rewards = RewardTable(total=np.array([[3.0, 1.0, 2.0, 5.0, 4.0], [1.0, NAN, 9.0, 7.0, 8.0], [50.0, 51.0, NAN, NAN, NAN]]))
    everything = dance(tiny_recipe).advantages(rewards)
    chosen = dance(tiny_recipe, best_of_n=3).advantages(rewards)
    assert [group.kept.tolist() for group in chosen] == [
        [False, True, False, True, True],  # 5 and 4 are the best, 1 the worst
        [True, False, True, False, True],
        [True, True, False, False, False],  # no more than three are there
    ]
    for some, whole in zip(chosen, everything, strict=True):
        assert np.array_equal(some.values, whole.values)


def test_advantages_have_the_unbiased_std_and_equal_rewards_none(tiny_recipe: Callable[..., Recipe]) -> None:
    first, second = dance(tiny_recipe).advantages(RewardTable(total=np.array([[0.0, 1.0, 5.0], [0.35, 0.35, 0.35]])))
    np.testing.assert_allclose(first.values, np.array([-2.0, -1.0, 3.0]) / np.sqrt(7))
    assert second.values.tolist() == [0.0] * 3


def test_each_reward_has_an_advantage_of_its_own_and_an_invalid_sample_none(tiny_recipe: Callable[..., Recipe]) -> None:
    (group,) = dance(tiny_recipe, rewards=TWO).advantages(table([[0.0, 2.0, 4.0, NAN]], [[10.0, 30.0, 20.0, 7.0]]))
    np.testing.assert_allclose(group.values, [[-1, -1], [0, 1], [1, 0], [0, 0]], atol=1e-6)
    assert group.kept.tolist() == [True, True, True, False]
    (summed,) = dance(tiny_recipe, rewards=TWO, reward_weighting="advantage").advantages(table([[0.0, 2.0]], [[10.0, 30.0]]))
    np.testing.assert_allclose(summed.values, np.array([-1.5, 1.5]) / np.sqrt(2), atol=1e-6)


def inputs(log_ratio: torch.Tensor, advantages: torch.Tensor) -> LossInputs:
    n = len(log_ratio)
    nothing = torch.zeros(n, 1, dtype=log_ratio.dtype)
    return LossInputs(
        log_prob=log_ratio,
        old_log_prob=torch.zeros_like(log_ratio),
        advantages=advantages,
        mean=nothing,
        transition_std=torch.ones(n),
        dt=-torch.ones(n),
        velocity=nothing,
        reference_mean=None,
        reference_velocity=None,
    )


def test_the_objectives_of_two_rewards_are_clipped_apart_and_summed_with_their_weights(
    tiny_recipe: Callable[..., Recipe],
) -> None:
    algorithm = dance(tiny_recipe, rewards=TWO, clip_range=0.2, adv_clip_max=2.0)
    ratio = torch.tensor([1.5, 0.5, 1.1], dtype=torch.float64)
    log_ratio = ratio.log().requires_grad_()
    advantages = torch.tensor([[1.0, -1.0], [1.0, -9.0], [3.0, 1.0]], dtype=torch.float64)
    out = algorithm.loss(inputs(log_ratio, advantages))
    wanted = [-1.2 + 0.5 * 1.5, -0.5 + 0.5 * 2 * 0.8, -2 * 1.1 - 0.5 * 1.1]
    assert out.loss.tolist() == pytest.approx(wanted)
    out.loss.sum().backward()
    # Clipped: the first reward of the first pair (good, likely enough), the second of the second (bad, rare enough).
    assert log_ratio.grad is not None
    assert log_ratio.grad.tolist() == pytest.approx([0.5 * 1.5, -0.5, -2.5 * 1.1])
    assert out.metrics["clip_fraction"].tolist() == [0.5, 0.5, 0.0]
    assert out.metrics["clip_fraction_above"].tolist() == [0.5, 0.0, 0.0]
    assert out.metrics["clip_fraction_below"].tolist() == [0.0, 0.5, 0.0]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"algorithm": {"type": "dance_grpo", "best_of_n": 4}}, "best_of_n"),
        ({"algorithm": {"type": "dance_grpo", "timestep_fraction": 0.2}}, "timestep_fraction"),
        ({"algorithm": {"type": "dance_grpo", "dynamics": "ddim"}}, "ddim"),
        ({"algorithm": {"type": "dance_grpo"}, "rollout": {"num_generations": 1}}, "num_generations"),
        ({"algorithm": {"type": "dance_grpo", "updates_per_rollout": 3}}, "updates_per_rollout"),
    ],
)
def test_what_cannot_train_is_refused_with_what_why_and_fix(
    changes: dict[str, Any], what: str, tiny_recipe: Callable[..., Recipe]
) -> None:
    with pytest.raises(ConfigError, match=what) as refused:
        check_recipe(tiny_recipe(**changes))
    assert refused.value.why and refused.value.fix


@pytest.mark.parametrize("clip", [0.0, -1e-4, [1e-4, 0.0], [-0.1, 0.1]])
def test_a_clip_range_that_is_not_positive_is_refused(clip: Any, tiny_recipe: Callable[..., Recipe]) -> None:
    with pytest.raises(ConfigError, match="clip_range"):
        tiny_recipe(algorithm={"type": "dance_grpo", "clip_range": clip})


def test_a_micro_batch_with_rewards_apart_is_trained(make_rig: Callable[..., Any]) -> None:
    rig = make_rig(
        algorithm={"type": "dance_grpo", "best_of_n": 2}, rewards=TWO, rollout={"noise_level": 0.3}, make_algorithm=_built
    )
    groups = rig.algorithm.advantages(table([[0.0, 1.0, 3.0], [2.0, 5.0, 1.0]], [[1.0, 1.0, 1.0], [0.0, 3.0, 1.0]]))
    rig.trainer.accumulate(rig.trajectory(), rig.conditioning(), groups)
    metrics = rig.trainer.optimizer_step().metrics
    assert metrics["trained_pairs"] == 2 * 2 * 1  # int(3 * 0.6) of the steps before the last
    assert metrics["grad_norm"] > 0
    assert metrics["ratio_mean"] == 1.0


def test_no_pass_has_room_for_samples_that_are_not_chosen(make_rig: Callable[..., Any]) -> None:
    rig = make_rig(algorithm={"type": "dance_grpo", "best_of_n": 2}, train={"timestep_batch_size": "all"}, make_algorithm=_built)
    trajectory, predict, rows = rig.trajectory(), rig.adapter.predict, list[int]()

    def counted(latents: torch.Tensor, *more: Any) -> torch.Tensor:
        rows.append(len(latents))
        return predict(latents, *more)  # type: ignore[no-any-return]

    rig.adapter.predict = counted
    groups = rig.algorithm.advantages(RewardTable(total=np.array([[0.0, 1.0, 3.0], [2.0, 5.0, 1.0]]), by_reward={}))
    rig.trainer.accumulate(trajectory, rig.conditioning(), groups)
    assert rows == [2, 2], "two of three samples, one step each"


def _built(recipe: Recipe) -> DanceGRPO:
    return DanceGRPO(recipe.algorithm.settings, recipe)  # type: ignore[arg-type]
