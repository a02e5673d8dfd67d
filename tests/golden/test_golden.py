"""Our step, loss, advantage, KL, average and sigma table against the reference repositories' own numbers (see README.md).

Tolerances: float32 cases 1e-5, the rounding of one step; float64 means 1e-12; float64 log-probabilities 1e-7, because the
peers take log(2 pi) in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from digenrl.algorithms.advantages import group_advantages
from digenrl.algorithms.base import LossInputs
from digenrl.algorithms.flow_grpo import FlowGRPO
from digenrl.config.schema import EmaSection, Recipe
from digenrl.diffusion.dynamics import DanceSDE, Dynamics, FlowCPS, FlowSDE, StepDistribution, gaussian_log_prob
from digenrl.models.sd3 import SD3Adapter
from digenrl.training.ema import Ema
from tests.golden.cases import CASES, cases, close, golden


def flow_sde_step(x: Tensor, v: Tensor, sigmas: Tensor, steps: list[int], noise_level: float) -> StepDistribution:
    return take(FlowSDE(), x, v, sigmas, steps, noise_level)


def take(dynamics: Dynamics, x: Tensor, v: Tensor, sigmas: Tensor, steps: list[int], noise_level: float) -> StepDistribution:
    index = torch.tensor(steps)
    level = torch.full((len(x),), noise_level, dtype=x.dtype)
    return dynamics.step(x, v, sigmas[index], sigmas[index + 1], sigmas[1], level)


def shared(dtype: torch.dtype = torch.float32, case: str = "flow_sde_inputs") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    names = ("sample", "model_output", "sigmas", "given_prev_sample")
    x, v, sigmas, given = (golden(case, name).to(dtype) for name in names)
    return x, v, sigmas, given


@pytest.mark.parametrize("case", cases("flow_sde_i", without=("inputs",)))
def test_a_flow_sde_step_has_flow_grpos_mean_and_standard_deviation(case: str) -> None:
    x, v, sigmas, _ = shared()
    step, level = CASES[case]["params"]["step_index"], CASES[case]["params"]["noise_level"]
    ours = flow_sde_step(x, v, sigmas, [step, step], level)
    close(ours.mean, golden(case, "prev_sample_mean"))
    b = golden(case, "std_dev_t").flatten()
    close(ours.transition_std, b * (sigmas[step] - sigmas[step + 1]).sqrt())
    sampled = ours.mean + ours.transition_std.view(-1, 1, 1, 1) * golden(case, "noise")
    close(sampled, golden(case, "prev_sample"))


@pytest.mark.parametrize("case", cases("flow_sde_i", without=("inputs", "nl0.0")))
def test_a_flow_sde_log_probability_is_flow_grpos(case: str) -> None:
    x, v, sigmas, given = shared()
    step, level = CASES[case]["params"]["step_index"], CASES[case]["params"]["noise_level"]
    ours = flow_sde_step(x, v, sigmas, [step, step], level)
    close(gaussian_log_prob(given, ours.mean, ours.transition_std), golden(case, "log_prob_given"))
    close(gaussian_log_prob(golden(case, "prev_sample"), ours.mean, ours.transition_std), golden(case, "log_prob"))


@pytest.mark.parametrize("case", cases("flow_sde_f64"))
def test_a_flow_sde_step_in_float64_agrees_with_mixgrpo(case: str) -> None:
    x, v, sigmas, given = shared(torch.float64)
    step, level = CASES[case]["params"]["step_index"], CASES[case]["params"]["noise_level"]
    ours = flow_sde_step(x, v, sigmas, [step, step], level)
    close(ours.mean, golden(case, "prev_sample_mean"), rtol=1e-12, atol=1e-12)
    close(ours.transition_std, golden(case, "total_std").expand(2), rtol=1e-12, atol=1e-12)
    close(gaussian_log_prob(given, ours.mean, ours.transition_std), golden(case, "log_prob_given"), rtol=1e-7, atol=1e-7)


def test_rows_of_one_batch_may_be_at_different_denoising_steps() -> None:
    x, v, sigmas, given = shared()
    params = CASES["flow_sde_mixed_t"]["params"]
    ours = flow_sde_step(x, v, sigmas, params["step_index"], params["noise_level"])
    close(ours.mean, golden("flow_sde_mixed_t", "prev_sample_mean"))
    close(gaussian_log_prob(given, ours.mean, ours.transition_std), golden("flow_sde_mixed_t", "log_prob_given"))
    dt = torch.stack([sigmas[i] - sigmas[i + 1] for i in params["step_index"]])
    close(ours.transition_std, golden("flow_sde_mixed_t", "std_dev_t").flatten() * dt.sqrt())


def test_a_flow_sde_step_of_video_latents_agrees_with_verl_omni() -> None:
    case = "flow_sde_video5d"
    sigmas = golden("flow_sde_inputs", "sigmas")  # the same table: shift 3, 10 steps
    params = CASES[case]["params"]
    x, v, given = (golden(case, name) for name in ("sample", "model_output", "given_prev_sample"))
    ours = flow_sde_step(x, v, sigmas, [params["step_index"]] * 2, params["noise_level"])
    close(ours.mean, golden(case, "prev_sample_mean"))
    close(ours.transition_std, golden(case, "std_dev_t").flatten() * golden(case, "sqrt_dt"))
    close(gaussian_log_prob(given, ours.mean, ours.transition_std), golden(case, "log_prob_given"))


def test_a_log_probability_without_constants_differs_by_the_constants_alone() -> None:
    case = "flow_sde_no_normalizer"
    x, v, sigmas, given = shared()
    params = CASES[case]["params"]
    ours = flow_sde_step(x, v, sigmas, [params["step_index"]] * 2, params["noise_level"])
    constants = ours.transition_std.log() + 0.5 * math.log(2 * math.pi)
    close(gaussian_log_prob(given, ours.mean, ours.transition_std) + constants, golden(case, "log_prob_given"))


@pytest.mark.parametrize("case", cases("cps_i"))
def test_a_flow_cps_step_is_flow_factorys(case: str) -> None:
    x, v, sigmas, given = shared()
    params, dynamics = CASES[case]["params"], FlowCPS()
    ours = take(dynamics, x, v, sigmas, [params["step_index"]] * 2, params["noise_level"])
    close(ours.mean, golden(case, "prev_sample_mean"))
    close(ours.transition_std, golden(case, "std").flatten())
    close(ours.mean + ours.transition_std.view(-1, 1, 1, 1) * golden(case, "noise"), golden(case, "prev_sample"))
    # The plain squared distance, without constants on either side; without noise theirs is 0 and ours two roundings, 1e-15.
    close(dynamics.log_prob(given, ours, "mean"), golden(case, "log_prob_given"))
    close(dynamics.log_prob(golden(case, "prev_sample"), ours, "mean"), golden(case, "log_prob"))


@pytest.mark.parametrize("case", cases("wan_flow_cps"))
def test_a_flow_cps_step_of_video_latents_that_starts_just_below_sigma_one_is_genrls(case: str) -> None:
    x, v, sigmas, given = shared(case="wan_inputs")
    params, dynamics = CASES[case]["params"], FlowCPS()
    ours = take(dynamics, x, v, sigmas, [params["step_index"]] * 2, params["noise_level"])
    close(ours.mean, golden(case, "prev_sample_mean"))
    close(ours.transition_std, golden(case, "std_dev_t").flatten())
    close(dynamics.log_prob(given, ours, "mean"), golden(case, "log_prob_given"))


@pytest.mark.parametrize("case", cases("dance_i", without=("inputs",)))
def test_a_dance_sde_step_is_dancegrpos(case: str) -> None:
    x, v, sigmas, given = shared(case="dance_inputs")
    step, eta = CASES[case]["params"]["step_index"], CASES[case]["params"]["eta"]
    dynamics = DanceSDE()
    ours = take(dynamics, x, v, sigmas, [step, step], eta)
    close(ours.mean, golden(case, "prev_sample_mean"))
    close(take(dynamics, x, v, sigmas, [step, step], 0.0).mean, golden(case, "ode_prev_sample"))
    # DanceGRPO does not return its standard deviation: it is what its sample has of the noise.
    close(ours.mean + ours.transition_std.view(-1, 1, 1) * golden(case, "noise"), golden(case, "prev_sample"))
    close(ours.transition_std, (eta * (sigmas[step] - sigmas[step + 1]).sqrt()).expand(2))
    close(dynamics.log_prob(given, ours, "mean"), golden(case, "log_prob_given"))
    close(dynamics.log_prob(golden(case, "prev_sample"), ours, "mean"), golden(case, "log_prob"))


@pytest.mark.parametrize("case", cases("dance_f64"))
def test_a_dance_sde_step_in_float64_is_dancegrpos(case: str) -> None:
    x, v, sigmas, given = shared(torch.float64, "dance_inputs")
    step, eta = CASES[case]["params"]["step_index"], CASES[case]["params"]["eta"]
    dynamics = DanceSDE()
    ours = take(dynamics, x, v, sigmas, [step, step], eta)
    close(ours.mean, golden(case, "prev_sample_mean"), rtol=1e-12, atol=1e-12)
    # They take the squares in float32 whatever the inputs are.
    close(dynamics.log_prob(given, ours, "mean").float(), golden(case, "log_prob_given"), rtol=1e-6)


@pytest.mark.parametrize("case", cases("mixgrpo_dance"))
def test_mixgrpos_log_probability_of_a_dance_sde_step_lacks_the_constants_and_nothing_else(case: str) -> None:
    x, v, sigmas, given = shared(case="dance_inputs")
    step, eta = CASES[case]["params"]["step_index"], CASES[case]["params"]["eta"]
    dynamics = DanceSDE()
    ours = take(dynamics, x, v, sigmas, [step, step], eta)
    constants = ours.transition_std.log() + 0.5 * math.log(2 * math.pi)
    close(dynamics.log_prob(given, ours, "mean") + constants, golden(case, "log_prob_given"))
    image = x - sigmas[step] * v
    close(image, golden(case, "pred_original_sample"))


def flow_grpo(make: Callable[..., Recipe], **algorithm: Any) -> FlowGRPO:
    recipe = make(algorithm={"type": "flow_grpo", **algorithm})
    return FlowGRPO(recipe.algorithm.settings, recipe)


def policy_inputs(log_prob: Tensor, old: Tensor, advantages: Tensor) -> LossInputs:
    nothing = torch.zeros(len(log_prob), 1)
    return LossInputs(
        log_prob=log_prob,
        old_log_prob=old,
        advantages=advantages,
        mean=nothing,
        transition_std=torch.ones(len(log_prob)),
        dt=-torch.ones(len(log_prob)),
        velocity=nothing,
        reference_mean=None,
        reference_velocity=None,
    )


@pytest.mark.parametrize("case", cases("grpo_loss_"))
def test_the_summed_policy_loss_divided_by_its_pairs_is_the_peers_mean_loss(
    case: str, tiny_recipe: Callable[..., Recipe]
) -> None:
    params = CASES[case]["params"]
    algorithm = flow_grpo(tiny_recipe, clip_range=params["clip_range"], adv_clip_max=params["adv_clip_max"])
    log_prob = golden(case, "log_prob").clone().requires_grad_()
    out = algorithm.loss(policy_inputs(log_prob, golden(case, "old_log_prob"), golden(case, "advantages")))
    # DanceGRPO divides by its fixed number of accumulated batches and timesteps, on top of the mean over the batch.
    divisor = len(log_prob) * params.get("gradient_accumulation_steps", 1) * params.get("train_timesteps", 1)
    (out.loss.sum() / divisor).backward()
    tolerance = 1e-12 if log_prob.dtype == torch.float64 else 1e-6
    close(out.loss.sum().detach() / divisor, golden(case, "loss"), rtol=tolerance, atol=tolerance)
    assert log_prob.grad is not None
    close(log_prob.grad, golden(case, "grad_log_prob"), rtol=tolerance, atol=tolerance)
    if "ratio" in CASES[case]["tensors"]:
        close(out.metrics["ratio"], golden(case, "ratio"), rtol=tolerance, atol=tolerance)
        close(out.loss.detach(), golden(case, "per_sample_loss"), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", cases("kl_i"))
@pytest.mark.parametrize("form", ["flow_grpo", "exact"])
def test_the_kl_to_the_reference_and_its_gradient_are_flow_grpos_up_to_dt(
    case: str, form: str, tiny_recipe: Callable[..., Recipe]
) -> None:
    _, _, sigmas, _ = shared()
    step, level = CASES[case]["params"]["step_index"], CASES[case]["params"]["noise_level"]
    x, v_ref = golden(case, "sample"), golden(case, "v_ref")
    v = golden(case, "v").clone().requires_grad_()
    ours = flow_sde_step(x, v, sigmas, [step, step], level)
    reference = flow_sde_step(x, v_ref, sigmas, [step, step], level)
    close(ours.mean.detach(), golden(case, "mean"))
    dt = (sigmas[step + 1] - sigmas[step]).expand(2)
    beta = 0.04
    algorithm = flow_grpo(tiny_recipe, kl_beta=beta, kl_form=form)
    out = algorithm.loss(
        LossInputs(
            log_prob=torch.zeros(2),
            old_log_prob=torch.zeros(2),
            advantages=torch.zeros(2),
            mean=ours.mean,
            transition_std=ours.transition_std,
            dt=dt,
            velocity=v,
            reference_mean=reference.mean,
            reference_velocity=v_ref,
        )
    )
    loss = out.loss.sum() / 2
    loss.backward()
    scale = 1.0 if form == "flow_grpo" else float(-1 / dt[0])
    expected = golden(case, "kl") if form == "flow_grpo" else golden(case, "kl_exact")
    # Means that differ by little are subtracted: 1e-4 is float32's share of that.
    close(out.metrics["kl_reference"].mean(), expected, rtol=1e-4)
    close(loss.detach() / beta, expected, rtol=1e-4)
    assert v.grad is not None
    close(v.grad / beta, golden(case, "grad_v") * scale, rtol=1e-3, atol=1e-6)


def test_the_exact_kl_is_genrls(tiny_recipe: Callable[..., Recipe]) -> None:
    case = "kl_genrl_flow_sde"
    sqrt_dt = golden(case, "sqrt_dt").flatten()
    zeros = torch.zeros(2)
    out = flow_grpo(tiny_recipe, kl_beta=1.0).loss(
        LossInputs(
            log_prob=zeros,
            old_log_prob=zeros,
            advantages=zeros,
            mean=golden(case, "mean"),
            transition_std=golden(case, "std_dev_t").flatten() * sqrt_dt,
            dt=-sqrt_dt.square(),
            velocity=zeros,
            reference_mean=golden(case, "mean_ref"),
            reference_velocity=zeros,
        )
    )
    close(out.loss.mean(), golden(case, "kl"))


def grouped(case: str, rewards: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Rewards and the peer's advantages as rows of groups; the golden groups differ in size: padded with NaN (invalid)."""
    groups = golden(case, "group_id").numpy()
    expected = golden(case, "advantages").double().numpy()
    names, sizes = np.unique(groups, return_counts=True)
    rows = np.full((len(names), sizes.max()), np.nan)
    wanted = np.zeros_like(rows)
    for row, name in enumerate(names):
        count = (groups == name).sum()
        rows[row, :count] = rewards.double().numpy()[groups == name]
        wanted[row, :count] = expected[groups == name]
    return rows, wanted


