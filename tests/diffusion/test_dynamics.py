"""One denoising step of each dynamics: its ODE limit, its last step, sigma = 1, and what a log-probability means."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from torch import Tensor

from digenrl.diffusion.dynamics import (
    DYNAMICS,
    ODE,
    DanceSDE,
    Dynamics,
    FlowCPS,
    FlowSDE,
    StepDistribution,
    gaussian_kl,
    gaussian_log_prob,
)
from digenrl.diffusion.noise_schedule import NoiseSchedule
from digenrl.diffusion.sampler import Denoised, StepPlan, denoise

NOISY = [FlowSDE(), DanceSDE(), FlowCPS()]


def name(value: object) -> str:
    return type(value).__name__


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
@pytest.mark.parametrize("dynamics", [*NOISY, ODE()], ids=name)
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
    assert set(DYNAMICS) == {"flow_sde", "dance_sde", "cps", "ode"}


@pytest.mark.parametrize("steps", [2, 4, 10, 28])
@pytest.mark.parametrize("level", [0.3, 0.7, 1.0, 1.2])
@pytest.mark.parametrize("dynamics", NOISY, ids=name)
def test_all_steps_are_finite_including_the_first_at_sigma_one_and_the_last(steps: int, level: float, dynamics: Dynamics) -> None:
    x, v, sigmas = draw(2, 4, 4, 4), draw(2, 4, 4, 4, seed=1), sd3_sigmas(steps)
    assert float(sigmas[0]) == 1.0
    for step in range(steps):
        mean, std = take(dynamics, x, v, sigmas, step, level)
        assert torch.isfinite(mean).all()
        assert torch.isfinite(std).all()
        # CPS gives x' the noise s' of its place, and at the end that is none.
        assert bool((std > 0).all()) or (isinstance(dynamics, FlowCPS) and step == steps - 1)
        assert torch.isfinite(dynamics.log_prob(x, StepDistribution(mean, std), "mean")).all()


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


@pytest.mark.parametrize("dynamics", [FlowSDE(), DanceSDE()], ids=name)
def test_an_sde_keeps_the_marginals_of_the_ode(dynamics: Dynamics) -> None:
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
        mean, std = take(dynamics, x, expected_noise - expected_image, sigmas, step, 0.7)
        x = mean + std.view(-1, 1) * draw(count, 1, seed=10 + step) if step < steps - 1 else mean
    # Discretisation at 200 steps, and four standard errors of the mean of 40,000.
    assert float(x.mean()) == pytest.approx(target_mean, abs=0.02)
    assert float(x.std()) == pytest.approx(target_std, abs=0.02)


def test_dance_sde_has_the_same_noise_per_unit_of_sigma_at_every_step() -> None:
    x, v, sigmas = draw(2, 4), draw(2, 4, seed=1), sd3_sigmas(10)
    for step in range(10):
        _, std = take(DanceSDE(), x, v, sigmas, step, 0.3)
        assert float(std[0]) == pytest.approx(0.3 * math.sqrt(float(sigmas[step] - sigmas[step + 1])), rel=1e-6)


def test_dance_sde_is_flow_sde_with_another_coefficient() -> None:
    # At s = 1/2 Flow-SDE's b = a sqrt(s / (1 - s)) is a itself.
    x, v, sigmas = draw(2, 4), draw(2, 4, seed=1), torch.tensor([0.9, 0.5, 0.25, 0.0])
    for ours, theirs in zip(take(DanceSDE(), x, v, sigmas, 1, 0.6), take(FlowSDE(), x, v, sigmas, 1, 0.6), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("level", [0.0, 0.1, 0.5, 0.8, 0.999, 1.0])
@pytest.mark.parametrize("step", range(10))
def test_flow_cps_is_the_papers_equation(level: float, step: int) -> None:
    x, v, sigmas = draw(3, 5).double(), draw(3, 5, seed=1).double(), sd3_sigmas(10).double()
    s, s_next = float(sigmas[step]), float(sigmas[step + 1])
    tau = s_next * math.sin(math.pi * level / 2)
    expected = (1 - s_next) * (x - s * v) + math.sqrt(max(0.0, s_next**2 - tau**2)) * (x + (1 - s) * v)
    level_of = torch.full((3,), level, dtype=torch.float64)
    ours = FlowCPS().step(x, v, sigmas[step].expand(3), sigmas[step + 1].expand(3), sigmas[1], level_of)
    # s'^2 - tau^2 loses digits where almost all noise is replaced: 1e-16 / 0.0016 at 0.999, where ours loses none.
    torch.testing.assert_close(ours.mean, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(ours.transition_std, torch.full_like(level_of, tau), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("level", [0.2, 0.8, 1.0])
def test_flow_cps_leaves_exactly_the_noise_of_the_schedule(level: float) -> None:
    # With the true image and noise, x' is the image times (1 - s') plus noise of standard deviation s'.
    count, sigmas = 100_000, sd3_sigmas(10)
    image, noise = torch.full((count, 1), 1.5), draw(count, 1)
    for step in range(10):
        s, s_next = float(sigmas[step]), float(sigmas[step + 1])
        mean, std = take(FlowCPS(), (1 - s) * image + s * noise, noise - image, sigmas, step, level)
        x_next = mean + std.view(-1, 1) * draw(count, 1, seed=step + 1)
        # Four standard errors of 100,000 draws.
        assert float(x_next.mean()) == pytest.approx((1 - s_next) * 1.5, abs=0.013 * s_next + 1e-6)
        assert float(x_next.std()) == pytest.approx(s_next, rel=0.01, abs=1e-6)


def test_flow_cps_without_noise_is_the_euler_step_bit_for_bit_at_any_sigma() -> None:
    # sqrt(s'^2), as the peers have it, is off by a rounding at some of these.
    rows = 100_000
    sigma, share = torch.rand(2, rows, generator=torch.Generator().manual_seed(2))
    sigma_next, x, v = sigma * share, draw(rows, 2), draw(rows, 2, seed=1)
    ours = FlowCPS().step(x, v, sigma, sigma_next, sigma[0], torch.zeros(rows))
    assert torch.equal(ours.mean, x + (sigma_next - sigma).view(-1, 1) * v)
    assert torch.equal(ours.transition_std, torch.zeros(rows))


def test_the_last_flow_cps_step_is_the_predicted_image_whatever_the_noise_level() -> None:
    x, v, sigmas = draw(2, 4), draw(2, 4, seed=1), sd3_sigmas(10)
    mean, std = take(FlowCPS(), x, v, sigmas, 9, 1.0)
    assert torch.equal(std, torch.zeros(2))
    assert torch.equal(mean, x - sigmas[9] * v)


@pytest.mark.parametrize("step", range(10))
def test_flow_cps_is_finite_up_to_a_noise_level_of_one(step: int) -> None:
    levels = torch.linspace(0.99, 1.0, 2001)
    rows, sigmas = len(levels), sd3_sigmas(10)
    x, v = draw(1, 4).expand(rows, -1), draw(1, 4, seed=1).expand(rows, -1)
    result = FlowCPS().step(x, v, sigmas[step].expand(rows), sigmas[step + 1].expand(rows), sigmas[1], levels)
    assert torch.isfinite(result.mean).all()
    assert torch.isfinite(result.transition_std).all()


def test_a_flow_cps_log_ratio_is_the_gaussians_times_twice_the_variance() -> None:
    x, old, new, std = draw(3, 4, 2), draw(3, 4, 2, seed=1), draw(3, 4, 2, seed=2), torch.tensor([0.3, 0.7, 2.0])
    cps = [FlowCPS().log_prob(x, StepDistribution(mean, std), "mean") for mean in (old, new)]
    gaussian = [gaussian_log_prob(x, mean, std) for mean in (old, new)]
    torch.testing.assert_close(cps[1] - cps[0], (gaussian[1] - gaussian[0]) * 2 * std.square())
    torch.testing.assert_close(FlowCPS().log_prob(x, StepDistribution(old, std), "sum"), cps[0] * 8)


@pytest.mark.parametrize("dynamics", [FlowSDE(), DanceSDE(), ODE()], ids=name)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_log_probability_is_the_gaussians_unless_the_dynamics_says_otherwise(
    dynamics: Dynamics, reduction: Literal["mean", "sum"]
) -> None:
    x, mean, std = draw(3, 4), draw(3, 4, seed=1), torch.tensor([0.3, 0.7, 2.0])
    ours = dynamics.log_prob(x, StepDistribution(mean, std), reduction)
    assert torch.equal(ours, gaussian_log_prob(x, mean, std, reduction))


def rollout(dynamics: Dynamics, plan: StepPlan, reduction: Literal["mean", "sum"] = "mean") -> Denoised:
    """Three samples along a schedule that starts at sigma = 1, under the velocity tanh(x)."""
    sigmas = sd3_sigmas(6)
    return denoise(
        lambda x, timesteps, rows: torch.tanh(x),
        draw(3, 2, 4, 4),
        NoiseSchedule(sigmas=sigmas, timesteps=sigmas[:-1] * 1000),
        plan,
        dynamics,
        lambda step, rows: draw(len(rows), 2, 4, 4, seed=100 + step),
        forward_batch_size=3,
        log_prob_reduction=reduction,
    )


@pytest.mark.parametrize("dynamics", NOISY, ids=name)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("level", [0.3, 1.0])
def test_a_replayed_log_probability_is_the_rollouts_bit_for_bit(
    dynamics: Dynamics, reduction: Literal["mean", "sum"], level: float
) -> None:
    levels = torch.full((3, 6), level)
    levels[:, -1] = 0
    sigmas = sd3_sigmas(6)
    result = rollout(dynamics, StepPlan(noise_levels=levels, trained=torch.arange(5).expand(3, -1)), reduction)
    assert torch.isfinite(result.log_probs).all()
    for slot in range(5):
        x = result.latents[:, slot]
        step = dynamics.step(
            x, torch.tanh(x), sigmas[slot].expand(3), sigmas[slot + 1].expand(3), sigmas[1], levels[:, slot].contiguous()
        )
        assert torch.equal(dynamics.log_prob(result.next_latents[:, slot], step, reduction), result.log_probs[:, slot])


@pytest.mark.parametrize("dynamics", NOISY, ids=name)
def test_a_rollout_without_noise_is_the_odes_and_has_no_nan(dynamics: Dynamics) -> None:
    quiet = StepPlan(noise_levels=torch.zeros(3, 6), trained=torch.empty(3, 0, dtype=torch.int64))
    ours, ode = rollout(dynamics, quiet), rollout(ODE(), quiet)
    assert torch.isfinite(ours.final_latents).all()
    assert torch.equal(ours.final_latents, ode.final_latents)


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
