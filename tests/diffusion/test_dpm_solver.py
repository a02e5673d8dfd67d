"""DPM-Solver++ against diffusers' own multistep solver, and as the tail of a rollout."""

from __future__ import annotations

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler
from torch import Tensor

from digenrl.diffusion.dpm_solver import solve
from digenrl.diffusion.dynamics import FlowSDE
from digenrl.diffusion.noise_schedule import NoiseSchedule
from digenrl.diffusion.sampler import StepPlan, denoise


def bend(x: Tensor, sigma: float) -> Tensor:
    """A velocity field that is not straight."""
    return torch.sin(3 * x) + sigma * x - 0.3


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_the_solver_is_diffusers_second_order_midpoint_solver_for_flow_models() -> None:
    theirs = DPMSolverMultistepScheduler(
        algorithm_type="dpmsolver++",
        solver_order=2,
        solver_type="midpoint",
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        flow_shift=3.0,
    )
    theirs.set_timesteps(7)
    sigmas = theirs.sigmas.double()
    assert float(sigmas[0]) < 1
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    wanted = x
    for step, timestep in enumerate(theirs.timesteps):
        wanted = theirs.step(bend(wanted, float(sigmas[step])), timestep, wanted).prev_sample
    ours = solve(lambda at, step: bend(at, float(sigmas[step])), x, sigmas, tuple(range(8)))
    torch.testing.assert_close(ours, wanted.double(), rtol=1e-5, atol=1e-5)  # they keep sigmas in float32


def test_its_error_falls_with_the_square_of_the_number_of_steps() -> None:
    x = torch.randn(64, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).view(1, -1)

    def end(steps: int) -> Tensor:
        sigmas = torch.linspace(0.9, 0.0, steps + 1, dtype=torch.float64)
        # Down to 0.1, as the last step to 0 is of first order.
        stop = sigmas.tolist().index(min(sigmas.tolist(), key=lambda s: abs(s - 0.1)))
        seen: list[Tensor] = []

        def velocity(at: Tensor, step: int) -> Tensor:
            seen.append(at)
            return bend(at, float(sigmas[step]))

        solve(velocity, x, sigmas, tuple(range(steps + 1)))
        return seen[stop]

    exact = end(9 * 64)
    errors = [float((end(9 * k) - exact).abs().max()) for k in (2, 4, 8)]
    assert errors[0] / errors[1] > 3
    assert errors[1] / errors[2] > 3


SCHEDULE = NoiseSchedule(
    sigmas=torch.tensor([1.0, 0.8, 0.6, 0.4, 0.2, 0.0]), timesteps=torch.tensor([1000.0, 800, 600, 400, 200])
)


def run(tail: tuple[int, ...]) -> tuple[Tensor, list[float]]:
    asked: list[float] = []

    def predict(x: Tensor, timesteps: Tensor, rows: Tensor) -> Tensor:
        asked.append(float(timesteps[0]))
        return bend(x, float(timesteps[0]) / 1000)

    levels = torch.zeros(2, 5)
    levels[:, 1] = 0.5
    plan = StepPlan(noise_levels=levels, trained=torch.ones(2, 1, dtype=torch.int64), tail=tail)
    start = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    made = denoise(predict, start, SCHEDULE, plan, FlowSDE(), lambda step, rows: torch.ones(len(rows), 3), forward_batch_size=2)
    return made.final_latents, asked


def test_a_tail_asks_the_network_at_the_noise_levels_that_it_visits_and_ends_at_sigma_zero() -> None:
    final, asked = run((2, 3, 5))
    assert asked == [1000.0, 800.0, 600.0, 400.0]
    plain, all_of_them = run(())
    assert all_of_them == [1000.0, 800.0, 600.0, 400.0, 200.0]
    assert float((final - plain).abs().max()) < 0.2, "both solve one equation"


def test_a_tail_of_one_step_is_the_predicted_image() -> None:
    final, asked = run((2, 5))
    assert asked == [1000.0, 800.0, 600.0]
    euler, _ = run(())
    assert not torch.equal(final, euler)


@pytest.mark.parametrize("tail", [(0, 5), (3, 2, 5), (2, 4), (1, 5), (2, 2, 5)])
def test_a_tail_that_is_noisy_or_does_not_end_at_sigma_zero_is_refused(tail: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError):
        run(tail)
