"""Objectives on log-probabilities. All return one value per pair; sums and divisors are the trainer's."""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_policy_loss(ratio: Tensor, advantages: Tensor, clip_range: float) -> Tensor:
    """PPO's pessimistic bound max(-A r, -A clip(r, 1 - c, 1 + c)) (arXiv 1707.06347, equation 7). All [N]; returns [N]."""
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_range, 1 + clip_range))


def clipped(ratio: Tensor, advantages: Tensor, clip_range: float) -> Tensor:
    """Whether the clip has taken the gradient away: [N] float, for the metric ``clip_fraction``."""
    return (((advantages > 0) & (ratio > 1 + clip_range)) | ((advantages < 0) & (ratio < 1 - clip_range))).float()
