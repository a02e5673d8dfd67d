"""Tensors as numpy arrays, which Ray passes from process to process without copying or pickling their bytes.

Invariant: what arrives is bit for bit what was sent, in memory of its own: shared memory is read-only, and its alignment would
show in the last bits of matrix products.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from digenrl.diffusion.trajectory import Trajectory
from digenrl.ids import SampleId
from digenrl.models.base import Conditioning


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """One tensor on its way."""

    array: NDArray[np.generic]
    """Its values; those of bfloat16, which numpy does not have, as int16."""
    bfloat16: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTrajectory:
    """A Trajectory on its way."""

    samples: tuple[SampleId, ...]
    policy_version: int
    tensors: dict[str, PackedTensor]


def pack(tensor: Tensor) -> PackedTensor:
    """A tensor of any device and type."""
    plain = tensor.detach().cpu().contiguous()
    if plain.dtype == torch.bfloat16:
        return PackedTensor(plain.view(torch.int16).numpy(), bfloat16=True)
    return PackedTensor(plain.numpy(), bfloat16=False)


def unpack(packed: PackedTensor, rows: Sequence[int] | None = None) -> Tensor:
    """The tensor, or some of its rows, on the CPU."""
    array = packed.array if rows is None else packed.array[list(rows)]
    # A fresh copy; an array of torch's own aligned memory rather than numpy's.
    plain = torch.from_numpy(np.array(array)).clone()
    return plain.view(torch.bfloat16) if packed.bfloat16 else plain


def pack_all(tensors: Mapping[str, Tensor]) -> dict[str, PackedTensor]:
    """Named tensors."""
    return {name: pack(tensor) for name, tensor in tensors.items()}


def unpack_conditioning(packed: Mapping[str, PackedTensor], rows: Sequence[int], device: torch.device) -> Conditioning:
    """The encoded prompts of these rows, in their order."""
    return Conditioning({name: unpack(tensor, rows).to(device) for name, tensor in packed.items()})


_TENSORS = tuple(field.name for field in fields(Trajectory) if field.type == "Tensor")


def pack_trajectory(trajectory: Trajectory) -> PackedTrajectory:
    """A trajectory of any device."""
    tensors = {name: pack(getattr(trajectory, name)) for name in _TENSORS}
    return PackedTrajectory(samples=trajectory.samples, policy_version=trajectory.policy_version, tensors=tensors)


def unpack_trajectories(parts: Sequence[PackedTrajectory]) -> Trajectory:
    """One trajectory on the CPU of the parts that the ranks of a replica made, in order. All are of one version and table."""
    assert len({part.policy_version for part in parts}) == 1, "a trajectory has one version"
    tensors = {name: torch.cat([unpack(part.tensors[name]) for part in parts]) for name in _TENSORS if name != "sigmas"}
    tables = [unpack(part.tensors["sigmas"]) for part in parts]
    assert all(torch.equal(table, tables[0]) for table in tables), "the ranks of a replica use one sigma table"
    return Trajectory(
        samples=tuple(sample for part in parts for sample in part.samples),
        policy_version=parts[0].policy_version,
        sigmas=tables[0],
        **tensors,
    )
