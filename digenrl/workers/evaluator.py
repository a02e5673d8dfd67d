"""Held-out evaluation: the ODE sampler on averaged weights, the same noise every time, every prompt counted once.

Invariant: parameters, optimizer, average and random state are untouched, also when something raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
from digenrl.models.base import Guidance
from digenrl.training.ema import Ema
from digenrl.training.policy import Policy
from digenrl.workers.generator import encode_prompts
from digenrl.workers.scorer import Scorer


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Rewards on the held-out prompts, one image each."""

    images: NDArray[np.uint8]
    """[N, H, W, 3], in the order of the prompts."""
    rewards: NDArray[np.float64]
    """[N], the weighted sum; NaN where invalid."""
    parts: dict[str, float]
    """Mean of every reward and part."""

    @property
    def reward(self) -> float:
        """Mean of the valid rewards."""
        return float(np.nanmean(self.rewards))


class Evaluator:
    """Evaluates one policy on one prompt file."""

    def __init__(
        self, policy: Policy, ema: Ema | None, scorer: Scorer, recipe: Recipe, section: EvalSection, prompts: Sequence[Prompt]
    ) -> None:
        self._policy = policy
        self._ema = ema
        self._scorer = scorer
        self._recipe = recipe
        self._section = section
        self.prompts = tuple(prompts)

    def evaluate(self) -> Evaluation:
        """Generate one image for every prompt with the averaged weights (the trained ones without EMA) and score it."""
        if self._ema is None:
            return self._evaluate()
        with self._ema.swapped():
            return self._evaluate()

    @torch.no_grad()
    def _evaluate(self) -> Evaluation:
        adapter, rollout, section = self._policy.adapter, self._recipe.rollout, self._section
        size = rollout.forward_batch_size
        conditioning = encode_prompts(adapter, self.prompts, size)
        schedule = adapter.noise_schedule(section.num_inference_steps, rollout.height, rollout.width)
        shape = adapter.latent_shape(rollout.height, rollout.width)
        initial = torch.stack([normal(shape, section.seed, Purpose.EVALUATION, i) for i in range(len(self.prompts))])
        guidance = Guidance(section.true_cfg_scale, section.guidance_scale)

        def predict(latents: Tensor, timesteps: Tensor, rows: Tensor) -> Tensor:
            return adapter.predict(latents, timesteps, conditioning.select(rows), guidance)

        plan = StepPlan(
            noise_levels=torch.zeros(len(initial), schedule.num_steps), trained=torch.empty(len(initial), 0, dtype=torch.int64)
        )
        result = denoise(predict, initial.to(adapter.device), schedule, plan, ODE(), _no_noise, forward_batch_size=size)
        samples = [SampleId(self._policy.version, index, 0) for index in range(len(self.prompts))]
        scored = self._scorer.score(samples, self.prompts, result.final_latents)
        if not np.isfinite(scored.rewards.totals).any():
            raise RunFailed(
                "No evaluation image has a valid reward.",
                why="All images or all rewards are NaN or infinite.",
                fix="Look at the pictures of the last steps; the training has diverged, or the reward is broken.",
            )
        return Evaluation(
            images=scored.images,
            rewards=scored.rewards.totals,
            parts={name: float(np.nanmean(v)) for name, v in scored.rewards.parts.items() if np.isfinite(v).any()},
        )


def _no_noise(_step: int, _rows: Tensor) -> Tensor:
    raise AssertionError("the ODE asks for no noise")
