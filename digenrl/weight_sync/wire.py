"""The form in which weights travel: which dtype each tensor has on the way, its bytes, and which names have to meet.

Invariants: a tensor's bytes are a function of its values and its wire dtype alone, wherever and however it is stored; both
sides run the same policy, because what travels rounded is rounded the same way by the trainer's own forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from xxhash import xxh3_128_hexdigest

from digenrl.errors import RunFailed
from digenrl.training.group import whole
from digenrl.training.policy import Policy

Bucket = NDArray[np.uint8]
"""[num_bytes] uint8: the bytes of some tensors, one after another."""

DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""All that weights travel as, by the name that a manifest uses."""

_CAST_BY_AUTOCAST = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
_LISTED = 8


def wire_dtypes(policy: Policy, compute_dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The dtype in which each trained tensor travels, by name and in order of name: the one the trainer computes with.

    With ``compute_dtype`` float32 that is float32. Else the trainer runs under autocast: weights and biases of linear and
    convolution modules (peft's lora_A and lora_B are such) are rounded to ``compute_dtype`` in every forward pass, and travel
    so; norms, embeddings and tables are used in float32, and travel so. A tensor that is also used elsewhere counts as those.
    """
    uses: dict[int, list[bool]] = {}
    for module in policy.adapter.transformer.modules():
        for parameter in module.parameters(recurse=False):
            uses.setdefault(id(parameter), []).append(isinstance(module, _CAST_BY_AUTOCAST))
    dtypes: dict[str, torch.dtype] = {}
    for name in sorted(policy.parameters):
        found = uses.get(id(policy.parameters[name]), [False])
        dtypes[name] = compute_dtype if all(found) else torch.float32
    return dtypes


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` of ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def to_bytes(tensor: Tensor, dtype: torch.dtype) -> Bucket:
    """The values in ``dtype``, as [num_bytes] uint8 on the CPU, row by row. May share the tensor's memory: read, don't write.

    Collective where the tensor is spread over the trainer's ranks.
    """
    # Cast before it leaves the device: half the bytes to move, and rounded where the forward pass rounds.
    plain = whole(tensor.detach()).to(dtype).cpu().contiguous()
    data: Bucket = plain.reshape(-1).view(torch.uint8).numpy()
    return data


def from_bytes(data: Bucket, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A new tensor of these bytes. data: [num_bytes] uint8, of any alignment, may be read-only."""
    tensor = torch.empty(shape, dtype=dtype)
    tensor.reshape(-1).view(torch.uint8).numpy()[:] = data
    return tensor


def byte_digest(data: Bucket) -> str:
    """xxh3_128 in hex: fast, and good against accidents; not against somebody who wants it to be equal."""
    return xxh3_128_hexdigest(np.ascontiguousarray(data).data)


def num_bytes(shape: Iterable[int], dtype: torch.dtype) -> int:
    """Bytes of a tensor on the way."""
    return math.prod(shape) * dtype.itemsize


def forms(tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]) -> dict[str, str]:
    """What each tensor looks like on the way, for comparing and for people: ``bfloat16 [4, 32]``."""
    return {name: form(dtype_name(dtypes[name]), tensor.shape) for name, tensor in tensors.items()}


def form(dtype: str, shape: Iterable[int]) -> str:
    """One entry of ``forms``."""
    return f"{dtype} {list(shape)}"


def check_binding(sent: Mapping[str, str], bound: Mapping[str, str], *, sender: str, receiver: str) -> None:
    """Raise RunFailed unless every tensor sent is bound here and every one bound here is sent, in the same form.

    sent, bound: ``forms``. Not a WorkerError: the same two models meet again after a restart.
    """
    complaints = []
    if missing := sorted(bound.keys() - sent.keys()):
        complaints.append(f"{len(missing)} of {len(bound)} are not in {sender}: {_some(missing)}")
    if foreign := sorted(sent.keys() - bound.keys()):
        complaints.append(f"{len(foreign)} of {len(sent)} do not exist in {receiver}: {_some(foreign)}")
    if odd := sorted(name for name in sent.keys() & bound.keys() if sent[name] != bound[name]):
        complaints.append(f"{len(odd)} differ: {_some(f'{name} ({sent[name]} against {bound[name]})' for name in odd)}")
    if complaints:
        raise RunFailed(
            f"{sender[0].upper()}{sender[1:]} and {receiver} do not hold the same trained weights: {'; '.join(complaints)}.",
            why="Weights are loaded completely or not at all; one that is not bound would silently stay as it was.",
            fix="Use one recipe, one model folder, and the same versions of diffusers and peft everywhere.",
        )


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    rest = len(listed) - _LISTED
    return ", ".join(listed[:_LISTED]) + (f", and {rest} more" if rest > 0 else "")
