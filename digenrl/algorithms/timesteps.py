"""Which denoising steps are noisy and which are trained: keyed choices, never the last step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from digenrl.diffusion.noise import Purpose, generator
from digenrl.diffusion.sampler import StepPlan
from digenrl.ids import SampleId


def first_steps(count: int, num_samples: int, num_inference_steps: int, noise_level: float) -> StepPlan:
    """Noise on all steps but the last; the first ``count`` are trained."""
    return StepPlan(
        noise_levels=_noise_everywhere(num_samples, num_inference_steps, noise_level),
        trained=torch.arange(count).expand(num_samples, -1),
    )


def random_steps(count: int, samples: Sequence[SampleId], num_inference_steps: int, noise_level: float, *, seed: int) -> StepPlan:
    """Noise on all steps but the last; each sample trains its own random ``count`` of them, ascending."""
    chosen = [
        torch.randperm(num_inference_steps - 1, generator=generator(seed, Purpose.TIMESTEP_CHOICE, s.step, s.prompt, s.sample))[
            :count
        ]
        .sort()
        .values
        for s in samples
    ]
    return StepPlan(noise_levels=_noise_everywhere(len(samples), num_inference_steps, noise_level), trained=torch.stack(chosen))


def random_start(low: int, high: int, size: int, number: int, *, seed: int) -> int:
    """First step of a window of ``size`` steps inside [low, high), drawn from a number that all workers know: an RL step's."""
    return int(torch.randint(low, high - size + 1, (), generator=generator(seed, Purpose.SDE_WINDOW, number)))


def window_steps(
    starts: Sequence[int], size: int, num_inference_steps: int, noise_level: float, *, tail: tuple[int, ...] = ()
) -> StepPlan:
    """Noise only in a window of ``size`` steps, all of them trained. starts: first step of each sample's; tail: see StepPlan."""
    levels = torch.zeros(len(starts), num_inference_steps)
    trained = torch.tensor(starts, dtype=torch.int64).view(-1, 1) + torch.arange(size)
    return StepPlan(noise_levels=levels.scatter(1, trained, noise_level), trained=trained, tail=tail)


def _noise_everywhere(num_samples: int, num_inference_steps: int, noise_level: float) -> torch.Tensor:
    levels = torch.full((num_samples, num_inference_steps), noise_level)
    levels[:, -1] = 0.0
    return levels
