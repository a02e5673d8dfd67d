"""Sizes and settings that do not fit one another: each refusal says what, why and how, with both values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from digenrl.config.checks import check_recipe
from digenrl.config.loader import load_recipe
from digenrl.config.schema import Recipe
from digenrl.config.settings.algorithms import FlowGRPOSettings
from digenrl.errors import ConfigError

Write = Callable[[str | bytes], Path]


@pytest.fixture
def recipe(write: Write, text: str) -> Callable[..., Recipe]:
    path = write(text)
    return lambda *overrides: load_recipe(path, overrides)


WINDOW = "algorithm.timestep_selection=window"


@pytest.mark.parametrize(
    ("overrides", "what", "fix"),
    [
        (["algorithm.dynamics=ode"], "algorithm.dynamics: ode leaves nothing to train", "flow_sde"),
        (["rollout.noise_level=0"], "rollout.noise_level: 0 leaves nothing to train", "noise_level=0.7"),
        (["rollout.num_generations=1"], "rollout.num_generations (1) is too small for group advantages", "num_generations=8"),
        (["rollout.num_inference_steps=1"], "rollout.num_inference_steps (1) leaves no step to train", "num_inference_steps=8"),
        (
            [WINDOW, "algorithm.sde_window_size=8"],
            "algorithm.sde_window_size (8) does not fit into steps 0 to 6 of the 8 denoising",
            "at most 7",
        ),
        ([WINDOW, "algorithm.sde_window_range=[0, 8]"], "does not fit into steps 0 to 7 of the 8", "num_inference_steps=9"),
        ([WINDOW, "algorithm.sde_window_range=[5, 5]"], "does not fit into steps 5 to 4", "a range inside [0, 7]"),
        ([WINDOW, "algorithm.sde_window_range=[-1, 4]"], "does not fit into steps -1 to 3", "a range inside [0, 7]"),
        ([WINDOW, "algorithm.sde_window_range=[3, 5]", "algorithm.sde_window_size=3"], "does not fit into steps 3", "at most 2"),
        (
            ["algorithm.advantage_std=batch"],
            "algorithm.advantage_std: batch needs schedule.update_after: step",
            "update_after=step",
        ),
        (
            ["schedule.groups_per_micro_batch=5"],
            "schedule.groups_per_micro_batch (5) is larger than rollout.prompts_per_step (4)",
            "groups_per_micro_batch=4",
        ),
        (["rewards.0.weight=0"], "All weights in rewards are 0", "weight of 1"),
        (
            ["rollout.guidance_scale=3.5"],
            "rollout.guidance_scale is for models with embedded guidance",
            "rollout.true_cfg_scale=3.5",
        ),
        (
            ["eval={prompts: x.txt, guidance_scale: 2}"],
            "eval.guidance_scale is for models with embedded guidance",
            "eval.true_cfg_scale=2.0",
        ),
        (["rollout.height=33"], "rollout.height (33) is not a multiple of 8", "rollout.height=32 or 40"),
        (["rollout.width=100"], "rollout.width (100) is not a multiple of 8", "rollout.width=96 or 104"),
        (["model.path=no/such/folder"], "there is no folder 'no/such/folder'", "hub id"),
        (["model.path=./owner/name"], "there is no folder", "hub id"),
        (["model.path=nothing"], "there is no folder 'nothing'", "hub id"),
        (["model.path=builtin:circles"], "model.path: 'builtin:circles' is not shipped with DigenRL", "builtin:shapes"),
        (["model.path=~nobody-of-that-name/x"], "the home folder in '~nobody-of-that-name/x' is not known", "whole path"),
        (["model.path=" + "x" * 5000], "there is no folder", "hub id"),
    ],
)
def test_what_does_not_fit_is_refused(recipe: Callable[..., Recipe], overrides: list[str], what: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_recipe(recipe(*overrides))
    assert what in caught.value.what
    assert fix in caught.value.fix
    assert caught.value.why or "builtin" in what or "home" in what


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["rollout.num_generations=2", "rollout.num_inference_steps=2"],
        [WINDOW, "algorithm.sde_window_size=7"],
        [WINDOW, "algorithm.sde_window_size=2", "algorithm.sde_window_range=[5, 7]"],
        ["algorithm.advantage_std=batch", "schedule.update_after=step"],
        ["schedule.groups_per_micro_batch=4"],
        ["rewards.0.weight=-1"],
        ["rollout.true_cfg_scale=4.5"],
        ["rollout.height=40", "rollout.width=8"],
    ],
)
def test_what_just_fits_is_taken(recipe: Callable[..., Recipe], overrides: list[str]) -> None:
    folder = check_recipe(recipe(*overrides))
    assert folder is not None
    assert folder.pixel_multiple == 8


def test_a_hub_id_is_looked_at_when_the_run_starts(recipe: Callable[..., Recipe]) -> None:
    assert check_recipe(recipe("model.path=stabilityai/stable-diffusion-3.5-medium", "rollout.height=1000")) is None


def test_a_local_folder_is_looked_at_although_it_could_be_a_hub_id(
    recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"'owner/name' has no model_index\.json"):
        check_recipe(recipe("model.path=owner/name"))


@pytest.mark.parametrize("steps", [2, 3, 8, 10, 20, 25, 40, 50])
@pytest.mark.parametrize("percent", [1, 10, 28, 29, 30, 40, 56, 58, 60, 70, 99, 100])
def test_the_trained_share_of_the_steps_is_rounded_down_exactly_and_never_holds_the_last_step(steps: int, percent: int) -> None:
    settings = FlowGRPOSettings(timestep_fraction=percent / 100)
    assert settings.num_trained_steps(steps) == max(1, min(steps * percent // 100, steps - 1))


def test_a_window_trains_its_length() -> None:
    settings = FlowGRPOSettings(timestep_selection="window", sde_window_size=3)
    assert settings.num_trained_steps(8) == 3
    assert settings.window_range(8) == (0, 7)
    assert FlowGRPOSettings(sde_window_range=(1, 5)).window_range(8) == (1, 5)


def test_the_clip_range_fits_the_form_of_the_log_probability_unless_it_is_given() -> None:
    assert FlowGRPOSettings().effective_clip_range == (1e-4, 1e-4)
    assert FlowGRPOSettings(log_prob_reduction="sum").effective_clip_range == (0.2, 0.2)
    assert FlowGRPOSettings(clip_range=0.3).effective_clip_range == (0.3, 0.3)
    assert FlowGRPOSettings(clip_range=(0.1, 0.3)).effective_clip_range == (0.1, 0.3)
