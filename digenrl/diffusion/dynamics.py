"""One denoising step as a Gaussian: mean, the Gaussian's own standard deviation, and log-probability.

Notation: x_sigma = (1 - sigma) x_0 + sigma e, velocity v = e - x_0; a step goes from s to s' with dt = s' - s < 0.
``transition_std`` is the standard deviation of x' given x, never the diffusion coefficient b; b = transition_std / sqrt(-dt).
Where it is 0 the step is the Euler (ODE) step exactly, and nothing is trained there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class StepDistribution:
    """The Gaussian of x' given x, for a batch of steps."""

    mean: Tensor
    """[B, *latent] float32."""
    transition_std: Tensor
    """[B] float32, 0 where the step is deterministic."""


class Dynamics(Protocol):
    """A way to take one denoising step."""

    def step(
        self, x: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor, sigma_1: Tensor, noise_level: Tensor
    ) -> StepDistribution:
        """The distribution of x' at ``sigma_next``.

        x, velocity: [B, *latent] float32. sigma, sigma_next, noise_level: [B] float32. sigma_1: [] or [B], the schedule's
        second value, for the guard at sigma = 1.
        """
        ...


class FlowSDE:
    """Flow-GRPO's SDE (arXiv 2505.05470, equation 9): the ODE's marginals with noise of strength a = ``noise_level``.

    b = a sqrt(s / (1 - min(s, sigma_1))). Peers replace s by sigma_1 only where s is exactly 1; with ``min`` a schedule that
    starts at 1 - 1e-6 (Wan's UniPC) does not explode, and nothing changes where it starts at 1.
    """

    def step(
        self, x: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor, sigma_1: Tensor, noise_level: Tensor
    ) -> StepDistribution:
        """See Dynamics.step. With ``noise_level`` 0 the mean is bit for bit diffusers' Euler step."""
        dt = sigma_next - sigma
        b = noise_level * (sigma / (1 - sigma.minimum(sigma_1))).sqrt()
        towards_noise = b.square() / (2 * sigma)
        x_factor = 1 + towards_noise * dt
        v_factor = 1 + towards_noise * (1 - sigma)
        mean = x * _rows(x_factor, x) + velocity * _rows(dt * v_factor, x)
        return StepDistribution(mean, b * (-dt).sqrt())


class ODE:
    """The Euler step of the probability-flow ODE: deterministic, for evaluation."""

    def step(
        self, x: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor, sigma_1: Tensor, noise_level: Tensor
    ) -> StepDistribution:
        """See Dynamics.step; the standard deviation is 0 whatever ``noise_level`` says."""
        dt = sigma_next - sigma
        return StepDistribution(x + velocity * _rows(dt, x), sigma.new_zeros(sigma.shape))


DYNAMICS: dict[str, type[Dynamics]] = {"flow_sde": FlowSDE, "ode": ODE}


def gaussian_log_prob(x_next: Tensor, mean: Tensor, transition_std: Tensor, reduction: Literal["mean", "sum"] = "mean") -> Tensor:
    """Log-density of one step, per latent element (``mean``) or of the whole latent (``sum``). Returns [B], in nats.

    x_next, mean: [B, *latent]. transition_std: [B] > 0. The mean form is flow_grpo's, and the one its clip range is tuned
    for: exp of a difference of means is the D-th root of the density ratio, D = latent elements.
    """
    squared = (x_next - mean).square().flatten(1)
    elements = squared.shape[1]
    per_element = -squared.mean(1) / (2 * transition_std.square()) - transition_std.log() - 0.5 * math.log(2 * math.pi)
    return per_element if reduction == "mean" else per_element * elements


def gaussian_kl(mean: Tensor, reference_mean: Tensor, std: Tensor) -> Tensor:
    """KL divergence per latent element of two Gaussians with the same standard deviation.

    mean, reference_mean: [B, *latent]; std: [B] > 0. Returns [B], in nats per element.
    """
    return (mean - reference_mean).square().flatten(1).mean(1) / (2 * std.square())


def _rows(per_row: Tensor, like: Tensor) -> Tensor:
    return per_row.view(-1, *(1 for _ in like.shape[1:]))
