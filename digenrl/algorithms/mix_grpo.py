"""MixGRPO: noise and training in a window that slides over the denoising steps, ODE outside (Li et al., arXiv 2507.21802).

The window {c, ..., c + w - 1} is one for all samples of an RL step, and a function of its number and the run's seed alone
(windows.py). Steps in it are SDE steps and are trained, all of them; the others are Euler steps. With ``flash_fraction`` f
(MixGRPO-Flash) the n steps after the window are taken by DPM-Solver++ (second order, midpoint) in max(1, int(n f)) steps.
Advantages and objective: policy_gradient.py.

Deviations from the paper and from Tencent-Hunyuan/MixGRPO:
 1. The window is never empty and never shorter: its last place ends where the range ends. Theirs is cut off at the end, and is
    empty for a whole interval when its first step comes to lie on it.
 2. The range is all steps but the last; theirs leaves out the last two. The last step is never in a window.
 3. Flash always ends at sigma 0. Theirs re-spaces to so many points, one more than steps, and stops at a noise level above 0
    where that is a single point: with late windows. Ours visits points of the model's own sigma table.
 4. ``random`` draws from the run's seed; theirs draws per rank, without one.
 5. ``wrap`` begins anew at the start of the range. Theirs goes back to step 0, wherever it began.
 6. Without their KL to the rollout's policy, whose coefficient is 0 in their recipes, and their strategy ``all``, which is
    dance_grpo; samples of advantage 0 count in the divisor Z.
 7. A group of equal rewards has advantage exactly 0; theirs divides a rounding error by 1e-8. ``advantage_trim``: where the
    rewards that are left are equal, nothing is trimmed.
"""

from __future__ import annotations

from collections.abc import Sequence

from digenrl.algorithms.policy_gradient import PolicyGradient
from digenrl.algorithms.timesteps import random_start, window_steps
from digenrl.algorithms.windows import window_start
from digenrl.config.settings.algorithms import MixGRPOSettings
from digenrl.config.settings.policy_gradient import share_of_steps
from digenrl.diffusion.sampler import StepPlan
from digenrl.ids import SampleId


class MixGRPO(PolicyGradient[MixGRPOSettings]):
    """See the module's docstring."""

    def plan_steps(self, samples: Sequence[SampleId], num_inference_steps: int) -> StepPlan:
        """See Algorithm.plan_steps."""
        settings = self.settings
        starts = [self.window_start(sample.step, num_inference_steps) for sample in samples]
        tail: tuple[int, ...] = ()
        if settings.flash_fraction is not None:
            assert len(set(starts)) == 1, "the samples of a micro-batch are of one RL step"
            tail = flash_tail(starts[0] + settings.sde_window_size, num_inference_steps, settings.flash_fraction)
        return window_steps(starts, settings.sde_window_size, num_inference_steps, self._noise_level, tail=tail)

    def window_start(self, step: int, num_inference_steps: int) -> int:
        """First denoising step of the window of an RL step."""
        settings = self.settings
        low, high = settings.window_range(num_inference_steps)
        if settings.window_schedule == "random":
            return random_start(low, high, settings.sde_window_size, step // settings.window_steps, seed=self._seed)
        return window_start(step, settings, low, high)


def flash_tail(start: int, num_inference_steps: int, fraction: float) -> tuple[int, ...]:
    """Indices of the sigma table that the steps after the window visit, evenly spaced from ``start`` to sigma 0."""
    left = num_inference_steps - start
    steps = max(1, share_of_steps(left, fraction))
    return tuple(start + number * left // steps for number in range(steps + 1))
