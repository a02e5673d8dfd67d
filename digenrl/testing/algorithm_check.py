"""A test of an algorithm of your own, in one call: it generates, judges and trains on a tiny model, and checks the contract.

    from digenrl.testing import check_algorithm

    def test_my_algorithm() -> None:
        check_algorithm("my_module:MyAlgorithm", my_setting=0.5)

Invariants that are checked are those of ``algorithms/base.py``; what is broken is an AssertionError in words.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from digenrl.algorithms.base import Algorithm, GroupAdvantages, LossInputs, LossOutputs, RewardTable
from digenrl.config.checks import check_recipe
from digenrl.config.loader import recipe_from_plain
from digenrl.config.registry import component_class
from digenrl.config.schema import Recipe
from digenrl.data.prompts import Prompt
from digenrl.diffusion.sampler import StepPlan
from digenrl.ids import SampleId, StepOutcome
from digenrl.models.base import Conditioning, ModelAdapter
from digenrl.runtime.build import build_algorithm
from digenrl.testing.tiny_pipelines import build_sd3
from digenrl.training.policy import Policy
from digenrl.training.trainer import Trainer
from digenrl.workers.generator import Generator

PROMPTS = (Prompt(text="a red circle"), Prompt(text="two blue squares"))
GROUP, STEPS = 4, 6
REWARDS = np.array([[0.0, 1.0, 3.0, 2.0], [5.0, 2.0, 2.5, 7.0]])


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmReport:
    """What the check has seen."""

    metrics: Mapping[str, float]
    """Of the one optimizer step."""
    trained_steps: int
    """Denoising steps of each sample that were trained."""


def check_algorithm(type_: str, *, rollout: Mapping[str, Any] | None = None, **settings: Any) -> AlgorithmReport:
    """Check an algorithm: ``type_`` and ``settings`` as in a recipe's ``algorithm`` section, ``rollout`` over the check's own.

    Raises ConfigError for settings that `digenrl check` would refuse, AssertionError for a broken contract.
    """
    with tempfile.TemporaryDirectory() as folder:
        recipe = _recipe(build_sd3(Path(folder) / "sd3"), {"type": type_, **settings}, rollout or {})
        check_recipe(recipe)
        algorithm = build_algorithm(recipe)
        plan = _check_plan(algorithm)
        groups = _check_advantages(algorithm)
        metrics = _check_training(algorithm, recipe, groups)
    return AlgorithmReport(metrics=metrics, trained_steps=plan.trained.shape[1])


def _samples(step: int = 0) -> list[SampleId]:
    return [SampleId(step, prompt, sample) for prompt in range(len(PROMPTS)) for sample in range(GROUP)]


def _check_plan(algorithm: Algorithm) -> StepPlan:
    samples = _samples()
    plan = algorithm.plan_steps(samples, STEPS)
    assert plan.noise_levels.shape == (len(samples), STEPS), "plan_steps: noise_levels are [samples, denoising steps]"
    trained = plan.trained
    assert trained.ndim == 2 and len(trained) == len(samples), "plan_steps: trained is [samples, trained steps]"
    assert trained.shape[1] >= 1, "plan_steps: nothing is trained"
    assert bool((trained.diff(dim=1) > 0).all()), "plan_steps: the trained steps of a sample ascend, each once"
    assert int(trained.max()) < STEPS - 1, "plan_steps: the last denoising step is trained, whose noise stays in the image"
    again = algorithm.plan_steps(samples, STEPS)
    same = torch.equal(again.trained, trained) and torch.equal(again.noise_levels, plan.noise_levels)
    assert same, "plan_steps: the same ids gave another plan; draw from keyed noise (digenrl.diffusion.noise), and keep no state"
    part = algorithm.plan_steps(samples[GROUP:], STEPS)
    assert torch.equal(part.trained, trained[GROUP:]), "plan_steps: a sample's plan depends on the others of its micro-batch"
    return plan


def _check_advantages(algorithm: Algorithm) -> list[GroupAdvantages]:
    def of(total: np.ndarray) -> list[GroupAdvantages]:
        return algorithm.advantages(RewardTable(total=total, by_reward={"jpeg": total}))

    groups = of(REWARDS)
    assert len(groups) == len(REWARDS), "advantages: one for each group"
    for group in groups:
        assert len(group.values) == len(group.kept) == GROUP, "advantages: values and kept are one for each sample"
        assert np.isfinite(group.values).all(), "advantages: not finite"
    broken = REWARDS.copy()
    broken[0, 1] = np.nan
    holed = of(broken)[0]
    assert not holed.kept[1], "advantages: a sample without a valid reward is kept"
    assert np.isfinite(holed.values).all(), "advantages: an invalid reward spoils its group"
    equal = of(np.full_like(REWARDS, 0.35))
    assert not any(group.values.any() for group in equal), "advantages: equal rewards must give exactly 0"
    return groups


def _check_training(algorithm: Algorithm, recipe: Recipe, groups: Sequence[GroupAdvantages]) -> dict[str, float]:
    adapter: ModelAdapter = component_class("model", recipe.model.type, where="model.type").load(recipe, torch.device("cpu"))
    seen = _Recorder(algorithm)
    policy = Policy(adapter, recipe, needs_reference=algorithm.needs_reference)
    schedule = adapter.noise_schedule(STEPS, recipe.rollout.height, recipe.rollout.width)
    generator, trainer = Generator(policy, seen, recipe, schedule), Trainer(policy, seen, recipe, schedule)
    text: Conditioning = generator.encode(PROMPTS)
    rows = torch.arange(len(PROMPTS)).repeat_interleave(GROUP)
    trajectory = generator.generate(_samples(), text, rows, policy_version=0)
    trainer.accumulate(trajectory, text, groups)
    report = trainer.optimizer_step()
    assert report.outcome is StepOutcome.APPLIED, f"the step was {report.outcome.value}: its gradient is zero or not finite"
    assert report.metrics["grad_norm"] > 0, "the loss has no gradient"
    for inputs, out in seen.calls:
        _check_loss(algorithm, inputs, out)
    return report.metrics


def _check_loss(algorithm: Algorithm, inputs: LossInputs, out: LossOutputs) -> None:
    count = len(inputs.log_prob)
    for name, values in out.metrics.items():
        assert values.shape == (count,) and not values.requires_grad, f"loss: metric {name} is [pairs], without a gradient"
    if count > 1:
        first = algorithm.loss(_rows(inputs, slice(0, 1))).loss
        assert torch.allclose(first, out.loss.detach()[:1], rtol=1e-5, atol=1e-6), (
            "loss: the loss of a pair depends on the pairs beside it, which are an accident of packing"
        )
    if not algorithm.needs_reference:
        log_prob = inputs.log_prob.clone().requires_grad_()
        mean = inputs.mean.clone().requires_grad_()
        nothing = replace(inputs, log_prob=log_prob, mean=mean, advantages=torch.zeros_like(inputs.advantages))
        loss = algorithm.loss(nothing).loss.sum()
        found = torch.autograd.grad(loss, (log_prob, mean), allow_unused=True) if loss.requires_grad else ()
        assert not any(each is not None and bool(each.any()) for each in found), (
            "loss: pairs of advantage 0 have a gradient, and they are not passed through the network without needs_reference"
        )


def _rows(inputs: LossInputs, rows: slice) -> LossInputs:
    given = {each.name: getattr(inputs, each.name) for each in fields(inputs)}
    kept: dict[str, Any] = {name: None if value is None else value.detach()[rows] for name, value in given.items()}
    return LossInputs(**kept)


class _Recorder:
    """The algorithm, with what its loss was given and has answered."""

    def __init__(self, algorithm: Algorithm) -> None:
        self.dynamics = algorithm.dynamics
        self.log_prob_reduction = algorithm.log_prob_reduction
        self.needs_reference = algorithm.needs_reference
        self.plan_steps = algorithm.plan_steps
        self.advantages = algorithm.advantages
        self.calls: list[tuple[LossInputs, LossOutputs]] = []
        self._algorithm = algorithm

    def loss(self, pairs: LossInputs) -> LossOutputs:
        """See Algorithm.loss."""
        out = self._algorithm.loss(pairs)
        self.calls.append((_rows(pairs, slice(None)), out))
        return out


def _recipe(model: Path, algorithm: Mapping[str, Any], rollout: Mapping[str, Any]) -> Recipe:
    sizes = {
        "prompts_per_step": len(PROMPTS),
        "num_generations": GROUP,
        "num_inference_steps": STEPS,
        "height": 32,
        "width": 32,
        "forward_batch_size": GROUP,
    }
    return recipe_from_plain(
        {
            "run": {"device": "cpu"},
            "model": {"type": "sd3", "path": str(model), "max_sequence_length": 8},
            "data": {"prompts": "builtin:shapes/train.jsonl"},
            "rollout": {**sizes, **rollout},
            "algorithm": dict(algorithm),
            "rewards": [{"type": "jpeg"}],
            "train": {"steps": 1, "learning_rate": 1e-3, "timestep_batch_size": GROUP},
        }
    )