@pytest.mark.parametrize(
    ("case", "std", "ddof", "eps"),
    [
        ("adv_flow_grpo_global1", "batch", 0, 1e-4),
        ("adv_verl_omni_global0", "group", 1, 1e-4),
        ("adv_verl_omni_global1", "batch", 1, 1e-4),
    ],
)
def test_advantages_are_the_peers_with_their_divisor_and_ddof(case: str, std: Any, ddof: int, eps: float) -> None:
    rows, wanted = grouped(case, golden(case, "rewards"))
    ours = group_advantages(rows, std=std, ddof=ddof, eps=eps)
    np.testing.assert_allclose(np.stack([g.values for g in ours]), wanted, rtol=1e-6, atol=1e-6)


def test_population_group_std_is_verl_omnis_rescaled_to_flow_grpos_ddof() -> None:
    case = "adv_verl_omni_global0"
    rows, wanted = grouped(case, golden(case, "rewards"))
    ours = group_advantages(rows, std="group", ddof=0, eps=1e-4)
    rescale = (np.nanstd(rows, axis=1, ddof=1) + 1e-4) / (np.nanstd(rows, axis=1) + 1e-4)
    np.testing.assert_allclose(np.stack([g.values for g in ours]), wanted * rescale[:, None], rtol=1e-6, atol=1e-6)


