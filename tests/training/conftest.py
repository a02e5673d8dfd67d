"""One slow, obvious policy gradient to compare the trainer with, written from the papers' formulas and sharing no code."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from digenrl.diffusion.trajectory import Trajectory


def plain_gradient(
    rig: Any,
    trajectory: Trajectory,
    advantages: list[list[float]],
    *,
    clip: float = 1e-4,
    beta: float = 0.0,
    left_out: frozenset[tuple[int, int]] = frozenset(),
) -> dict[str, Tensor]:
    """Gradient of the sum of the losses of all pairs (row, slot) but those left out, by parameter name.

    One forward pass of the bare transformer for all pairs together; Flow-GRPO's equations as the paper has them.
    """
    group_size = len(trajectory.samples) // len(advantages)
    pairs = [
        (row, slot)
        for row in range(len(trajectory.samples))
        for slot in range(trajectory.denoising_steps.shape[1])
        if (row, slot) not in left_out
    ]
    rows, slots = torch.tensor(pairs).T
    a = torch.tensor([advantages[row // group_size][row % group_size] for row, _ in pairs]).clamp(-5, 5)
    text = rig.conditioning().tensors
    prompt = torch.tensor([trajectory.samples[row].prompt for row, _ in pairs])
    step = trajectory.denoising_steps[rows, slots]
    s, s_next = trajectory.sigmas[step], trajectory.sigmas[step + 1]
    x, x_next = trajectory.latents[rows, slots], trajectory.next_latents[rows, slots]
    b = 0.7 * (s / (1 - torch.where(s == 1, trajectory.sigmas[1], s))).sqrt()
    std = b * (s - s_next).sqrt()

    def mean_of(network: Any) -> Tensor:
        v = network(
            hidden_states=x,
            timestep=s * 1000,
            encoder_hidden_states=text["prompt_embeds"][prompt],
            pooled_projections=text["pooled_prompt_embeds"][prompt],
            return_dict=False,
        )[0]
        each = (slice(None), None, None, None)
        score = -(x + (1 - s)[each] * v) / s[each]
        return x + (s_next - s)[each] * (v - 0.5 * b.square()[each] * score)

    def log_prob(mean: Tensor) -> Tensor:
        z = (x_next - mean) / std.view(-1, 1, 1, 1)
        return (-0.5 * z.square()).mean((1, 2, 3)) - std.log() - 0.5 * math.log(2 * math.pi)

    network = rig.adapter.transformer
    mean = mean_of(network)
    ratio = (log_prob(mean) - trajectory.log_probs[rows, slots]).exp()
    loss = torch.maximum(-a * ratio, -a * ratio.clamp(1 - clip, 1 + clip)).sum()
    if beta:
        with torch.no_grad(), rig.policy.reference():
            reference = mean_of(rig.adapter.transformer)
        loss = loss + beta * ((mean - reference).square().mean((1, 2, 3)) / (2 * std.square())).sum()
    names = list(rig.policy.parameters)
    gradients = torch.autograd.grad(loss, [rig.policy.parameters[name] for name in names], allow_unused=True)
    return {
        name: torch.zeros_like(rig.policy.parameters[name]) if g is None else g for name, g in zip(names, gradients, strict=True)
    }


def relative_error(ours: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Norm of the difference over the norm, of all gradients as one vector."""
    flat = [torch.cat([tensors[name].flatten() for name in wanted]).double() for tensors in (ours, wanted)]
    return float((flat[0] - flat[1]).norm() / flat[1].norm())


@pytest.fixture(scope="session")
def plain() -> Callable[..., dict[str, Tensor]]:
    """See plain_gradient."""
    return plain_gradient


@pytest.fixture(scope="session")
def rel() -> Callable[..., float]:
    """See relative_error."""
    return relative_error
