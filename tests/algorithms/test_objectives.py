"""The clipped objective, case by case, and Flow-GRPO's metrics."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from digenrl.algorithms.base import LossInputs
from digenrl.algorithms.flow_grpo import FlowGRPO
from digenrl.algorithms.objectives import clipped, clipped_policy_loss
from digenrl.config.schema import Recipe

CLIP = (0.2, 0.2)


def loss_and_gradient(ratio: float, advantage: float) -> tuple[float, float]:
    r = torch.tensor([ratio], requires_grad=True)
    loss = clipped_policy_loss(r, torch.tensor([advantage]), CLIP)
    loss.sum().backward()
    assert r.grad is not None
    return float(loss.detach()), float(r.grad)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),  # on policy: both branches agree and share one gradient
        (1.1, 2.0, -2.2, -2.0),  # inside
        (1.5, 2.0, -2.4, 0.0),  # good and already likelier than allowed: clipped
        (0.5, 2.0, -1.0, -2.0),  # good but unlikely: never clipped
        (0.5, -2.0, 1.6, 0.0),  # bad and already rarer than allowed: clipped
        (1.5, -2.0, 3.0, 2.0),  # bad but likely: never clipped
        (1.1, -2.0, 2.2, 2.0),
        (3.0, 0.0, 0.0, 0.0),
    ],
)
def test_the_clip_takes_the_gradient_only_where_the_policy_has_already_moved_far_enough(
    ratio: float, advantage: float, loss: float, gradient: float
) -> None:
    assert loss_and_gradient(ratio, advantage) == pytest.approx((loss, gradient))
    is_clipped = any(bool(side) for side in clipped(torch.tensor([ratio]), torch.tensor([advantage]), CLIP))
    assert is_clipped == (gradient == 0.0 and advantage != 0.0)


def test_a_ratio_on_the_edge_of_the_clip_is_not_counted_as_clipped() -> None:
    edges = torch.tensor([1.2, 0.8])
    below, above = clipped(edges, torch.tensor([1.0, -1.0]), CLIP)
    assert (below + above).tolist() == [0.0, 0.0]


def inputs(log_ratio: Tensor, advantages: Tensor, **changes: Any) -> LossInputs:
    n = len(log_ratio)
    plain: dict[str, Any] = {
        "log_prob": log_ratio - 1.0,
        "old_log_prob": torch.full((n,), -1.0),
        "advantages": advantages,
        "mean": torch.zeros(n, 2, 2),
        "transition_std": torch.full((n,), 0.5),
        "dt": torch.full((n,), -0.25),
        "velocity": torch.zeros(n, 2, 2),
        "reference_mean": None,
        "reference_velocity": torch.zeros(n, 2, 2),
    }
    return LossInputs(**(plain | changes))


def algorithm(make: Callable[..., Recipe], **settings: Any) -> FlowGRPO:
    recipe = make(algorithm={"type": "flow_grpo", **settings})
    return FlowGRPO(recipe.algorithm.settings, recipe)


def test_advantages_are_clamped_before_they_weigh(tiny_recipe: Callable[..., Recipe]) -> None:
    out = algorithm(tiny_recipe, adv_clip_max=1.5).loss(inputs(torch.zeros(3), torch.tensor([9.0, -9.0, 0.5])))
    assert out.loss.tolist() == [-1.5, 1.5, -0.5]


def test_the_metrics_say_how_far_the_policy_moved(tiny_recipe: Callable[..., Recipe]) -> None:
    log_ratio = torch.tensor([0.0, 0.3, -0.3], requires_grad=True)
    out = algorithm(tiny_recipe, clip_range=0.2).loss(inputs(log_ratio, torch.tensor([1.0, 1.0, 1.0])))
    ratio = [1.0, math.exp(0.3), math.exp(-0.3)]
    assert out.metrics["ratio"].tolist() == pytest.approx(ratio)
    assert out.metrics["clip_fraction"].tolist() == [0.0, 1.0, 0.0]
    assert out.metrics["logprob_abs_diff"].tolist() == pytest.approx([0.0, 0.3, 0.3])
    assert out.metrics["approx_kl"].tolist() == pytest.approx([r - 1 - math.log(r) for r in ratio], abs=1e-6)
    assert not any(value.requires_grad for value in out.metrics.values())
    assert out.loss.shape == (3,)


def test_the_default_clip_follows_the_reduction(tiny_recipe: Callable[..., Recipe]) -> None:
    assert algorithm(tiny_recipe).settings.effective_clip_range == (1e-4, 1e-4)
    assert algorithm(tiny_recipe, log_prob_reduction="sum").settings.effective_clip_range == (0.2, 0.2)
    assert algorithm(tiny_recipe, log_prob_reduction="sum", clip_range=0.05).settings.effective_clip_range == (0.05, 0.05)


def test_the_kl_adds_beta_times_the_divergence_of_the_means(tiny_recipe: Callable[..., Recipe]) -> None:
    mean = torch.ones(2, 2, 2, requires_grad=True)
    zeros = torch.zeros(2)
    given = inputs(zeros, zeros, mean=mean, reference_mean=torch.zeros(2, 2, 2))
    exact = algorithm(tiny_recipe, kl_beta=0.1).loss(given)
    assert exact.metrics["kl_reference"].tolist() == pytest.approx([1 / (2 * 0.25)] * 2)
    assert exact.loss.tolist() == pytest.approx([0.2] * 2)
    # b = transition_std / sqrt(-dt) = 1.
    theirs = algorithm(tiny_recipe, kl_beta=0.1, kl_form="flow_grpo").loss(given)
    assert theirs.metrics["kl_reference"].tolist() == pytest.approx([0.5] * 2)
    exact.loss.sum().backward()
    assert mean.grad is not None
    assert bool((mean.grad > 0).all())


def test_a_reference_is_asked_for_only_where_the_kl_has_weight(tiny_recipe: Callable[..., Recipe]) -> None:
    assert not algorithm(tiny_recipe).needs_reference
    assert algorithm(tiny_recipe, kl_beta=1e-9).needs_reference
