"""Objectives on log-probabilities. All return one value per pair; sums and divisors are the trainer's."""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_policy_loss(ratio: Tensor, advantages: Tensor, clip_range: tuple[float, float]) -> Tensor:
    """PPO's pessimistic bound max(-A r, -A clip(r, 1 - low, 1 + high)) (arXiv 1707.06347, equation 7). Returns [N].

    ratio: [N]. advantages: [N], or [N, K] for the sum of K bounds.
    """
    low, high = clip_range
    if advantages.ndim == 2:
        ratio = ratio.unsqueeze(1)
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
    return loss.sum(1) if advantages.ndim == 2 else loss


def clipped(ratio: Tensor, advantages: Tensor, clip_range: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Whether the clip has taken the gradient away, below 1 - low and above 1 + high: two of [N] float, for the metrics.

    With advantages [N, K], the share of the K bounds whose gradient is gone.
    """
    low, high = clip_range
    if advantages.ndim == 2:
        ratio = ratio.unsqueeze(1)
    below = ((advantages < 0) & (ratio < 1 - low)).float()
    above = ((advantages > 0) & (ratio > 1 + high)).float()
    return (below.mean(1), above.mean(1)) if advantages.ndim == 2 else (below, above)
