"""DDIM's step of a model that predicts noise, as a Gaussian: DDPO's policy (Black et al., arXiv 2305.13301).

With a_t the cumulative alpha of a timestep, x = sqrt(a_t) x_0 + sqrt(1 - a_t) e, and eta from 0 (deterministic) to 1:

    tau = eta sqrt((1 - a') / (1 - a_t) (1 - a_t / a'))        mu = sqrt(a') x0_hat + sqrt(1 - a' - tau^2) e_hat

No built-in family predicts noise: the trainer and the sampler are for flow models, and refuse ``dynamics: ddim``.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from digenrl.diffusion.dynamics import StepDistribution


def ddim_step(
    x: Tensor,
    output: Tensor,
    alpha: Tensor,
    alpha_next: Tensor,
    eta: float,
    prediction: Literal["epsilon", "sample", "v_prediction"] = "epsilon",
) -> StepDistribution:
    """The distribution of x' at cumulative alpha ``alpha_next``. x, output: [B, *latent]; alpha, alpha_next: [B], rising.

    Where alpha_next is alpha (DDPO's last step), the standard deviation is 0 and there is no log-probability to train on.
    """
    a, b = _rows(alpha, x), _rows(alpha_next, x)
    match prediction:
        case "epsilon":
            noise = output
            image = (x - (1 - a).sqrt() * noise) / a.sqrt()
        case "sample":
            image = output
            noise = (x - a.sqrt() * image) / (1 - a).sqrt()
        case "v_prediction":
            image = a.sqrt() * x - (1 - a).sqrt() * output
            noise = a.sqrt() * output + (1 - a).sqrt() * x
    tau = eta * ((1 - b) / (1 - a) * (1 - a / b)).clamp(min=0).sqrt()
    mean = b.sqrt() * image + (1 - b - tau.square()).clamp(min=0).sqrt() * noise
    return StepDistribution(mean, torch.flatten(tau))


def ddim_next_timestep(timestep: int, num_inference_steps: int, num_train_timesteps: int = 1000) -> int:
    """The timestep that DDPO steps to: one interval down, and 0 where that is below."""
    return max(0, timestep - num_train_timesteps // num_inference_steps)


def _rows(per_row: Tensor, like: Tensor) -> Tensor:
    return per_row.view(-1, *(1 for _ in like.shape[1:]))
