"""DDIM's step, MixGRPO's windows and DanceGRPO's best of n against the peers' own numbers, and where we differ on purpose."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import groupby
from typing import Any

import numpy as np
import pytest
import torch

from digenrl.algorithms.advantages import best_of_n
from digenrl.algorithms.base import GroupAdvantages, LossInputs
from digenrl.algorithms.flow_grpo import FlowGRPO
from digenrl.algorithms.windows import window_start
from digenrl.config.schema import Recipe
from digenrl.config.settings.algorithms import MixGRPOSettings
from digenrl.diffusion.ddim import ddim_next_timestep, ddim_step
from digenrl.diffusion.dynamics import FlowSDE, gaussian_kl, gaussian_log_prob
from tests.golden.cases import CASES, cases, close, golden


@pytest.mark.parametrize("case", cases("ddim_float"))
def test_a_ddim_step_is_ddpos(case: str) -> None:
    params = CASES[case]["params"]
    x, output, given = (golden(case, name) for name in ("sample", "model_output", "given_prev_sample"))
    alphas = golden("ddim_alphas", "alphas_cumprod").to(x.dtype)
    now = params["timestep"]
    assert now == golden("ddim_alphas", "timesteps")[params["step"]]
    then = ddim_next_timestep(now, params["num_steps"])
    ours = ddim_step(x, output, alphas[now].expand(len(x)), alphas[then].expand(len(x)), params["eta"])
    single = x.dtype == torch.float32
    # 1 - a of nearly equal alphas loses digits; the peers take log(2 pi) in float32.
    rtol, atol = (1e-4, 1e-5) if single else (1e-10, 1e-10)
    sampled = ours.mean + ours.transition_std.view(-1, 1, 1, 1) * golden(case, "noise")
    close(sampled, golden(case, "prev_sample"), rtol=rtol, atol=atol)
    close(
        gaussian_log_prob(given, ours.mean, ours.transition_std),
        golden(case, "log_prob_given"),
        rtol=1e-4 if single else 1e-7,
        atol=1e-4 if single else 1e-7,
    )


def test_ddims_last_step_of_ddpo_stays_at_timestep_zero() -> None:
    assert ddim_next_timestep(1, 50) == 0
    assert ddim_next_timestep(981, 50) == 961


@pytest.mark.parametrize("prediction", ["sample", "v_prediction"])
def test_what_a_network_predicts_does_not_change_ddims_step(prediction: Any) -> None:
    case = "ddim_float64_i25_eta1.0"
    x, noise = golden(case, "sample"), golden(case, "model_output")
    alphas = golden("ddim_alphas", "alphas_cumprod").double()
    a, b = alphas[481].expand(len(x)), alphas[461].expand(len(x))
    image = (x - (1 - alphas[481]).sqrt() * noise) / alphas[481].sqrt()
    output = image if prediction == "sample" else alphas[481].sqrt() * noise - (1 - alphas[481]).sqrt() * image
    ours, wanted = ddim_step(x, output, a, b, 1.0, prediction), ddim_step(x, noise, a, b, 1.0)
    close(ours.mean, wanted.mean, rtol=1e-10, atol=1e-10)
    assert torch.equal(ours.transition_std, wanted.transition_std)


def test_ddim_without_noise_lands_where_image_and_noise_say() -> None:
    x, noise = torch.randn(2, 3, 4, 4, dtype=torch.float64), torch.randn(2, 3, 4, 4, dtype=torch.float64)
    a, b = torch.full((2,), 0.5, dtype=torch.float64), torch.full((2,), 0.8, dtype=torch.float64)
    ours = ddim_step(x, noise, a, b, 0.0)
    image = (x - math.sqrt(0.5) * noise) / math.sqrt(0.5)
    close(ours.mean, math.sqrt(0.8) * image + math.sqrt(0.2) * noise, rtol=1e-12, atol=1e-12)
    assert ours.transition_std.tolist() == [0.0, 0.0]


WINDOWS = {
    "decay": {"window_schedule": "decay", "window_steps": 8, "window_min_steps": 2, "window_stride": 1, "sde_window_size": 2},
    "exp_decay": {"window_schedule": "exp_decay", "window_steps": 5, "window_stride": 1, "sde_window_size": 2},
    "progressive_rollback": {"window_schedule": "progressive", "window_steps": 2, "sde_window_size": 4},
}


@pytest.mark.parametrize("name", WINDOWS)
def test_full_windows_are_mixgrpos_and_short_or_empty_ones_are_none_of_ours(name: str) -> None:
    case = f"mixgrpo_window_{name}"
    params = CASES[case]["params"]
    settings = MixGRPOSettings(**WINDOWS[name])  # type: ignore[arg-type]
    size, low, high = settings.sde_window_size, params["start"], params["max_timesteps"]
    theirs = [tuple(row) for row in golden(case, "windows").tolist()]
    full = [start for start, length in theirs[: next(i for i, w in enumerate(theirs) if w[1] < size)]]
    assert len(full) >= 4
    ours = [window_start(step, settings, low, high) for step in range(200)]
    assert ours[: len(full)] == full
    assert all(low <= start <= high - size for start in ours)
    assert max(ours) == high - size, "the last place ends where the range ends"
    assert any(length == 0 for _, length in theirs) or any(0 < length < size for _, length in theirs)


def test_mixgrpos_window_begins_anew_or_stays_at_the_end_of_the_range() -> None:
    settings = MixGRPOSettings(window_steps=2, sde_window_size=4)
    starts = [window_start(step, settings, 0, 10) for step in range(8)]
    assert starts == [0, 0, 4, 4, 6, 6, 0, 0]  # theirs: 8 with half a window
    stays = settings.model_copy(update={"window_at_end": "stay"})
    assert [start for start, _ in groupby(window_start(step, stays, 0, 10) for step in range(50))] == [0, 4, 6]


@pytest.mark.parametrize("case", cases("bestofn"))
def test_the_best_of_n_are_dancegrpos_for_a_single_prompt(case: str) -> None:
    params = CASES[case]["params"]
    score = params["vq_coef"] * golden(case, "vq_advantages") + params["mq_coef"] * golden(case, "mq_advantages")
    everything = GroupAdvantages(values=np.zeros(24), kept=np.ones(24, dtype=np.bool_), zero_variance=False)
    ours = best_of_n(everything, params["bestofn"], score.double().numpy())
    assert np.flatnonzero(ours.kept).tolist() == sorted(golden(case, "selected_indices").tolist())


def test_a_step_outside_mixgrpos_window_is_the_euler_step_without_a_log_probability_of_use() -> None:
    case = "mixgrpo_ode_step_i4"
    x, v, sigmas = (golden(case, name) for name in ("sample", "model_output", "sigmas"))
    step = FlowSDE().step(x, v, sigmas[4].expand(2), sigmas[5].expand(2), sigmas[1], torch.zeros(2))
    close(step.mean, golden(case, "prev_sample"))
    assert step.transition_std.tolist() == [0.0, 0.0]  # theirs gives the log-probability under the SDE's, and does not use it


@pytest.mark.parametrize("index", [1, 10])
def test_a_flow_sde_step_of_genrls_video_schedule_is_theirs_after_the_first_step(index: int) -> None:
    case = f"wan_flow_sde_i{index}_clip0"
    x, v, sigmas, given = (golden("wan_inputs", name) for name in ("sample", "model_output", "sigmas", "given_prev_sample"))
    level = torch.full((2,), CASES[case]["params"]["noise_level"])
    step = FlowSDE().step(x, v, sigmas[index].expand(2), sigmas[index + 1].expand(2), sigmas[1], level)
    close(step.mean, golden(case, "prev_sample_mean"))
    close(gaussian_log_prob(given, step.mean, step.transition_std), golden(case, "log_prob_given"))


def test_the_first_step_of_a_schedule_that_starts_just_below_one_does_not_explode_as_genrls_does() -> None:
    x, v, sigmas = (golden("wan_inputs", name) for name in ("sample", "model_output", "sigmas"))
    assert 0.99 < float(sigmas[0]) < 1
    step = FlowSDE().step(x, v, sigmas[0].expand(2), sigmas[1].expand(2), sigmas[1], torch.full((2,), 0.7))
    theirs = golden("wan_flow_sde_i0_clip0", "prev_sample_mean")
    assert float(theirs.abs().max()) > 1e3
    # a sqrt(s / (1 - sigma_1)) sqrt(s - sigma_1): a, but for s just below 1.
    assert step.transition_std.tolist() == pytest.approx([0.7, 0.7], rel=1e-3)
    assert float(step.mean.abs().max()) < 10


def test_genrls_flow_cps_kl_is_ours_without_the_gaussians_divisor(tiny_recipe: Callable[..., Recipe]) -> None:
    case = "kl_genrl_flow_cps"
    std = golden(case, "std_dev_t").flatten()
    ours = gaussian_kl(golden(case, "mean"), golden(case, "mean_ref"), std)
    close((ours * 2 * std.square()).mean(), golden(case, "kl"))
    # The v-based form is that squared difference, of velocities.
    recipe = tiny_recipe(algorithm={"type": "flow_grpo", "dynamics": "cps", "kl_beta": 1.0, "kl_form": "v_based"})
    zeros = torch.zeros(2)
    out = FlowGRPO(recipe.algorithm.settings, recipe).loss(  # type: ignore[arg-type]
        LossInputs(
            log_prob=zeros,
            old_log_prob=zeros,
            advantages=zeros,
            mean=torch.zeros(2, 1),
            transition_std=std,
            dt=-torch.ones(2),
            velocity=golden(case, "mean"),
            reference_mean=torch.zeros(2, 1),
            reference_velocity=golden(case, "mean_ref"),
        )
    )
    close(out.loss.mean(), golden(case, "kl"))
