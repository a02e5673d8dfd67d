"""AdamW and its learning rate, which is a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from digenrl.config.schema import TrainSection


def make_optimizer(parameters: Iterable[nn.Parameter], train: TrainSection) -> torch.optim.AdamW:
    """AdamW as the recipe describes it."""
    return torch.optim.AdamW(
        parameters,
        lr=train.learning_rate,
        betas=(train.adam_beta1, train.adam_beta2),
        eps=train.adam_eps,
        weight_decay=train.weight_decay,
        fused=True,
    )


def learning_rate(step: int, train: TrainSection) -> float:
    """Learning rate of RL step ``step`` (from 0): linear warm-up to the peak, then the schedule's shape down to its end."""
    if step < train.lr_warmup_steps:
        return train.learning_rate * (step + 1) / train.lr_warmup_steps
    if train.lr_schedule == "constant":
        return train.learning_rate
    span = max(1, train.steps - 1 - train.lr_warmup_steps)
    progress = min(1.0, (step - train.lr_warmup_steps) / span)
    remaining = 1 - progress if train.lr_schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return train.learning_rate * (train.lr_final_fraction + (1 - train.lr_final_fraction) * remaining)
