"""One denoising step as a Gaussian: mean, the Gaussian's own standard deviation, and log-probability.

Notation: x_sigma = (1 - sigma) x_0 + sigma e, velocity v = e - x_0; a step goes from s to s' with dt = s' - s < 0. Estimates
of image and noise: x0_hat = x - s v, e_hat = x + (1 - s) v. a = ``noise_level``.

Invariants: rollout and training use one object, so both have the same mean, standard deviation and log-probability;
``transition_std`` is the standard deviation of x' given x, never a diffusion coefficient b (for an SDE b = transition_std /
sqrt(-dt)); where a is 0 it is 0, the mean is diffusers' Euler (ODE) step bit for bit, and nothing is trained.
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
    """A way to take one denoising step. Subclass it for the Gaussian ``log_prob``."""

    def step(
        self, x: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor, sigma_1: Tensor, noise_level: Tensor
    ) -> StepDistribution:
        """The distribution of x' at ``sigma_next``.

        x, velocity: [B, *latent] float32. sigma, sigma_next, noise_level: [B] float32. sigma_1: [] or [B], the schedule's
        second value, for the guard at sigma = 1.
        """
        ...

    def log_prob(self, x_next: Tensor, step: StepDistribution, reduction: Literal["mean", "sum"]) -> Tensor:
        """Log-probability of having gone to ``x_next``, per latent element (``mean``) or of the whole latent (``sum``).

        x_next: [B, *latent]. Returns [B], in nats; the rows' ``transition_std`` must be > 0.
        """
        return gaussian_log_prob(x_next, step.mean, step.transition_std, reduction)


class FlowSDE(Dynamics):
    """Flow-GRPO's SDE (arXiv 2505.05470, equation 9): the ODE's marginals with noise of strength a = ``noise_level``.

    b = a sqrt(s / (1 - min(s, sigma_1))). Peers replace s by sigma_1 only where s is exactly 1; with ``min`` a schedule that
    starts at 1 - 1e-6 (Wan's UniPC) does not explode, and nothing changes where it starts at 1.
    """

    def step(
        self, x: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor, sigma_1: Tensor, noise_level: Tensor
    ) -> StepDistribution:
        """See Dynamics.step."""
        return _sde_step(x, velocity, sigma, sigma_next, noise_level * (sigma / (1 - sigma.minimum(sigma_1))).sqrt())


class DanceSDE(Dynamics):
    """DanceGRPO's SDE (arXiv 2505.07818): the ODE's marginals with the same noise b = a at every step; a is their eta.

    Their mu = x + dt v - a^2 score dt / 2 with score = -(x - (1 - s) x0_hat) / s^2 = -e_hat / s is Flow-SDE's mean with this b.
    No 1 / (1 - s), so sigma = 1 is a step like any other.
    """

    def step(
        self, x: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor, sigma_1: Tensor, noise_level: Tensor
    ) -> StepDistribution:
        """See Dynamics.step; ``sigma_1`` is not looked at."""
        return _sde_step(x, velocity, sigma, sigma_next, noise_level)


class FlowCPS(Dynamics):
    """Flow-CPS (arXiv 2509.05952): a share of the noise is replaced so that x' has exactly the noise s' that it should have.

    tau = s' sin(pi a / 2); mu = (1 - s') x0_hat + sqrt(s'^2 - tau^2) e_hat. a = 1 replaces all noise. On the last step s' = 0:
    tau is 0 and mu is x0_hat.
    """

    def step(
        self, x: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor, sigma_1: Tensor, noise_level: Tensor
    ) -> StepDistribution:
        """See Dynamics.step; ``noise_level`` is in [0, 1], ``sigma_1`` is not looked at."""
        angle = noise_level * (math.pi / 2)
        tau = sigma_next * angle.sin()
        # sqrt(s'^2 - tau^2) = s' cos, which loses no digits to the difference; clamped, because at a = 1 it rounds to below 0.
        kept = angle.cos().clamp(min=0)
        # mu as the Euler step plus a multiple of e_hat that is exactly 0 where a is; torch's sqrt(s'^2) is not always s'.
        removed = sigma_next * (kept - 1)
        mean = x * _rows(1 + removed, x) + velocity * _rows(sigma_next - sigma + removed * (1 - sigma), x)
        return StepDistribution(mean, tau)

    def log_prob(self, x_next: Tensor, step: StepDistribution, reduction: Literal["mean", "sum"]) -> Tensor:
        """-(x' - mu)^2, without the Gaussian's 1 / (2 tau^2) and constants, as flow_grpo, Flow-Factory, verl-omni and GenRL.

        See Dynamics.log_prob. Finite at tau = 0 too. Log-ratios are 2 tau^2 times the Gaussian's: hence the smaller clip range.
        """
        squared = (x_next - step.mean).square().flatten(1)
        return -(squared.mean(1) if reduction == "mean" else squared.sum(1))


class ODE(Dynamics):
    """The Euler step of the probability-flow ODE: deterministic, for evaluation."""

    def step(
        self, x: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor, sigma_1: Tensor, noise_level: Tensor
    ) -> StepDistribution:
        """See Dynamics.step; the standard deviation is 0 whatever ``noise_level`` says."""
        dt = sigma_next - sigma
        return StepDistribution(x + velocity * _rows(dt, x), sigma.new_zeros(sigma.shape))


DYNAMICS: dict[str, type[Dynamics]] = {"flow_sde": FlowSDE, "dance_sde": DanceSDE, "cps": FlowCPS, "ode": ODE}


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


def _sde_step(x: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor, b: Tensor) -> StepDistribution:
    """mu = x + dt (v + b^2 / (2 s) e_hat), tau = b sqrt(-dt): Euler-Maruyama with the ODE's marginals, for any b [B]."""
    dt = sigma_next - sigma
    towards_noise = b.square() / (2 * sigma)
    x_factor = 1 + towards_noise * dt
    v_factor = 1 + towards_noise * (1 - sigma)
    mean = x * _rows(x_factor, x) + velocity * _rows(dt * v_factor, x)
    return StepDistribution(mean, b * (-dt).sqrt())


def _rows(per_row: Tensor, like: Tensor) -> Tensor:
    return per_row.view(-1, *(1 for _ in like.shape[1:]))