def test_a_weighted_sum_of_rewards_over_the_batch_std_is_flow_factorys() -> None:
    case = "adv_ff_sum_global1"
    weights = CASES[case]["params"]["weights"]
    total = weights[0] * golden(case, "rewards") + weights[1] * golden(case, "rewards2")
    rows, wanted = grouped(case, total)
    ours = group_advantages(rows, std="batch", ddof=0, eps=0.0)  # theirs is a floor of 1e-6, which is not reached
    np.testing.assert_allclose(np.stack([g.values for g in ours]), wanted, rtol=1e-6, atol=1e-6)


def test_unbiased_std_with_a_tiny_epsilon_is_dance_and_mixgrpos_advantage() -> None:
    case = "adv_mixgrpo_sum_trim0.0"
    params = CASES[case]["params"]
    total = np.zeros((3, 4))
    for name, weight in params["weights"].items():
        rewards = golden(case, f"rewards_{name}").double().numpy().reshape(-1, params["num_generations"])
        groups = group_advantages(rewards, std="group", ddof=params["ddof"], eps=params["eps"])
        total += weight * np.stack([g.values for g in groups])
    np.testing.assert_allclose(total.ravel(), golden(case, "advantages").double().numpy(), rtol=1e-5, atol=1e-5)


def test_the_moving_average_is_flow_grpos() -> None:
    params = CASES["ema_flow_grpo"]["params"]
    weight = nn.Parameter(torch.zeros(()))
    settings = EmaSection(decay=params["decay"], update_interval=params["update_step_interval"])
    average = Ema({"weight": weight}, settings)
    values = []
    for step in range(64):
        with torch.no_grad():
            weight.fill_(step + 1.0)
        average.update()
        values.append(float(average.average["weight"]))
    close(torch.tensor(values, dtype=torch.float64), golden("ema_flow_grpo", "ema"), rtol=1e-6)  # they average in float32


@pytest.mark.parametrize("case", cases("sd3_n"))
def test_the_adapters_noise_schedule_is_sd3s(case: str, tiny_recipe: Callable[..., Recipe]) -> None:
    adapter = SD3Adapter.load(tiny_recipe(), torch.device("cpu"))
    schedule = adapter.noise_schedule(CASES[case]["params"]["num_inference_steps"], 32, 32)
    assert torch.equal(schedule.sigmas, golden(case, "sigmas"))
    assert torch.equal(schedule.timesteps, golden(case, "timesteps"))
