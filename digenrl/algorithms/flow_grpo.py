"""Flow-GRPO: online policy gradients for flow-matching models (Liu et al., arXiv 2505.05470).

Each denoising step is an action. ``dynamics`` (diffusion/dynamics.py) says how it is drawn and what its log-probability is:
log N(x'; mu_theta, tau^2 I) for the SDEs, tau the transition standard deviation, and -(x' - mu_theta)^2 for Flow-CPS. Advantages
and objective: policy_gradient.py.

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
 8. ``dynamics: dance_sde`` is DanceGRPO's step alone, under this objective; dance_grpo.py is the algorithm.
"""

from __future__ import annotations

from collections.abc import Sequence

from digenrl.algorithms.policy_gradient import PolicyGradient
from digenrl.algorithms.timesteps import first_steps, random_start, random_steps, window_steps
from digenrl.config.settings.algorithms import FlowGRPOSettings
from digenrl.diffusion.sampler import StepPlan
from digenrl.ids import SampleId


class FlowGRPO(PolicyGradient[FlowGRPOSettings]):
    """See the module's docstring."""

    def plan_steps(self, samples: Sequence[SampleId], num_inference_steps: int) -> StepPlan:
        """See Algorithm.plan_steps."""
        settings, level = self.settings, self._noise_level
        count = settings.num_trained_steps(num_inference_steps)
        if settings.timestep_selection == "first":
            return first_steps(count, len(samples), num_inference_steps, level)
        if settings.timestep_selection == "random":
            return random_steps(count, samples, num_inference_steps, level, seed=self._seed)
        low, high = settings.window_range(num_inference_steps)
        starts = [random_start(low, high, count, sample.step, seed=self._seed) for sample in samples]
        return window_steps(starts, count, num_inference_steps, level)
