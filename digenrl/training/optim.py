"""AdamW and its learning rate, which is a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

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


def bytes_to_come(optimizer: torch.optim.AdamW) -> int:
    """Bytes, on this rank, of the state that the optimizer makes in its first step; 0 once it is there."""
    total = 0
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        if parameter not in optimizer.state or not optimizer.state[parameter]:
            own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            total += 2 * own.numel() * own.element_size()
    return total


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
