"""Digests: equal exactly when every name, dtype, shape and byte is equal. What "identical" means everywhere here."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over the tensors in order of name."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        total.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        total.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def digests(weights: Mapping[str, Mapping[str, Tensor]]) -> dict[str, str]:
    """Digests by part: parameters, optimizer, ema."""
    return {part: digest(tensors) for part, tensors in weights.items()}
