"""Flow-GRPO: online policy gradients for flow-matching models (Liu et al., arXiv 2505.05470).

Each denoising step is an action. ``dynamics`` (diffusion/dynamics.py) says how it is drawn and what its log-probability is:
log N(x'; mu_theta, tau^2 I) for the SDEs, tau the transition standard deviation, and -(x' - mu_theta)^2 for Flow-CPS. With
advantages A of the prompt's group and r = exp(log p_theta - log p_old):

    L = sum over pairs of  max(-A r, -A clip(r, 1 - c, 1 + c)) + beta KL(theta || reference)        divided by Z once

Deviations from the paper and from yifan123/flow_grpo:
 1. sigma_0 guard with min(s, sigma_1) instead of a test for exactly 1 (same numbers on SD3, finite on UniPC schedules).
 2. The last denoising step is deterministic; flow_grpo adds noise there, which stays in the image and is not trained.
 3. The KL is the exact Gaussian one by default, for every dynamics; flow_grpo leaves |dt| out (``kl_form: flow_grpo``, for
    ``dynamics: flow_sde`` alone), and GenRL leaves 2 tau^2 out for Flow-CPS.
 4. The divisor is Z, the number of pairs of valid samples, not a fixed number of accumulation steps.
 5. Groups are keyed by prompt index, so two equal prompts in a step stay two groups.
 6. With ``timestep_selection: window`` this is Flow-GRPO-Fast; the window is one per RL step. flow_grpo's other form of it,
    one deterministic prefix per prompt that branches at the window, is not built.
 7. ``dynamics: cps`` is Flow-CPS (arXiv 2509.05952). Its mean is the Euler step plus a multiple of the predicted noise: the
    peers' formula to rounding, and the ODE step bit for bit at noise level 0, where theirs is it to rounding.
 8. ``dynamics: dance_sde`` is DanceGRPO's step alone (arXiv 2505.07818), under this objective. With the last step deterministic
    the final latents are that step's predicted image, which is what DanceGRPO decodes. MixGRPO's copy of that step leaves the
    log-probability's constants out; the ratio is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from digenrl.algorithms.advantages import group_advantages
from digenrl.algorithms.base import GroupAdvantages, LossInputs, LossOutputs
from digenrl.algorithms.objectives import clipped, clipped_policy_loss
from digenrl.algorithms.timesteps import first_steps, random_steps, random_window
from digenrl.config.schema import Recipe
from digenrl.config.settings.algorithms import FlowGRPOSettings
from digenrl.diffusion.dynamics import DYNAMICS, gaussian_kl
from digenrl.diffusion.sampler import StepPlan
from digenrl.ids import SampleId


class FlowGRPO:
    """See the module's docstring."""

    def __init__(self, settings: FlowGRPOSettings, recipe: Recipe) -> None:
        self.settings = settings
        self.dynamics = DYNAMICS[settings.dynamics]()
        self.log_prob_reduction: Literal["mean", "sum"] = settings.log_prob_reduction
        self.needs_reference = settings.kl_beta > 0
        self._noise_level = recipe.rollout.noise_level
        self._seed = recipe.run.seed

    def plan_steps(self, samples: Sequence[SampleId], num_inference_steps: int) -> StepPlan:
        """See Algorithm.plan_steps."""
        settings, level = self.settings, self._noise_level
        count = settings.num_trained_steps(num_inference_steps)
        if settings.timestep_selection == "first":
            return first_steps(count, len(samples), num_inference_steps, level)
        if settings.timestep_selection == "random":
            return random_steps(count, samples, num_inference_steps, level, seed=self._seed)
        low, high = settings.window_range(num_inference_steps)
        return random_window(count, low, high, samples, num_inference_steps, level, seed=self._seed)

    def advantages(self, rewards: NDArray[np.float64]) -> list[GroupAdvantages]:
        """See Algorithm.advantages."""
        settings = self.settings
        return group_advantages(
            rewards,
            std=settings.advantage_std,
            ddof=settings.advantage_ddof,
            eps=settings.advantage_eps,
            skip_zero_variance=settings.skip_zero_variance,
        )

    def loss(self, pairs: LossInputs) -> LossOutputs:
        """See Algorithm.loss."""
        settings = self.settings
        clip = settings.effective_clip_range
        advantages = pairs.advantages.clamp(-settings.adv_clip_max, settings.adv_clip_max)
        log_ratio = pairs.log_prob - pairs.old_log_prob
        ratio = log_ratio.exp()
        loss = clipped_policy_loss(ratio, advantages, clip)
        metrics = {
            "ratio": ratio.detach(),
            "clip_fraction": clipped(ratio.detach(), advantages, clip),
            # The low-variance estimator of KL(old || new), never negative: (r - 1) - log r.
            "approx_kl": (ratio - 1 - log_ratio).detach(),
            "logprob_abs_diff": log_ratio.detach().abs(),
        }
        if pairs.reference_mean is not None:
            std = pairs.transition_std
            if settings.kl_form == "flow_grpo":
                std = std / (-pairs.dt).sqrt()
            kl = gaussian_kl(pairs.mean, pairs.reference_mean, std)
            loss = loss + settings.kl_beta * kl
            metrics["kl_reference"] = kl.detach()
        return LossOutputs(loss=loss, metrics=metrics)
