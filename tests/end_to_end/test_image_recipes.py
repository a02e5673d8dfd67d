"""The shipped recipes of images, with tiny models in the place of the weights: checked, and trained for two steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from digenrl.cli import check
from digenrl.config.loader import load_recipe
from digenrl.metrics.log import read_metrics
from digenrl.runtime.train import train
from tests.rewards.judge import Judge
from tests.rewards.services import serving

RECIPES = Path(__file__).parents[2] / "recipes"
FAMILY = {"sd35_medium_flow_grpo": "sd3", "flux1_dev_flow_grpo": "flux", "qwen_image_flow_grpo": "qwen_image"}
SMALL = (
    "run.device=cpu",
    "cluster.placement=inline",
    "rollout.prompts_per_step=2",
    "rollout.num_generations=4",
    "rollout.num_inference_steps=6",
    "rollout.height=32",
    "rollout.width=48",
    "rollout.forward_batch_size=4",
    "model.max_sequence_length=64",
    "train.steps=2",
    "train.timestep_batch_size=4",
    "log.tensorboard=false",
    "eval=null",
)


def published(name: str) -> str:
    return str(RECIPES / f"{name}.yaml")


@pytest.mark.parametrize("name", FAMILY)
def test_a_recipe_passes_the_check_as_it_is_and_with_a_tiny_model(
    name: str, tiny_folder: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    check.run(published(name), [], as_json=False)
    assert "warning" not in capsys.readouterr().out
    # The tiny SD3 draws at most 256 pixels.
    smaller = ["rollout.height=256", "rollout.width=256"] if name.startswith("sd35") else []
    check.run(published(name), [f"model.path={tiny_folder(FAMILY[name])}", *smaller], as_json=False)
    assert capsys.readouterr().out.endswith("ok\n")


@pytest.mark.parametrize(
    ("name", "steps", "trained", "groups", "what"),
    [
        ("sd35_medium_flow_grpo", (10, 40), 9, (48, 24), {"clip": 1e-4, "cfg": 4.5, "embedded": None, "rank": 32, "noise": 0.7}),
        ("flux1_dev_flow_grpo", (6, 28), 5, (48, 24), {"clip": 1e-4, "cfg": 1.0, "embedded": 3.5, "rank": 64, "noise": 0.9}),
        ("qwen_image_flow_grpo", (10, 50), 2, (32, 16), {"clip": 1e-4, "cfg": 4.0, "embedded": None, "rank": 64, "noise": 1.2}),
    ],
)
def test_a_recipe_has_the_published_hyperparameters(
    name: str, steps: tuple[int, int], trained: int, groups: tuple[int, int], what: dict[str, float | None]
) -> None:
    recipe = load_recipe(published(name))
    algorithm, rollout = recipe.algorithm.settings, recipe.rollout
    assert recipe.eval is not None and recipe.model.lora is not None
    assert (rollout.num_inference_steps, recipe.eval.num_inference_steps) == steps
    assert algorithm.num_trained_steps(steps[0]) == trained
    assert (rollout.prompts_per_step, rollout.num_generations) == groups
    assert (rollout.height, rollout.width, recipe.train.learning_rate) == (512, 512, 3e-4)
    assert recipe.model.lora.alpha == 2 * recipe.model.lora.rank
    assert algorithm.kl_beta == (0.04 if name.startswith("sd35") else 0.0)
    found = {
        "clip": algorithm.effective_clip_range[0],
        "cfg": rollout.true_cfg_scale,
        "embedded": rollout.guidance_scale,
        "rank": recipe.model.lora.rank,
        "noise": rollout.noise_level,
    }
    assert found == what
    assert (recipe.eval.true_cfg_scale, recipe.eval.guidance_scale) == (rollout.true_cfg_scale, rollout.guidance_scale)


@pytest.mark.parametrize("name", [pytest.param("sd35_medium_flow_grpo", marks=pytest.mark.slow), *list(FAMILY)[1:]])
def test_two_steps_of_a_recipe_train_on_a_tiny_model(name: str, tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    small = [*SMALL, f"model.path={tiny_folder(FAMILY[name])}", f"run.output_dir={tmp_path / 'run'}"]
    with serving(Judge()) as url:
        judge = [f"rewards.0.url={url}/v1", "rewards.0.model=tiny-vl"] if name.startswith("qwen") else []
        train(load_recipe(published(name), [*small, *judge]))
    steps = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if row["kind"] == "train"]
    assert len(steps) == 2
    assert all(row["grad_norm"] > 0 and row["reward_std"] > 0 for row in steps)
    # bfloat16, and passes of one shape in rollout and training.
    assert steps[0]["logprob_abs_diff"] == 0.0
    assert steps[0]["ratio_mean"] == 1.0
