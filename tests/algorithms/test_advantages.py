"""Group advantages: exact zeros, invalid rewards, and the divisors."""

from __future__ import annotations

import numpy as np
import pytest

from digenrl.algorithms.advantages import group_advantages

NAN = float("nan")


def values(rewards: list[list[float]], **settings: object) -> np.ndarray:
    return np.stack([group.values for group in group_advantages(np.array(rewards), **settings)])  # type: ignore[arg-type]


def test_an_invalid_reward_is_left_out_of_its_groups_statistics() -> None:
    (group,) = group_advantages(np.array([[1.0, NAN, 3.0]]))
    # [-1, 0, 1] but for the epsilon of 1e-4 in the divisor.
    np.testing.assert_allclose(group.values, [-1, 0, 1], atol=2e-4)
    assert group.values[1] == 0.0
    assert group.kept.tolist() == [True, False, True]
    assert not group.zero_variance
    np.testing.assert_array_equal(values([[1.0, NAN, 3.0]], eps=0.0), [[-1, 0, 1]])


@pytest.mark.parametrize("bad", [NAN, float("inf"), -float("inf")])
def test_infinite_rewards_are_as_invalid_as_nan(bad: float) -> None:
    (group,) = group_advantages(np.array([[bad, 2.0, 1.0, bad]]))
    assert group.kept.tolist() == [False, True, True, False]
    np.testing.assert_allclose(group.values, [0, 1, -1, 0], atol=3e-4)


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("std", ["group", "batch", "none"])
@pytest.mark.parametrize("rewards", [[5.0], [NAN, 5.0, NAN]])
def test_a_group_with_one_valid_reward_has_advantage_zero(rewards: list[float], std: str, ddof: int) -> None:
    (group,) = group_advantages(np.array([rewards]), std=std, ddof=ddof)  # type: ignore[arg-type]
    assert group.values.tolist() == [0.0] * len(rewards)
    assert group.zero_variance


@pytest.mark.parametrize("std", ["group", "batch", "none"])
def test_a_group_without_a_valid_reward_keeps_nothing(std: str) -> None:
    empty, full = group_advantages(np.array([[NAN, NAN, NAN], [1.0, 2.0, 3.0]]), std=std)  # type: ignore[arg-type]
    assert empty.values.tolist() == [0.0, 0.0, 0.0]
    assert not empty.kept.any()
    assert full.kept.all()
    (alone,) = group_advantages(np.array([[NAN, NAN]]), std=std)  # type: ignore[arg-type]
    assert not alone.kept.any()


@pytest.mark.parametrize("size", [2, 3, 7, 8, 24, 1000])
@pytest.mark.parametrize("value", [0.1, 0.35, 0.7, 26.123, -1e-30, 1e30, float(np.float32(0.35))])
@pytest.mark.parametrize("std", ["group", "batch", "none"])
def test_equal_rewards_give_exactly_zero(value: float, size: int, std: str) -> None:
    constant, other = np.full(size, value), np.linspace(0, 1, size)
    first, _ = group_advantages(np.stack([constant, other]), std=std, eps=0.0)  # type: ignore[arg-type]
    assert first.values.tolist() == [0.0] * size
    assert first.zero_variance


def test_group_std_sees_its_own_group_and_batch_std_all_valid_rewards() -> None:
    rewards = [[0.0, 2.0], [10.0, 30.0], [NAN, 5.0]]
    np.testing.assert_allclose(values(rewards, eps=0.0), [[-1, 1], [-1, 1], [0, 0]])
    batch = np.array([0.0, 2.0, 10.0, 30.0, 5.0]).std()
    np.testing.assert_allclose(values(rewards, std="batch", eps=0.0), np.array([[-1, 1], [-10, 10], [0, 0]]) / batch)
    np.testing.assert_array_equal(values(rewards, std="none"), [[-1, 1], [-10, 10], [0, 0]])


def test_ddof_and_epsilon_are_in_the_divisor() -> None:
    rewards = [[0.0, 1.0, 5.0]]
    centred = np.array([-2.0, -1.0, 3.0])
    np.testing.assert_allclose(values(rewards, ddof=0, eps=0.5)[0], centred / (np.sqrt(14 / 3) + 0.5))
    np.testing.assert_allclose(values(rewards, ddof=1, eps=0.5)[0], centred / (np.sqrt(14 / 2) + 0.5))
    batch = [[0.0, 1.0], [5.0, 5.0]]
    everything = np.array([0.0, 1.0, 5.0, 5.0])
    np.testing.assert_allclose(values(batch, std="batch", ddof=1, eps=0.25)[0], [-0.5, 0.5] / (everything.std(ddof=1) + 0.25))


def test_constant_groups_stay_in_the_batch_std() -> None:
    both = values([[0.0, 1.0], [9.0, 9.0]], std="batch", eps=0.0)
    alone = values([[0.0, 1.0]], std="batch", eps=0.0)
    assert abs(both[0, 0]) < abs(alone[0, 0])
    assert both[1].tolist() == [0.0, 0.0]


def test_skip_zero_variance_drops_constant_groups_and_nothing_else() -> None:
    rewards = np.array([[1.0, 1.0, 1.0], [1.0, 2.0, NAN], [4.0, NAN, NAN]])
    kept = [g.kept.tolist() for g in group_advantages(rewards)]
    assert kept == [[True] * 3, [True, True, False], [True, False, False]]
    skipped = [g.kept.tolist() for g in group_advantages(rewards, skip_zero_variance=True)]
    assert skipped == [[False] * 3, [True, True, False], [False] * 3]


def test_the_advantages_of_a_group_sum_to_zero_over_its_valid_rewards() -> None:
    rewards = np.random.default_rng(0).normal(size=(6, 24))
    rewards[2, 5] = NAN
    for group in group_advantages(rewards):
        assert abs(group.values.sum()) < 1e-12


def test_rewards_too_far_apart_for_float64_get_no_advantage_rather_than_an_infinite_one() -> None:
    with np.errstate(over="ignore"):
        assert values([[1e308, -1e308, 1e308]]).tolist() == [[0.0, 0.0, 0.0]]
