"""What Flow-GRPO, DanceGRPO and MixGRPO share: group advantages, the clipped objective, the KL to the starting model.

With advantages A of the prompt's group and r = exp(log p_theta - log p_old) of a step:

    L = sum over pairs of  max(-A r, -A clip(r, 1 - low, 1 + high)) + beta KL(theta || reference)    divided by Z once

Of several rewards, ``reward_weighting`` says what is summed with their weights w_k: the rewards; the advantages A_k, each
normalized in its group; or the clipped objectives of A_k. The last is not the one before: where r is outside the clip, a
positive A_k has lost its gradient and a negative one has not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from digenrl.algorithms.advantages import group_advantages, joined_advantages
from digenrl.algorithms.base import GroupAdvantages, LossInputs, LossOutputs, RewardTable
from digenrl.algorithms.objectives import clipped, clipped_policy_loss
from digenrl.config.schema import Recipe
from digenrl.config.settings.policy_gradient import PolicyGradientSettings
from digenrl.diffusion.dynamics import DYNAMICS, gaussian_kl
from digenrl.diffusion.sampler import StepPlan
from digenrl.ids import SampleId

S = TypeVar("S", bound=PolicyGradientSettings)


class PolicyGradient(ABC, Generic[S]):
    """An Algorithm but for ``plan_steps``: which steps are noisy and trained, each algorithm says itself."""

    def __init__(self, settings: S, recipe: Recipe) -> None:
        self.settings = settings
        self.dynamics = DYNAMICS[settings.dynamics]()
        self.log_prob_reduction: Literal["mean", "sum"] = settings.log_prob_reduction
        self.needs_reference = settings.kl_beta > 0
        self._noise_level = recipe.rollout.noise_level
        self._seed = recipe.run.seed
        self._weights = {reward.name: reward.weight for reward in recipe.rewards}

    @abstractmethod
    def plan_steps(self, samples: Sequence[SampleId], num_inference_steps: int) -> StepPlan:
        """See Algorithm.plan_steps."""

    def advantages(self, rewards: RewardTable) -> list[GroupAdvantages]:
        """See Algorithm.advantages."""
        settings = self.settings

        def of(values: NDArray[np.float64]) -> list[GroupAdvantages]:
            return group_advantages(
                values,
                std=settings.advantage_std,
                ddof=settings.advantage_ddof,
                eps=settings.advantage_eps,
                trim=settings.advantage_trim,
                skip_zero_variance=settings.skip_zero_variance,
            )

        if settings.reward_weighting == "reward" or not rewards.by_reward:
            return of(rewards.total)
        valid = np.isfinite(rewards.total)
        each = [of(np.where(valid, rewards.by_reward[name], np.nan)) for name in self._weights]
        return joined_advantages(each, tuple(self._weights.values()), apart=settings.reward_weighting == "loss")

    def loss(self, pairs: LossInputs) -> LossOutputs:
        """See Algorithm.loss."""
        settings = self.settings
        clip = settings.effective_clip_range
        advantages = pairs.advantages.clamp(-settings.adv_clip_max, settings.adv_clip_max)
        if advantages.ndim == 2:
            advantages = advantages * advantages.new_tensor(list(self._weights.values()))
        log_ratio = pairs.log_prob - pairs.old_log_prob
        ratio = log_ratio.exp()
        loss = clipped_policy_loss(ratio, advantages, clip)
        below, above = clipped(ratio.detach(), advantages, clip)
        metrics = {
            "ratio": ratio.detach(),
            "clip_fraction": below + above,
            "clip_fraction_below": below,
            "clip_fraction_above": above,
            # The low-variance estimator of KL(old || new), never negative: (r - 1) - log r.
            "approx_kl": (ratio - 1 - log_ratio).detach(),
            "logprob_abs_diff": log_ratio.detach().abs(),
        }
        if self.needs_reference:
            kl = self._kl(pairs)
            loss = loss + settings.kl_beta * kl
            metrics["kl_reference"] = kl.detach()
        return LossOutputs(loss=loss, metrics=metrics)

    def _kl(self, pairs: LossInputs) -> Tensor:
        """[N]: the divergence from the starting model, per latent element."""
        assert pairs.reference_mean is not None and pairs.reference_velocity is not None, "it was asked for"
        if self.settings.kl_form == "v_based":
            return (pairs.velocity - pairs.reference_velocity).square().flatten(1).mean(1)
        std = pairs.transition_std
        if self.settings.kl_form == "flow_grpo":
            std = std / (-pairs.dt).sqrt()
        return gaussian_kl(pairs.mean, pairs.reference_mean, std)
