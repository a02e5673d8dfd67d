"""The ranks that train one policy together, and how a tensor that is spread over them becomes whole and back.

Invariants: what is said to be collective is called by all ranks, in the same order; gradients are summed over ranks, never
averaged, because the loss is a sum that is divided once; one rank alone has plain tensors and never communicates; a pass
never sees weights that were gathered before they changed.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerGroup:
    """One rank's place among those that train together."""

    rank: int = 0
    size: int = 1
    mesh: DeviceMesh | None = None
    """[size], or [replicate, shard] (HSDP); None where every rank has whole weights: one alone, or shard 1."""
    device: torch.device = _CPU

    def agree_on_any(self, flag: bool) -> bool:
        """Whether any rank says so. Collective."""
        return bool(self.agree_on_most(int(flag)))

    def agree_on_most(self, number: int) -> int:
        """The largest of all ranks' numbers. Collective."""
        if self.size == 1:
            return number
        value = torch.tensor([number], dtype=torch.int64, device=self.device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return int(value.item())

    @torch.no_grad()
    def sum_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Sum gradients over ranks that have whole weights, in place and at once; FSDP sums its own. Collective."""
        if self.size == 1 or self.mesh is not None:
            return
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        for gradient, total in zip(gradients, torch.split(flat, [gradient.numel() for gradient in gradients]), strict=True):
            gradient.copy_(total.view_as(gradient))


ALONE = TrainerGroup()


def join_group(store: Any, *, rank: int, size: int, shard: int, device: torch.device, timeout_s: float) -> TrainerGroup:
    """Become rank ``rank`` of ``size``: parameters are sharded over ``shard`` neighbouring ranks and replicated over the rest.

    Makes torch's default process group (gloo on CPUs, NCCL on GPUs). Every operation of it, and of the groups inside it, fails
    after ``timeout_s``. Collective.
    """
    assert size % shard == 0, f"{size} ranks are not groups of {shard}"
    timeout = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    world = dist.group.WORLD
    assert world is not None, "it was made in the line before"
    if shard == 1:
        return TrainerGroup(rank=rank, size=size, device=device)
    if shard == size:
        mesh = DeviceMesh.from_group(world, device.type, mesh_dim_names=("shard",))
        return TrainerGroup(rank=rank, size=size, mesh=mesh, device=device)
    # Made here, because init_device_mesh would give them torch's own timeouts, of up to half an hour.
    table = torch.arange(size).view(size // shard, shard)
    replicate, sharding = _own_group(table.T, rank, timeout), _own_group(table, rank, timeout)
    mesh = DeviceMesh.from_group([replicate, sharding], device.type, mesh=table, mesh_dim_names=("replicate", "shard"))
    return TrainerGroup(rank=rank, size=size, mesh=mesh, device=device)


def _own_group(rows: Tensor, rank: int, timeout: datetime.timedelta) -> dist.ProcessGroup:
    """Make a process group of each row of ranks, as all ranks must, and return the one that ``rank`` is in."""
    groups = [(row, dist.new_group(row, timeout=timeout)) for row in rows.tolist()]
    own: dist.ProcessGroup = next(group for row, group in groups if rank in row)
    return own


def shard_module(module: nn.Module, group: TrainerGroup, blocks: tuple[str, ...]) -> None:
    """Spread a network's parameters over the ranks with FSDP2, block by block. blocks: class names of its repeated layers.

    Adapters must be in place before. Parameters are new objects afterwards, DTensors of the same names and values.
    """
    assert group.mesh is not None, "one rank keeps its parameters"
    # Freed after every pass. The root, too, which FSDP would keep: its old weights would outlive an average that is swapped in.
    for inner in module.modules():
        if type(inner).__name__ in blocks:
            fully_shard(inner, mesh=group.mesh, reshard_after_forward=True)
    fully_shard(module, mesh=group.mesh, reshard_after_forward=True)
    for inner in module.modules():
        if isinstance(inner, FSDPModule):
            inner.set_gradient_divide_factor(1.0)
            inner.set_force_sum_reduction_for_comms(True)


@contextmanager
def one_of_several(module: nn.Module, *, more: bool) -> Iterator[None]:
    """For one forward and backward pass of several whose gradients are summed, without communication in between.

    Weights stay gathered after it and gradients lie whole on each rank, until a pass without ``more`` brings the gradients
    together and frees both. Nothing where the module is not spread over ranks.
    """
    if not isinstance(module, FSDPModule):
        yield
        return
    module.set_reshard_after_forward(False)
    module.set_reshard_after_backward(not more)
    module.set_requires_gradient_sync(not more)
    try:
        yield
    finally:
        module.set_reshard_after_forward(True)
        module.set_reshard_after_backward(True)
        module.set_requires_gradient_sync(True)


def free_gathered(module: nn.Module) -> None:
    """Free weights that are still gathered, so that the next pass gathers them as they are then; gradients stay."""
    for inner in module.modules():
        if isinstance(inner, FSDPModule):
            inner.reshard()


def forget_passes(module: nn.Module) -> None:
    """Forget the forward passes of a network that is never trained: FSDP notes them for a backward pass, and would for ever."""
    if isinstance(module, FSDPModule):
        module.reset_iter_state()


def is_spread(tensor: Tensor) -> bool:
    """Whether a tensor's values lie on several ranks."""
    return isinstance(tensor, DTensor)


def own_share(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: all of it, unless it is spread over ranks; no communication."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """A tensor with all of its values. Collective where it is spread over ranks."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_on_first(tensors: Mapping[str, Tensor], group: TrainerGroup) -> dict[str, Tensor]:
    """The tensors with all of their values: on the CPU of rank 0, nothing on other ranks, themselves on one alone. Collective.

    One after the other, so that no device holds more than one whole tensor.
    """
    if group.mesh is None:
        return dict(tensors)
    found = {}
    for name, tensor in tensors.items():
        values = whole(tensor)
        if group.rank == 0:
            found[name] = values.cpu()
    return found


@torch.no_grad()
def write_whole(target: Tensor, values: Tensor) -> None:
    """Copy values [target.shape] into a tensor that may be spread over ranks; each rank takes its share of them."""
    target.copy_(spread_like(target, values))


def spread_like(pattern: Tensor, values: Tensor) -> Tensor:
    """Values of the whole, known on every rank, as a tensor that is spread as ``pattern`` is; no communication."""
    if not isinstance(pattern, DTensor) or values.shape != pattern.shape:
        return values.to(pattern.device)
    device = pattern.device
    return distribute_tensor(values.to(device), pattern.device_mesh, pattern.placements, src_data_rank=None)
