"""DanceGRPO: policy gradients for visual generation (Xue et al., arXiv 2505.07818).

Each denoising step is an action x' = mu + eta sqrt(-dt) z with the same noise eta at every step (``dynamics: dance_sde``). Each
sample trains a random choice of int((T - 1) f) of the steps before the last one. A = (R - mean) / (std + 1e-8) with the unbiased
std, one for each reward, whose clipped objectives are summed with the rewards' weights. With ``best_of_n`` only the ceil(n / 2)
samples of the highest and the floor(n / 2) of the lowest weighted sum of advantages are trained; advantages are those of the
whole group. The objective: policy_gradient.py.

Deviations from the paper and from XueZeyue/DanceGRPO:
 1. best_of_n chooses within each prompt's group. Their code chooses among all rows of a rank, which is the same with one prompt
    per rank only.
 2. The last denoising step is deterministic: the final latents are its predicted image, which is what they decode.
 3. A group of equal rewards has advantage exactly 0; theirs divides a rounding error by 1e-8.
 4. A sample whose reward fails is left out; their HunyuanVideo script counts it as -1.
 5. The divisor is Z, the number of pairs that are trained, not accumulation steps x timesteps.
 6. The model's own sigma table is used; theirs shifts linspace(1, 0, T + 1) by 3 for every image model, and truncates the
    network's timestep to an integer.
 7. One noise for all samples of a prompt is ``rollout.init_same_noise``; theirs is one for all prompts of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from digenrl.algorithms.advantages import best_of_n
from digenrl.algorithms.base import GroupAdvantages, RewardTable
from digenrl.algorithms.policy_gradient import PolicyGradient
from digenrl.algorithms.timesteps import random_steps
from digenrl.config.settings.algorithms import DanceGRPOSettings
from digenrl.diffusion.sampler import StepPlan
from digenrl.ids import SampleId


class DanceGRPO(PolicyGradient[DanceGRPOSettings]):
    """See the module's docstring."""

    def plan_steps(self, samples: Sequence[SampleId], num_inference_steps: int) -> StepPlan:
        """See Algorithm.plan_steps."""
        count = self.settings.num_trained_steps(num_inference_steps)
        return random_steps(count, samples, num_inference_steps, self._noise_level, seed=self._seed)

    def advantages(self, rewards: RewardTable) -> list[GroupAdvantages]:
        """See Algorithm.advantages."""
        groups, count = super().advantages(rewards), self.settings.best_of_n
        if count is None:
            return groups
        weights = np.array(list(self._weights.values()))
        scores = [group.values @ weights if group.values.ndim == 2 else group.values for group in groups]
        return [best_of_n(group, count, score) for group, score in zip(groups, scores, strict=True)]
