"""Trajectories are float32 end to end and carry their own sigma table."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from digenrl.diffusion.dynamics import FlowSDE, gaussian_log_prob
from digenrl.diffusion.noise_schedule import NoiseSchedule
from digenrl.diffusion.trajectory import Trajectory
from digenrl.errors import ProtocolError
from digenrl.ids import SampleId


def trajectory(samples: int = 2, steps: int = 3) -> Trajectory:
    return Trajectory(
        samples=tuple(SampleId(0, 0, i) for i in range(samples)),
        policy_version=0,
        sigmas=torch.linspace(1, 0, 6),
        noise_levels=torch.full((samples, steps), 0.7),
        denoising_steps=torch.arange(steps).expand(samples, -1),
        latents=torch.zeros(samples, steps, 4, 2, 2),
        next_latents=torch.zeros(samples, steps, 4, 2, 2),
        log_probs=torch.zeros(samples, steps),
        final_latents=torch.zeros(samples, 4, 2, 2),
    )


@pytest.mark.parametrize("name", ["sigmas", "noise_levels", "latents", "next_latents", "log_probs", "final_latents"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_trajectory_refuses_any_float_that_is_not_float32(name: str, dtype: torch.dtype) -> None:
    good = trajectory()
    with pytest.raises(AssertionError, match="float32"):
        replace(good, **{name: getattr(good, name).to(dtype)})


def test_a_trajectory_refuses_rows_that_do_not_belong_together() -> None:
    good = trajectory()
    for name, value in (
        ("samples", good.samples[:1]),
        ("latents", good.latents[:, :2]),
        ("next_latents", good.next_latents[..., :1]),
        ("log_probs", good.log_probs[:, :1]),
        ("noise_levels", good.noise_levels[:1]),
        ("final_latents", good.final_latents[:1]),
    ):
        with pytest.raises(AssertionError):
            replace(good, **{name: value})


def test_storing_latents_in_bfloat16_would_move_a_log_probability_by_more_than_a_clip() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = 16
    x, v, z = (torch.randn(rows, 4, 8, 8, generator=generator) for _ in range(3))
    ones, sigmas = torch.ones(rows), torch.tensor([1.0, 0.9601293, 0.9133490, 0.8577, 0.7904])
    step = FlowSDE().step(x, v, ones * sigmas[3], ones * sigmas[4], sigmas[1], ones * 0.7)
    x_next = step.mean + step.transition_std.view(-1, 1, 1, 1) * z
    exact = gaussian_log_prob(x_next, step.mean, step.transition_std)
    rounded = gaussian_log_prob(x_next.bfloat16().float(), step.mean, step.transition_std)
    assert float((rounded - exact).abs().max()) > 1e-4  # flow_grpo's clip range


def schedule(sigmas: torch.Tensor) -> NoiseSchedule:
    return NoiseSchedule(sigmas=sigmas, timesteps=sigmas[:-1] * 1000)


def test_a_trajectory_of_the_same_table_is_accepted_and_of_any_other_refused() -> None:
    table = torch.tensor([1.0, 0.9, 0.5, 0.0])
    ours = schedule(table)
    ours.check_same(table.clone())
    off_by_little, shorter = table.clone(), torch.tensor([1.0, 0.5, 0.0])
    off_by_little[1] += 0.01
    off_by_one_bit = table.clone()
    off_by_one_bit[2] = torch.nextafter(table[2], torch.tensor(1.0))
    for other in (off_by_little, off_by_one_bit, shorter):
        with pytest.raises(ProtocolError, match="sigmas"):
            ours.check_same(other)


def test_a_schedule_must_fall_strictly_to_zero() -> None:
    for bad in ([1.0, 0.5, 0.5, 0.0], [1.0, 0.5, 0.1], [0.5, 1.0, 0.0], [1.0, float("nan"), 0.0]):
        with pytest.raises(AssertionError):
            schedule(torch.tensor(bad))
    with pytest.raises(AssertionError):
        NoiseSchedule(sigmas=torch.tensor([1.0, 0.0]), timesteps=torch.tensor([1000.0, 0.0]))
