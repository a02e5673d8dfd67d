"""The learning rate as a function of the step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from digenrl.config.schema import TrainSection
from digenrl.training.optim import learning_rate, make_optimizer


def rates(**settings: Any) -> list[float]:
    train = TrainSection(learning_rate=1.0, **settings)
    return [learning_rate(step, train) for step in range(train.steps)]


def test_constant_stays_at_the_peak() -> None:
    assert rates(steps=3) == [1.0, 1.0, 1.0]


def test_the_warm_up_rises_linearly_to_the_peak() -> None:
    assert rates(steps=5, lr_warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_linear_falls_from_the_peak_to_its_end_at_the_last_step() -> None:
    assert rates(steps=5, lr_schedule="linear") == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert rates(steps=5, lr_schedule="linear", lr_final_fraction=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    assert rates(steps=7, lr_schedule="linear", lr_warmup_steps=2, lr_final_fraction=0.2) == pytest.approx(
        [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]
    )


def test_cosine_falls_as_half_a_wave() -> None:
    expected = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * i / 4)) for i in range(5)]
    assert rates(steps=5, lr_schedule="cosine", lr_final_fraction=0.1) == pytest.approx(expected)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (1, 5), (2, 2), (3, 2)])
def test_short_runs_stay_between_zero_and_the_peak(schedule: str, steps: int, warmup: int) -> None:
    assert all(0.0 <= rate <= 1.0 for rate in rates(steps=steps, lr_schedule=schedule, lr_warmup_steps=warmup))


def test_the_optimizer_is_adamw_with_the_recipes_settings() -> None:
    train = TrainSection(steps=1, learning_rate=0.1, adam_beta1=0.8, adam_beta2=0.95, adam_eps=1e-6, weight_decay=0.02)
    weight = nn.Parameter(torch.tensor([2.0]))
    optimizer = make_optimizer([weight], train)
    weight.grad = torch.tensor([0.5])
    optimizer.step()
    # After bias correction the first step is lr * g / (|g| + eps), beside the decoupled decay lr * wd * w.
    expected = 2.0 - 0.1 * 0.02 * 2.0 - 0.1 * 0.5 / (0.5 + 1e-6)
    assert float(weight.detach()) == pytest.approx(expected, rel=1e-6)
    weight.grad = torch.tensor([-1.0])
    optimizer.step()
    first, second = 0.8 * 0.2 * 0.5 - 0.2 * 1.0, 0.95 * 0.05 * 0.25 + 0.05 * 1.0
    step = (first / (1 - 0.8**2)) / (math.sqrt(second / (1 - 0.95**2)) + 1e-6)
    assert float(weight.detach()) == pytest.approx(expected * (1 - 0.1 * 0.02) - 0.1 * step, rel=1e-5)
