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


def random_window(
    size: int,
    low: int,
    high: int,
    samples: Sequence[SampleId],
    num_inference_steps: int,
    noise_level: float,
    *,
    seed: int,
) -> StepPlan:
    """Noise only in a window of ``size`` steps inside [low, high), all of them trained. One window per RL step, drawn from
    its number, so that all samples of a step, on all workers, share it.
    """
    levels = torch.zeros(len(samples), num_inference_steps)
    trained = torch.empty(len(samples), size, dtype=torch.int64)
    for row, sample in enumerate(samples):
        draw = torch.randint(low, high - size + 1, (), generator=generator(seed, Purpose.SDE_WINDOW, sample.step))
        start = int(draw)
        levels[row, start : start + size] = noise_level
        trained[row] = torch.arange(start, start + size)
    return StepPlan(noise_levels=levels, trained=trained)


def _noise_everywhere(num_samples: int, num_inference_steps: int, noise_level: float) -> torch.Tensor:
    levels = torch.full((num_samples, num_inference_steps), noise_level)
    levels[:, -1] = 0.0
    return levels
