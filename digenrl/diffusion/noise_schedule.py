"""The sigma table of a sampler: taken from the model's own noise scheduler, carried with every trajectory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from digenrl.errors import ProtocolError


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseSchedule:
    """T denoising steps; step i goes from ``sigmas[i]`` to ``sigmas[i + 1]``."""

    sigmas: Tensor
    """[T + 1] float32 on the CPU, strictly falling, from at most 1 to 0."""
    timesteps: Tensor
    """[T] float32: the value that the network gets at each step (1000 sigma for SD3)."""

    def __post_init__(self) -> None:
        sigmas, timesteps = self.sigmas, self.timesteps
        assert sigmas.dtype == timesteps.dtype == torch.float32, "schedules are float32"
        assert sigmas.ndim == 1 and timesteps.shape == (len(sigmas) - 1,), "one timestep a step, one sigma more"
        assert bool((sigmas[1:] < sigmas[:-1]).all()) and float(sigmas[-1]) == 0.0, "sigmas fall strictly to 0"

    @property
    def num_steps(self) -> int:
        """Denoising steps T."""
        return len(self.timesteps)

    def check_same(self, sigmas: Tensor) -> None:
        """Raise ProtocolError unless a trajectory was made with exactly this table."""
        if not torch.equal(self.sigmas, sigmas):
            raise ProtocolError(
                f"A trajectory's sigmas ({_show(sigmas)}) are not the trainer's ({_show(self.sigmas)}).",
                why="Its log-probabilities were computed on another schedule, so every importance ratio would be wrong.",
                fix="Use the same rollout.num_inference_steps, size and flow shift on all workers.",
            )


def _show(sigmas: Tensor) -> str:
    values = [f"{value:.5f}" for value in sigmas.tolist()]
    return f"{len(values)} values, {', '.join(values[:3])}, ..."
