"""A trajectory: what the trainer needs of the generation of one micro-batch, under exactly one policy version."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from digenrl.ids import SampleId


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """The trained steps of B samples. All floats are float32: bfloat16 storage moves a log-probability by more than a clip.

    Letters: B samples, S trained steps of each, T denoising steps, ``*latent`` the latent's dimensions.
    """

    samples: tuple[SampleId, ...]
    policy_version: int
    """Version of the weights of every forward pass in here."""
    sigmas: Tensor
    """[T + 1], the table it was made with."""
    noise_levels: Tensor
    """[B, S], strength of the SDE noise at the trained steps."""
    denoising_steps: Tensor
    """[B, S] int64, indices 0..T-2 of the trained steps."""
    latents: Tensor
    """[B, S, *latent], x before each trained step."""
    next_latents: Tensor
    """[B, S, *latent], x after it."""
    log_probs: Tensor
    """[B, S], log-probability of that step under the version that took it."""
    final_latents: Tensor
    """[B, *latent], x at sigma 0, for the decoder."""

    def first(self, count: int) -> Trajectory:
        """The first ``count`` samples."""
        rows = {
            name: getattr(self, name)[:count]
            for name in ("noise_levels", "denoising_steps", "latents", "next_latents", "log_probs", "final_latents")
        }
        return replace(self, samples=self.samples[:count], **rows)

    def __post_init__(self) -> None:
        count, steps = self.denoising_steps.shape
        latent = self.final_latents.shape[1:]
        assert len(self.samples) == count == len(self.final_latents), "one row per sample"
        assert self.latents.shape == self.next_latents.shape == (count, steps, *latent), "latents are [B, S, *latent]"
        assert self.log_probs.shape == self.noise_levels.shape == (count, steps), "one log-probability per trained step"
        floats = (self.sigmas, self.noise_levels, self.latents, self.next_latents, self.log_probs, self.final_latents)
        assert all(tensor.dtype == torch.float32 for tensor in floats), "trajectories are float32 end to end"
