"""The check of a user's algorithm accepts the built-in ones and the example, and names what is broken in others."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from digenrl.algorithms.base import GroupAdvantages, LossInputs, LossOutputs, RewardTable
from digenrl.diffusion.sampler import StepPlan
from digenrl.errors import ConfigError
from digenrl.ids import SampleId
from digenrl.testing import check_algorithm

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_algorithm.py"


def _example() -> Any:
    spec = importlib.util.spec_from_file_location("custom_algorithm", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["custom_algorithm"] = module
    spec.loader.exec_module(module)
    return module


Reinforce: Any = _example().Reinforce


@pytest.fixture(autouse=True)
def _importable() -> Iterator[None]:
    sys.modules["broken_algorithms"] = sys.modules[__name__]
    yield
    del sys.modules["broken_algorithms"]


def test_the_example_is_an_algorithm() -> None:
    report = check_algorithm("custom_algorithm:Reinforce", trained_steps=2)
    assert report.trained_steps == 2
    assert report.metrics["trained_pairs"] == 16
    with pytest.raises(ConfigError, match="trained_step"):
        check_algorithm("custom_algorithm:Reinforce", trained_step=2)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("flow_grpo", {"kl_beta": 0.1}),
        ("dance_grpo", {"best_of_n": 2}),
        ("mix_grpo", {"sde_window_size": 2, "flash_fraction": 0.4}),
    ],
)
def test_the_built_in_algorithms_pass(name: str, settings: dict[str, Any]) -> None:
    report = check_algorithm(name, **settings)
    assert report.metrics["ratio_mean"] == 1.0


class TrainsTheLast(Reinforce):
    def plan_steps(self, samples: Sequence[SampleId], num_inference_steps: int) -> StepPlan:
        levels = torch.ones(len(samples), num_inference_steps)
        return StepPlan(noise_levels=levels, trained=torch.full((len(samples), 1), num_inference_steps - 1))


class Forgets(Reinforce):
    def plan_steps(self, samples: Sequence[SampleId], num_inference_steps: int) -> StepPlan:
        self.calls = getattr(self, "calls", 0) + 1
        plan: StepPlan = super().plan_steps(samples, num_inference_steps)
        return replace(plan, trained=plan.trained + self.calls % 2)


class Mean(Reinforce):
    def loss(self, pairs: LossInputs) -> LossOutputs:
        out = super().loss(pairs)
        return replace(out, loss=out.loss / len(out.loss))


class LearnsFromNothing(Reinforce):
    def loss(self, pairs: LossInputs) -> LossOutputs:
        return replace(super().loss(pairs), loss=-(1 + pairs.advantages) * pairs.log_prob)


class Unguarded(Reinforce):
    def advantages(self, rewards: RewardTable) -> list[GroupAdvantages]:
        return [
            GroupAdvantages(values=row - row.mean(), kept=np.ones(len(row), dtype=np.bool_), zero_variance=False)
            for row in rewards.total
        ]


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("TrainsTheLast", "the last denoising step"),
        ("Forgets", "the same ids gave another plan"),
        ("Mean", "depends on the pairs beside it"),
        ("LearnsFromNothing", "advantage 0"),
        ("Unguarded", "without a valid reward"),
    ],
)
def test_a_broken_algorithm_is_told_what_is_broken(name: str, complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        check_algorithm(f"broken_algorithms:{name}")
