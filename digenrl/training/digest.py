"""Digests: equal exactly when every name, dtype, shape and byte is equal. What "identical" means everywhere here."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from digenrl.errors import ConfigError

FILES = ("parameters", "optimizer", "ema")


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over the tensors in order of name."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        total.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        total.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def save_weights(folder: Path, weights: Mapping[str, Mapping[str, Tensor]]) -> dict[str, str]:
    """Write one safetensors file per part of ``FILES`` and return the digests by part."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in FILES:
        save_file(
            {name: t.detach().cpu().contiguous().clone() for name, t in weights[part].items()}, folder / f"{part}.safetensors"
        )
    return {part: digest(weights[part]) for part in FILES}


def digest_of_folder(folder: Path) -> dict[str, str]:
    """Digests of the files that ``save_weights`` wrote. Raises ConfigError naming a missing or damaged one."""
    digests = {}
    for part in FILES:
        path = folder / f"{part}.safetensors"
        try:
            digests[part] = digest(load_file(path))
        except Exception as error:  # safetensors raises its own SafetensorError, which is a bare Exception
            raise ConfigError(
                f"{str(path)!r} cannot be read: {str(error).splitlines()[0]}.",
                why="A run writes its weights there when it ends.",
                fix="Name the folder of a finished run.",
            ) from error
    return digests
