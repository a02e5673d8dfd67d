"""The tensors of the pairs that go through the network together, taken out of a trajectory.

Invariant: where a pair that is not finite is masked, no row repeats it; a batch of padding alone holds nothing of its pairs. 0
times a NaN activation would still poison the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from digenrl.diffusion.noise_schedule import NoiseSchedule
from digenrl.diffusion.trajectory import Trajectory
from digenrl.training.timestep_parallel import PairBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """The tensors of N pairs, on the device."""

    latents: Tensor
    next_latents: Tensor
    timesteps: Tensor
    sigma: Tensor
    sigma_next: Tensor
    noise_levels: Tensor
    old_log_prob: Tensor
    advantages: Tensor
    real: Tensor
    """[n] int64, the rows that are not padding, ascending."""

    def without(self, bad: Tensor) -> Pairs:
        """The same pairs, with those of ``real`` that are ``bad`` [n] bool turned into harmless padding, as all padding is."""
        return self._only(self.real[~bad])

    def without_any(self) -> Pairs:
        """Padding alone."""
        return self._only(self.real[:0])

    def cleaned(self) -> Pairs:
        """The same, with zeros for what is not finite: of the size of any others, and good for nothing else."""
        return replace(
            self,
            latents=self.latents.nan_to_num(0.0, 0.0, 0.0),
            next_latents=self.next_latents.nan_to_num(0.0, 0.0, 0.0),
            old_log_prob=self.old_log_prob.nan_to_num(0.0, 0.0, 0.0),
        )

    def _only(self, kept: Tensor) -> Pairs:
        padding = torch.ones(len(self.latents), dtype=torch.bool, device=kept.device).index_fill(0, kept, False)
        latent_padding = padding.view(-1, *(1 for _ in self.latents.shape[1:]))
        return replace(
            self,
            latents=self.latents.masked_fill(latent_padding, 0.0),
            next_latents=self.next_latents.masked_fill(latent_padding, 0.0),
            real=kept,
        )


def gather_pairs(
    trajectory: Trajectory, batch: PairBatch, advantages: Tensor, schedule: NoiseSchedule, device: torch.device
) -> Pairs:
    """The pairs of a batch. advantages: [B], of the trajectory's samples."""
    steps = trajectory.denoising_steps[batch.rows, batch.slots].cpu()
    rows, slots = batch.rows.to(trajectory.latents.device), batch.slots.to(trajectory.latents.device)
    pairs = Pairs(
        latents=_onto(device, trajectory.latents[rows, slots]),
        next_latents=_onto(device, trajectory.next_latents[rows, slots]),
        timesteps=_onto(device, schedule.timesteps[steps]),
        sigma=_onto(device, schedule.sigmas[steps]),
        sigma_next=_onto(device, schedule.sigmas[steps + 1]),
        noise_levels=_onto(device, trajectory.noise_levels[batch.rows, batch.slots]),
        old_log_prob=_onto(device, trajectory.log_probs[rows, slots]),
        advantages=_onto(device, advantages[batch.rows]),
        real=_onto(device, batch.weights.nonzero().flatten()),
    )
    # Padding alone repeats a pair of another rank, which masks it where it is not finite; this rank would not know.
    return pairs if len(pairs.real) else pairs.without_any()


def one_ahead(batches: Iterable[PairBatch], gather: Callable[[PairBatch], Pairs], device: torch.device) -> Iterator[Pairs]:
    """``gather`` of each batch, in order. On a GPU the next one is copied there while the network is at the present one."""
    if device.type != "cuda":
        yield from map(gather, batches)
        return
    copying = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    ready: Pairs | None = None
    for batch in batches:
        copying.wait_stream(torch.cuda.current_stream(device))  # a trajectory that lies on the GPU has been made there
        with torch.cuda.stream(copying):
            coming = gather(batch)
            arrived = copying.record_event()
        if ready is not None:
            yield ready
        computing = torch.cuda.current_stream(device)
        computing.wait_event(arrived)
        for field in fields(coming):
            getattr(coming, field.name).record_stream(computing)
        ready = coming
    if ready is not None:
        yield ready


def _onto(device: torch.device, tensor: Tensor) -> Tensor:
    """The tensor there. From page-locked memory, where a copy to a GPU need not be waited for."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
