"""What must hold for every algorithm: gradients by hand, and what must change nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from digenrl.algorithms.advantages import best_of_n, group_advantages, joined_advantages
from digenrl.algorithms.base import LossInputs
from digenrl.algorithms.objectives import clipped_policy_loss
from digenrl.config.registry import ALGORITHMS, component_class
from digenrl.config.schema import Recipe

CLIP = (0.125, 0.25)  # exact in binary, so that ties are ties


def built(make: Callable[..., Recipe], name: str, **keys: Any) -> Any:
    window = {"sde_window_size": 2} if name == "mix_grpo" else {}
    recipe = make(algorithm={"type": name, "clip_range": list(CLIP), **window, **keys})
    return component_class("algorithm", name, where="test")(recipe.algorithm.settings, recipe)


def pairs(log_ratio: Tensor, advantages: Tensor, generator: torch.Generator | None = None) -> LossInputs:
    n = len(log_ratio)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    return LossInputs(
        log_prob=log_ratio,
        old_log_prob=torch.zeros(n, dtype=torch.float64),
        advantages=advantages,
        mean=draw(n, 3, 2),
        transition_std=draw(n).abs() + 0.1,
        dt=-draw(n).abs() - 0.01,
        velocity=draw(n, 3, 2),
        reference_mean=draw(n, 3, 2),
        reference_velocity=draw(n, 3, 2),
    )


RATIOS = torch.tensor([1.0, 0.875, 1.25, 0.5, 2.0, 1.2, 0.9, 0.874, 1.251], dtype=torch.float64)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
@pytest.mark.parametrize("sign", [1.0, -1.0, 0.0])
def test_the_gradient_of_the_loss_is_the_one_by_hand_clipped_unclipped_and_at_ties(
    name: str, sign: float, tiny_recipe: Callable[..., Recipe]
) -> None:
    advantages = sign * torch.linspace(0.5, 7.0, len(RATIOS), dtype=torch.float64)  # the last ones are clamped to 5
    log_ratio = RATIOS.log().requires_grad_()
    out = built(tiny_recipe, name).loss(pairs(log_ratio, advantages))
    out.loss.sum().backward()
    a, r = advantages.clamp(-5, 5), log_ratio.detach().exp()
    gone = ((a > 0) & (r > 1 + CLIP[1])) | ((a < 0) & (r < 1 - CLIP[0]))
    by_hand = torch.where(gone, 0.0, -a * r)
    assert log_ratio.grad is not None
    torch.testing.assert_close(log_ratio.grad, by_hand, rtol=0, atol=1e-10)
    assert out.metrics["clip_fraction"].bool().tolist() == gone.tolist()


@pytest.mark.parametrize("tie", [0.875, 1.25])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_at_the_very_edge_of_the_clip_the_gradient_is_whole(tie: float, advantage: float) -> None:
    ratio = torch.tensor([tie], dtype=torch.float64, requires_grad=True)
    clipped_policy_loss(ratio, torch.tensor([advantage], dtype=torch.float64), CLIP).sum().backward()
    assert ratio.grad is not None
    assert ratio.grad.tolist() == [-advantage]


@pytest.mark.parametrize("form", ["exact", "flow_grpo", "v_based"])
def test_the_gradient_of_each_form_of_the_kl_is_the_one_by_hand(form: str, tiny_recipe: Callable[..., Recipe]) -> None:
    given_ = pairs(torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64), torch.Generator().manual_seed(0))
    mean, velocity = given_.mean.clone().requires_grad_(), given_.velocity.clone().requires_grad_()
    out = built(tiny_recipe, "flow_grpo", kl_beta=0.3, kl_form=form).loss(replace(given_, mean=mean, velocity=velocity))
    out.loss.sum().backward()
    assert given_.reference_mean is not None and given_.reference_velocity is not None
    if form == "v_based":
        by_hand = 0.3 * 2 * (velocity.detach() - given_.reference_velocity) / 6
        found = velocity.grad
    else:
        std = given_.transition_std / (1.0 if form == "exact" else (-given_.dt).sqrt())
        by_hand = 0.3 * (mean.detach() - given_.reference_mean) / 6 / std.square().view(-1, 1, 1)
        found = mean.grad
    assert found is not None
    torch.testing.assert_close(found, by_hand, rtol=0, atol=1e-10)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), cut=st.integers(0, 12), name=st.sampled_from(sorted(ALGORITHMS)))
def test_a_pairs_loss_and_metrics_do_not_depend_on_its_neighbours_or_its_place(
    seed: int, cut: int, name: str, tiny_recipe: Callable[..., Recipe]
) -> None:
    draw = torch.Generator().manual_seed(seed)
    every = pairs(
        torch.randn(12, dtype=torch.float64, generator=draw) / 5, torch.randn(12, dtype=torch.float64, generator=draw), draw
    )
    order = torch.randperm(12, generator=draw)
    algorithm = built(tiny_recipe, name, kl_beta=0.1)

    def some(rows: Tensor) -> LossInputs:
        return LossInputs(**{field.name: getattr(every, field.name)[rows] for field in fields(every)})

    whole = algorithm.loss(every)
    parts = [algorithm.loss(some(rows)) for rows in (order[:cut], order[cut:]) if len(rows)]
    assert torch.equal(torch.cat([part.loss for part in parts]), whole.loss[order])
    for metric, values in whole.metrics.items():
        assert torch.equal(torch.cat([part.metrics[metric] for part in parts]), values[order])


GROUPS = st.integers(2, 12).flatmap(
    lambda size: st.lists(st.lists(st.integers(-1000, 1000), min_size=size, max_size=size), min_size=1, max_size=5)
)
FORMS = st.fixed_dictionaries(
    {"std": st.sampled_from(["group", "batch", "none"]), "ddof": st.sampled_from([0, 1]), "eps": st.sampled_from([0.0, 1e-4])}
)


def values(rewards: np.ndarray, **form: Any) -> np.ndarray:
    return np.stack([group.values for group in group_advantages(rewards, **form)])


@given(rows=GROUPS, form=FORMS, constant=st.integers(-10_000, 10_000), trim=st.sampled_from([0.0, 0.25]))
def test_a_constant_added_to_a_groups_rewards_changes_no_advantage(
    rows: list[list[int]], form: dict[str, Any], constant: int, trim: float
) -> None:
    rewards = np.array(rows, dtype=np.float64)
    if form["std"] == "batch":
        moved = rewards + constant  # of one group alone, it would change the spread of the batch
    else:
        moved = rewards.copy()
        moved[0] += constant
    np.testing.assert_allclose(values(moved, trim=trim, **form), values(rewards, trim=trim, **form), rtol=1e-8, atol=1e-8)


@given(rows=GROUPS, ddof=st.sampled_from([0, 1]), eps=st.sampled_from([0.0, 1e-8, 1e-4]))
def test_no_advantage_is_larger_than_the_root_of_one_less_than_the_group(rows: list[list[int]], ddof: int, eps: float) -> None:
    rewards = np.array(rows, dtype=np.float64)
    assert np.abs(values(rewards, ddof=ddof, eps=eps)).max() <= np.sqrt(rewards.shape[1] - 1) + 1e-9


@given(rows=GROUPS, form=FORMS, data=st.data())
def test_a_permutation_of_a_groups_samples_permutes_its_advantages(
    rows: list[list[int]], form: dict[str, Any], data: st.DataObject
) -> None:
    rewards = np.array(rows, dtype=np.float64)
    order = data.draw(st.permutations(range(rewards.shape[1])))
    np.testing.assert_allclose(values(rewards[:, order], **form), values(rewards, **form)[:, order], rtol=1e-9, atol=1e-9)


@given(rows=GROUPS, data=st.data())
def test_a_duplicate_prompt_or_another_group_beside_it_changes_no_groups_advantages(
    rows: list[list[int]], data: st.DataObject
) -> None:
    rewards = np.array(rows, dtype=np.float64)
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=6))
    np.testing.assert_array_equal(values(rewards[chosen]), values(rewards)[chosen])


@given(rows=GROUPS, count=st.integers(2, 12))
def test_best_of_n_keeps_n_of_each_group_and_none_between_the_best_and_the_worst(rows: list[list[int]], count: int) -> None:
    for group in group_advantages(np.array(rows, dtype=np.float64)):
        chosen = best_of_n(group, count, group.values)
        assert chosen.kept.sum() == min(count, len(group.values))
        left, kept = group.values[~chosen.kept], np.sort(group.values[chosen.kept])
        if len(left):
            assert kept[: count // 2].max(initial=-np.inf) <= left.min()
            assert left.max() <= kept[count // 2 :].min()


def test_several_rewards_meet_in_their_advantages_with_their_weights() -> None:
    first = group_advantages(np.array([[0.0, 1.0], [3.0, 3.0]]), eps=0.0)
    second = group_advantages(np.array([[7.0, 5.0], [1.0, 1.0]]), eps=0.0)
    moving, still = joined_advantages([first, second], [1.0, 0.25], apart=False)
    assert moving.values.tolist() == [-0.75, 0.75]
    assert still.values.tolist() == [0.0, 0.0]
    assert (moving.zero_variance, still.zero_variance) == (False, True)
    (apart, _) = joined_advantages([first, second], [1.0, 0.25], apart=True)
    assert apart.values.tolist() == [[-1.0, 1.0], [1.0, -1.0]]


def test_trimming_leaves_the_lowest_rewards_out_of_the_statistics_and_not_out_of_the_loss() -> None:
    (group,) = group_advantages(np.array([[-100.0, 1.0, 2.0, 3.0]]), trim=0.25, eps=0.0)
    np.testing.assert_allclose(group.values, (np.array([-100.0, 1, 2, 3]) - 2) / np.sqrt(2 / 3))
    assert group.kept.all()
    (flat,) = group_advantages(np.array([[0.0, 1.0, 1.0, 1.0]]), trim=0.25, eps=0.0)
    assert np.abs(flat.values).max() <= np.sqrt(3) + 1e-9, "the rest has no variance: nothing is trimmed"
