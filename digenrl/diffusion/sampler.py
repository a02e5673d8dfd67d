"""The denoising loop: from first noise to final latents, keeping the steps that are trained.

Invariants: step arithmetic and stored tensors are float32; every forward pass has exactly ``forward_batch_size`` rows;
a deterministic step before the tail is diffusers' Euler step bit for bit; a log-probability is computed only where noise was
added.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from digenrl.diffusion.batching import row_batches
from digenrl.diffusion.dpm_solver import solve
from digenrl.diffusion.dynamics import Dynamics, StepDistribution
from digenrl.diffusion.noise_schedule import NoiseSchedule

Predict = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(latents [N, *latent], timesteps [N], rows [N] int64 of the samples) -> velocity [N, *latent] float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Which denoising steps of which sample are noisy, and which are trained."""

    noise_levels: Tensor
    """[B, T] float32 on the CPU; 0 is a deterministic step."""
    trained: Tensor
    """[B, S] int64 on the CPU, ascending in each row; every one of them is noisy."""
    tail: tuple[int, ...] = ()
    """Indices of the sigma table, ascending to T, that DPM-Solver++ visits instead of all steps from the first of them on;
    empty: there is no such tail."""

    def __post_init__(self) -> None:
        steps = self.noise_levels.shape[1]
        if self.tail:
            ascends = all(a < b for a, b in itertools.pairwise(self.tail))
            assert ascends and self.tail[0] > 0 and self.tail[-1] == steps, "a tail goes from inside the schedule to sigma 0"
            assert not bool(self.noise_levels[:, self.tail[0] :].any()), "a tail has no noise"
        assert self.trained.numel() == 0 or bool((self.noise_levels.gather(1, self.trained) > 0).all()), (
            "a step without noise has no log-probability to train on"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Denoised:
    """Result of the loop; B samples, S trained steps."""

    latents: Tensor
    """[B, S, *latent], x before each trained step."""
    next_latents: Tensor
    """[B, S, *latent], x after it."""
    log_probs: Tensor
    """[B, S]."""
    final_latents: Tensor
    """[B, *latent]."""


@torch.no_grad()
def denoise(
    predict: Predict,
    initial: Tensor,
    schedule: NoiseSchedule,
    plan: StepPlan,
    dynamics: Dynamics,
    sde_noise: Callable[[int, Tensor], Tensor],
    *,
    forward_batch_size: int,
    log_prob_reduction: Literal["mean", "sum"] = "mean",
) -> Denoised:
    """Run all denoising steps.

    initial: [B, *latent] float32 on the model's device. sde_noise(step, rows [n]) -> [n, *latent] on the CPU, asked only for
    rows that are noisy at that step.
    """
    x = initial
    count, trained_steps = plan.trained.shape
    latents = x.new_zeros((count, trained_steps, *x.shape[1:]))
    next_latents, log_probs = torch.zeros_like(latents), x.new_zeros((count, trained_steps))
    sigmas = schedule.sigmas.to(x.device)
    for step in range(plan.tail[0] if plan.tail else schedule.num_steps):
        velocity = _velocity(predict, x, schedule.timesteps[step], forward_batch_size)
        levels = plan.noise_levels[:, step].to(x.device)
        sigma, sigma_next = sigmas[step].expand(count), sigmas[step + 1].expand(count)
        distribution = dynamics.step(x, velocity, sigma, sigma_next, sigmas[1], levels)
        x_next = distribution.mean
        noisy = (plan.noise_levels[:, step] > 0).nonzero().flatten()
        if len(noisy):
            noise = sde_noise(step, noisy).to(x.device)
            std = distribution.transition_std[noisy.to(x.device)].view(-1, *(1 for _ in x.shape[1:]))
            x_next = x_next.index_add(0, noisy.to(x.device), std * noise)
        rows, slots = (plan.trained == step).nonzero(as_tuple=True)
        if len(rows):
            rows, slots = rows.to(x.device), slots.to(x.device)
            latents[rows, slots], next_latents[rows, slots] = x[rows], x_next[rows]
            trained = StepDistribution(distribution.mean[rows], distribution.transition_std[rows])
            log_probs[rows, slots] = dynamics.log_prob(x_next[rows], trained, log_prob_reduction)
        x = x_next
    if plan.tail:
        x = solve(lambda at, step: _velocity(predict, at, schedule.timesteps[step], forward_batch_size), x, sigmas, plan.tail)
    return Denoised(latents=latents, next_latents=next_latents, log_probs=log_probs, final_latents=x)


def _velocity(predict: Predict, x: Tensor, timestep: Tensor, size: int) -> Tensor:
    parts = []
    for batch in row_batches(len(x), size):
        rows = batch.rows.to(x.device)
        parts.append(predict(x[rows], timestep.to(x.device).expand(size), batch.rows)[: batch.count])
    return torch.cat(parts)
