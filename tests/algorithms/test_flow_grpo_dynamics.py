"""Flow-GRPO with each of its dynamics: the ratio is 1 on policy, a step trains, and what does not go with it is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from digenrl.algorithms.flow_grpo import FlowGRPO
from digenrl.config.schema import Recipe
from digenrl.errors import ConfigError
from digenrl.ids import StepOutcome
from digenrl.models.base import Guidance

LEVELS = {"flow_sde": 0.7, "dance_sde": 0.3, "cps": 0.8}
REWARDS = ([1.0, 2.0, 4.0], [0.0, 5.0, 1.0])

MakeRecipe = Callable[..., Recipe]
MakeRig = Callable[..., Any]


@pytest.fixture(params=LEVELS)
def dynamics(request: pytest.FixtureRequest) -> str:
    return request.param


def sections(dynamics: str, **algorithm: Any) -> dict[str, Any]:
    return {
        "rollout": {"noise_level": LEVELS[dynamics], "forward_batch_size": 3},
        "algorithm": {"type": "flow_grpo", "dynamics": dynamics, **algorithm},
        # Three pairs in a pass, as the generator's passes have three rows: equal shapes, equal bits.
        "train": {"timestep_batch_size": 3},
    }


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("selection", ["first", "random", "window"])
def test_the_ratio_is_exactly_one_before_the_first_update_and_not_after(
    dynamics: str, selection: str, reduction: str, make_rig: MakeRig
) -> None:
    rig = make_rig(**sections(dynamics, timestep_selection=selection, log_prob_reduction=reduction))
    trajectory = rig.trajectory()
    rig.trainer.accumulate(trajectory, rig.conditioning(), rig.advantages(*REWARDS))
    first = rig.trainer.optimizer_step()
    assert first.outcome is StepOutcome.APPLIED
    assert first.metrics["ratio_mean"] == 1.0
    assert first.metrics["ratio_std"] == 0.0
    assert first.metrics["logprob_abs_diff"] == 0.0
    assert first.metrics["grad_norm"] > 0
    rig.trainer.accumulate(trajectory, rig.conditioning(), rig.advantages(*REWARDS))
    assert rig.trainer.optimizer_step().metrics["stale/logprob_abs_diff"] > 0  # kept apart: it is one version old


def test_an_update_makes_good_samples_likelier_than_bad_ones(dynamics: str, make_rig: MakeRig) -> None:
    rig = make_rig(**sections(dynamics))
    trajectory, advantages = rig.trajectory(), rig.advantages(*REWARDS)
    assert _surrogate(rig, trajectory, advantages) == 0.0
    rig.trainer.accumulate(trajectory, rig.conditioning(), advantages)
    rig.trainer.optimizer_step()
    assert _surrogate(rig, trajectory, advantages) < 0.0


def _surrogate(rig: Any, trajectory: Any, advantages: Any) -> float:
    """Sum of -A log r over all pairs, at the weights of now; 0 on policy."""
    total, rollout = 0.0, rig.recipe.rollout
    guidance = Guidance(rollout.true_cfg_scale, rollout.guidance_scale)
    with torch.no_grad():
        for group, its in enumerate(advantages):
            rows = torch.arange(3) + 3 * group
            text = rig.conditioning().select(torch.full((3,), group))
            for slot in range(trajectory.denoising_steps.shape[1]):
                step = trajectory.denoising_steps[rows, slot]
                x, sigma, sigma_next = trajectory.latents[rows, slot], trajectory.sigmas[step], trajectory.sigmas[step + 1]
                velocity = rig.adapter.predict(x, rig.schedule.timesteps[step], text, guidance)
                level = trajectory.noise_levels[rows, slot]
                taken = rig.algorithm.dynamics.step(x, velocity, sigma, sigma_next, trajectory.sigmas[1], level)
                log_prob = rig.algorithm.dynamics.log_prob(trajectory.next_latents[rows, slot], taken, "mean")
                log_ratio = log_prob - trajectory.log_probs[rows, slot]
                total -= float((torch.from_numpy(its.values) * log_ratio).sum())
    return total


def test_the_kl_to_the_starting_model_is_zero_at_first_and_positive_after_an_update(dynamics: str, make_rig: MakeRig) -> None:
    rig = make_rig(**sections(dynamics, kl_beta=0.01))
    kl = []
    for _ in range(2):
        rig.trainer.accumulate(rig.trajectory(), rig.conditioning(), rig.advantages(*REWARDS))
        kl.append(rig.trainer.optimizer_step().metrics["kl_reference"])
    assert kl[0] == 0.0
    assert kl[1] > 0.0


@pytest.mark.parametrize("selection", ["first", "random", "window"])
def test_the_last_step_of_every_plan_has_no_noise_and_is_not_trained(dynamics: str, selection: str, make_rig: MakeRig) -> None:
    rig = make_rig(**sections(dynamics, timestep_selection=selection))
    plan = rig.algorithm.plan_steps(rig.samples(), 4)
    assert bool((plan.noise_levels[:, -1] == 0).all())
    assert bool((plan.trained < 3).all())
    sigmas = rig.schedule.sigmas
    x = torch.ones(2, 4)
    last = rig.algorithm.dynamics.step(
        x, x, sigmas[3].expand(2), sigmas[4].expand(2), sigmas[1], plan.noise_levels[:2, -1].contiguous()
    )
    assert last.transition_std.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("dynamics", "reduction", "clip"),
    [
        ("flow_sde", "mean", 1e-4),
        ("dance_sde", "mean", 1e-4),
        ("cps", "mean", 1e-5),
        ("flow_sde", "sum", 0.2),
        ("dance_sde", "sum", 0.2),
        ("cps", "sum", 0.2),
    ],
)
def test_the_default_clip_follows_the_dynamics(dynamics: str, reduction: str, clip: float, tiny_recipe: MakeRecipe) -> None:
    settings = tiny_recipe(**sections(dynamics, log_prob_reduction=reduction)).algorithm.settings
    assert settings.effective_clip_range == (clip, clip)
    given = tiny_recipe(**sections(dynamics, log_prob_reduction=reduction, clip_range=0.05)).algorithm.settings
    assert given.effective_clip_range == (0.05, 0.05)


@pytest.mark.parametrize("level", [0.01, 1.0])
def test_flow_cps_takes_noise_levels_up_to_one(level: float, tiny_recipe: MakeRecipe) -> None:
    recipe = tiny_recipe(rollout={"noise_level": level}, algorithm={"type": "flow_grpo", "dynamics": "cps"})
    recipe.algorithm.settings.check(recipe)


def test_flow_cps_refuses_a_noise_level_above_one(tiny_recipe: MakeRecipe) -> None:
    recipe = tiny_recipe(rollout={"noise_level": 1.2}, algorithm={"type": "flow_grpo", "dynamics": "cps"})
    with pytest.raises(
        ConfigError, match=r"rollout\.noise_level \(1\.2\) is more than 1 with algorithm\.dynamics: cps"
    ) as caught:
        recipe.algorithm.settings.check(recipe)
    assert caught.value.why
    assert "noise_level=0.8" in caught.value.fix
    for other in ("flow_sde", "dance_sde"):
        recipe = tiny_recipe(rollout={"noise_level": 1.2}, algorithm={"type": "flow_grpo", "dynamics": other})
        recipe.algorithm.settings.check(recipe)


def test_flow_grpos_kl_form_is_refused_for_other_dynamics(dynamics: str, tiny_recipe: MakeRecipe) -> None:
    recipe = tiny_recipe(**sections(dynamics, kl_form="flow_grpo"))
    if dynamics == "flow_sde":
        recipe.algorithm.settings.check(recipe)
        return
    with pytest.raises(ConfigError, match=f"kl_form: flow_grpo does not go with algorithm.dynamics: {dynamics}") as caught:
        recipe.algorithm.settings.check(recipe)
    assert caught.value.why
    assert "kl_form=exact" in caught.value.fix


def published() -> list[dict[str, Any]]:
    page = Path(__file__).parents[2] / "docs" / "algorithms" / "flow_grpo.md"
    return [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)]


@pytest.mark.parametrize("settings", published(), ids=lambda settings: settings["run"]["name"])
def test_the_published_settings_of_the_docs_pass_the_check(settings: dict[str, Any], tiny_recipe: MakeRecipe) -> None:
    recipe = tiny_recipe(**settings)
    recipe.algorithm.settings.check(recipe)


def test_a_recipe_without_dynamics_is_flow_sde(tiny_recipe: MakeRecipe) -> None:
    recipe = tiny_recipe()
    assert type(FlowGRPO(recipe.algorithm.settings, recipe).dynamics).__name__ == "FlowSDE"
