"""AdamW and its learning rate, which is a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
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


@torch.no_grad()
def size_of_last_change(optimizer: torch.optim.AdamW) -> Tensor:
    """Norm of what the last step has added to all parameters, from the optimizer's state: no copy of the weights is kept.

    A DTensor where the parameters are. A parameter at a time: w' = (1 - lr wd) w - lr u, u being the step that Adam takes.
    """
    norms = []
    for group in optimizer.param_groups:
        rate, decay, (beta1, beta2) = group["lr"], group["weight_decay"], group["betas"]
        count = float(optimizer.state[group["params"][0]]["step"])
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            spread = (state["exp_avg_sq"] / (1 - beta2**count)).sqrt() + group["eps"]
            adam = state["exp_avg"] / (1 - beta1**count) / spread
            before = (parameter + rate * adam) / (1 - rate * decay)
            norms.append(torch.linalg.vector_norm(rate * (adam + decay * before)))
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
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
