"""One denoising step: its ODE limit, its last step, its guard at sigma = 1, and what a log-probability means."""

from __future__ import annotations

import math

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from torch import Tensor

from digenrl.diffusion.dynamics import DYNAMICS, ODE, Dynamics, FlowSDE, gaussian_kl, gaussian_log_prob


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sd3_sigmas(steps: int) -> Tensor:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(steps)
    return scheduler.sigmas


def take(dynamics: Dynamics, x: Tensor, v: Tensor, sigmas: Tensor, step: int, level: float) -> tuple[Tensor, Tensor]:
    rows = len(x)
    result = dynamics.step(x, v, sigmas[step].expand(rows), sigmas[step + 1].expand(rows), sigmas[1], torch.full((rows,), level))
    return result.mean, result.transition_std


@pytest.mark.parametrize("steps", [1, 2, 4, 10, 28])
@pytest.mark.parametrize("dynamics", [FlowSDE(), ODE()])
def test_without_noise_every_step_is_diffusers_euler_step_bit_for_bit(steps: int, dynamics: Dynamics) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(steps)
    x = draw(3, 4, 6, 6)
    for step in range(steps):
        v = draw(3, 4, 6, 6, seed=step + 1)
        ours, std = take(dynamics, x, v, scheduler.sigmas, step, 0.0)
        theirs = scheduler.step(v, scheduler.timesteps[step], x, return_dict=False)[0]
        assert torch.equal(ours, theirs)
        assert torch.equal(std, torch.zeros(3))
        x = theirs


def test_the_ode_has_no_noise_whatever_the_noise_level_says() -> None:
    x, v = draw(2, 4, 4, 4), draw(2, 4, 4, 4, seed=1)
    quiet, _ = take(ODE(), x, v, sd3_sigmas(10), 3, 0.0)
    loud, std = take(ODE(), x, v, sd3_sigmas(10), 3, 0.9)
    assert torch.equal(quiet, loud)
    assert torch.equal(std, torch.zeros(2))


def test_every_dynamics_of_the_recipes_has_a_class() -> None:
    assert set(DYNAMICS) == {"flow_sde", "ode"}


@pytest.mark.parametrize("steps", [2, 4, 10, 28])
@pytest.mark.parametrize("level", [0.3, 0.7, 1.2])
def test_all_steps_are_finite_including_the_first_at_sigma_one_and_the_last(steps: int, level: float) -> None:
    x, v, sigmas = draw(2, 4, 4, 4), draw(2, 4, 4, 4, seed=1), sd3_sigmas(steps)
    assert float(sigmas[0]) == 1.0
    for step in range(steps):
        mean, std = take(FlowSDE(), x, v, sigmas, step, level)
        assert torch.isfinite(mean).all()
        assert torch.isfinite(std).all()
        assert bool((std > 0).all())
        assert torch.isfinite(gaussian_log_prob(x, mean, std)).all()


def test_at_sigma_one_the_transition_std_is_the_noise_level_itself() -> None:
    # b = a sqrt(1 / (1 - sigma_1)) and |dt| = 1 - sigma_1 cancel.
    _, std = take(FlowSDE(), draw(2, 4), draw(2, 4, seed=1), sd3_sigmas(10), 0, 0.7)
    torch.testing.assert_close(std, torch.full((2,), 0.7), rtol=1e-6, atol=0.0)


def test_a_schedule_that_starts_just_below_one_does_not_explode() -> None:
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    scheduler.set_timesteps(20)
    sigmas = scheduler.sigmas
    assert 1 - 2e-6 < float(sigmas[0]) < 1, "the schedule that this guard is for"
    x, v = draw(2, 4, 4, 4), draw(2, 4, 4, 4, seed=1)
    mean, std = take(FlowSDE(), x, v, sigmas, 0, 0.7)
    exact = sigmas.clone()
    exact[0] = 1.0
    mean_at_one, std_at_one = take(FlowSDE(), x, v, exact, 0, 0.7)
    # Without the guard the standard deviation is 91 here.
    torch.testing.assert_close(std, std_at_one, rtol=1e-4, atol=0.0)
    torch.testing.assert_close(mean, mean_at_one, rtol=1e-4, atol=1e-4)


