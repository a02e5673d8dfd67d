"""Held-out evaluation: the ODE sampler on averaged weights, the same noise every time, every prompt counted once.

Invariant: parameters, optimizer, average and random state are untouched, also when something raises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from digenrl.config.schema import EvalSection, Recipe
from digenrl.data.prompts import Prompt
from digenrl.diffusion.dynamics import ODE
from digenrl.diffusion.noise import Purpose, normal
from digenrl.diffusion.sampler import StepPlan, denoise
from digenrl.errors import RunFailed
from digenrl.ids import SampleId
from digenrl.models.base import Conditioning, Guidance
from digenrl.rewards.compose import Effort, Rewards
from digenrl.training.ema import Ema
from digenrl.training.policy import Policy
from digenrl.workers.generator import encode_prompts, text_batch_size
from digenrl.workers.scorer import Scorer


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Rewards on the held-out prompts, one image each."""

    images: NDArray[np.uint8]
    """[n, H, W, 3], of videos [n, F, H, W, 3], of the first n prompts: all N of them, or those that are to be saved."""
    rewards: NDArray[np.float64]
    """[N], the weighted sum; NaN where invalid."""
    part_values: Mapping[str, NDArray[np.float64]]
    """``<reward>`` and ``<reward>/<part>`` -> [N], of those that are finite somewhere."""
    efforts: Mapping[str, Effort] = field(default_factory=dict)
    """What scoring took, by reward."""

    @property
    def parts(self) -> dict[str, float]:
        """Mean of the finite values of every reward and part."""
        return {name: float(np.nanmean(values)) for name, values in self.part_values.items()}

    @property
    def reward(self) -> float:
        """Mean of the valid rewards."""
        return float(np.nanmean(self.rewards))

    @property
    def reward_std(self) -> float:
        """Standard deviation of the valid rewards over prompts."""
        return float(np.nanstd(self.rewards))


class EvaluationSampler:
    """Draws the evaluation's images, as latents, where the policy is."""

    def __init__(self, policy: Policy, ema: Ema | None, recipe: Recipe, section: EvalSection) -> None:
        self._policy = policy
        self._ema = ema
        self._recipe = recipe
        self._section = section

    def generate(self, conditioning: Conditioning, numbers: Sequence[int] | None = None) -> Tensor:
        """Final latents [N, *latent] of N encoded prompts, with the averaged weights (the trained ones without EMA).

        numbers: places of the prompts among all held-out ones, which say what noise each starts from; 0..N-1 if None.
        """
        if self._ema is None:
            return self._generate(conditioning, numbers)
        with self._ema.swapped():
            return self._generate(conditioning, numbers)

    @torch.no_grad()
    def _generate(self, conditioning: Conditioning, numbers: Sequence[int] | None) -> Tensor:
        adapter, rollout, section = self._policy.adapter, self._recipe.rollout, self._section
        schedule = adapter.noise_schedule(section.num_inference_steps, rollout.height, rollout.width)
        shape = adapter.latent_shape(rollout.height, rollout.width, rollout.num_frames)
        initial = torch.stack([normal(shape, section.seed, Purpose.EVALUATION, i) for i in numbers or range(len(conditioning))])
        guidance = Guidance(section.true_cfg_scale, section.guidance_scale)

        def predict(latents: Tensor, timesteps: Tensor, rows: Tensor) -> Tensor:
            return adapter.predict(latents, timesteps, conditioning.select(rows), guidance)

        plan = StepPlan(
            noise_levels=torch.zeros(len(initial), schedule.num_steps), trained=torch.empty(len(initial), 0, dtype=torch.int64)
        )
        size = rollout.forward_batch_size
        result = denoise(predict, initial.to(adapter.device), schedule, plan, ODE(), _no_noise, forward_batch_size=size)
        return result.final_latents


class Evaluator:
    """Evaluates one policy on one prompt file, all in one process."""

    def __init__(
        self, policy: Policy, ema: Ema | None, scorer: Scorer, recipe: Recipe, section: EvalSection, prompts: Sequence[Prompt]
    ) -> None:
        self._policy = policy
        self._sampler = EvaluationSampler(policy, ema, recipe, section)
        self._scorer = scorer
        self._text_batch_size = text_batch_size(recipe)
        self.prompts = tuple(prompts)

    def evaluate(self) -> Evaluation:
        """Generate one image for every prompt and score it."""
        conditioning = encode_prompts(self._policy.adapter, self.prompts, self._text_batch_size)
        latents = self._sampler.generate(conditioning)
        scored = self._scorer.score(evaluation_samples(self._policy.version, len(self.prompts)), self.prompts, latents)
        return summarise(scored.images, scored.rewards)


def evaluation_samples(policy_version: int, count: int) -> list[SampleId]:
    """Ids of an evaluation's images."""
    return [SampleId(policy_version, index, 0) for index in range(count)]


def summarise(images: NDArray[np.uint8], rewards: Rewards) -> Evaluation:
    """Means over all prompts. Raises RunFailed when no reward is valid."""
    if not np.isfinite(rewards.totals).any():
        raise RunFailed(
            "No evaluation image has a valid reward.",
            why="All images or all rewards are NaN or infinite.",
            fix="Look at the pictures of the last steps; the training has diverged, or the reward is broken.",
        )
    return Evaluation(
        images=images,
        rewards=rewards.totals,
        part_values={name: np.where(np.isfinite(v), v, np.nan) for name, v in rewards.parts.items() if np.isfinite(v).any()},
        efforts=rewards.efforts,
    )


def _no_noise(_step: int, _rows: Tensor) -> Tensor:
    raise AssertionError("the ODE asks for no noise")