def test_the_guard_changes_nothing_after_the_first_step() -> None:
    x, v, sigmas = draw(2, 4), draw(2, 4, seed=1), sd3_sigmas(10)
    for step in range(1, 10):
        _, std = take(FlowSDE(), x, v, sigmas, step, 0.7)
        s, dt = float(sigmas[step]), float(sigmas[step] - sigmas[step + 1])
        assert float(std[0]) == pytest.approx(0.7 * math.sqrt(s / (1 - s)) * math.sqrt(dt), rel=1e-5)


def test_the_sde_keeps_the_marginals_of_the_ode() -> None:
    # For a Gaussian target the exact velocity is known; after all steps the samples must have the target's mean and variance.
    target_mean, target_std, count, steps = 1.5, 0.4, 40_000, 200
    sigmas = torch.linspace(1, 0, steps + 1)
    x = draw(count, 1, seed=3)
    for step in range(steps):
        s = float(sigmas[step])
        variance = (1 - s) ** 2 * target_std**2 + s**2
        residual = x - (1 - s) * target_mean
        expected_noise = s * residual / variance
        expected_image = target_mean + (1 - s) * target_std**2 * residual / variance
        mean, std = take(FlowSDE(), x, expected_noise - expected_image, sigmas, step, 0.7)
        x = mean + std.view(-1, 1) * draw(count, 1, seed=10 + step) if step < steps - 1 else mean
    # Discretisation at 200 steps, and four standard errors of the mean of 40,000.
    assert float(x.mean()) == pytest.approx(target_mean, abs=0.02)
    assert float(x.std()) == pytest.approx(target_std, abs=0.02)


def test_the_mean_form_is_the_root_of_the_density_ratio_and_the_sum_form_the_ratio_itself() -> None:
    x = torch.tensor([[0.3, -0.2, 0.5, 1.0]])
    old, new, std = torch.zeros(1, 4), torch.full((1, 4), 0.1), torch.tensor([0.5])
    density = {}
    for name, mean in (("old", old), ("new", new)):
        each = [
            math.exp(-((a - m) ** 2) / (2 * 0.25)) / (0.5 * math.sqrt(2 * math.pi)) for a, m in zip(x[0], mean[0], strict=True)
        ]
        density[name] = math.prod(each)
    ratio = density["new"] / density["old"]
    log_ratio = {
        form: float(gaussian_log_prob(x, new, std, form) - gaussian_log_prob(x, old, std, form)) for form in ("mean", "sum")
    }
    assert math.exp(log_ratio["sum"]) == pytest.approx(ratio, rel=1e-5)
    assert math.exp(log_ratio["mean"]) == pytest.approx(ratio ** (1 / 4), rel=1e-5)


@pytest.mark.parametrize("shape", [(3, 5), (3, 4, 2, 2), (3, 2, 3, 2, 2)])
def test_a_log_probability_is_torchs_normal_distribution(shape: tuple[int, ...]) -> None:
    x, mean, std = draw(*shape), draw(*shape, seed=1), torch.tensor([0.3, 0.7, 2.0])
    normal = torch.distributions.Normal(mean, std.view(-1, *(1 for _ in shape[1:])))
    expected = normal.log_prob(x).flatten(1)
    torch.testing.assert_close(gaussian_log_prob(x, mean, std), expected.mean(1))
    torch.testing.assert_close(gaussian_log_prob(x, mean, std, "sum"), expected.sum(1))


def test_the_kl_is_torchs_per_element() -> None:
    a, b, std = draw(3, 4, 2), draw(3, 4, 2, seed=1), torch.tensor([0.3, 0.7, 2.0])
    normals = [torch.distributions.Normal(mean, std.view(-1, 1, 1)) for mean in (a, b)]
    expected = torch.distributions.kl_divergence(*normals).flatten(1).mean(1)
    torch.testing.assert_close(gaussian_kl(a, b, std), expected)
