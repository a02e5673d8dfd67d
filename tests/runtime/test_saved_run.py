"""Runs and bare models opened as one thing: which weights, which settings, and what is said when something is missing."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from digenrl.config.schema import Recipe
from digenrl.errors import ConfigError
from digenrl.runtime.fresh_folder import check_is_free, fresh_folder
from digenrl.runtime.saved_run import OpenOptions, SavedModel, find_model, is_run, load_model, open_model
from digenrl.testing.tiny_runs import build_run
from digenrl.training.checkpoint import load_newest, save_checkpoint

RecipeMaker = Callable[..., Recipe]
EVAL = {"prompts": "builtin:shapes/heldout.jsonl", "num_inference_steps": 3, "seed": 5}


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory, tiny_recipe: RecipeMaker) -> Path:
    """A LoRA run with an average. Read only."""
    recipe = tiny_recipe(model={"lora": {"rank": 4, "alpha": 16}}, train={"ema": {"decay": 0.9}}, eval=EVAL)
    return build_run(tmp_path_factory.mktemp("runs") / "tiny", recipe)


@pytest.fixture
def copied_run(tiny_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_run, tmp_path / "copied"))


def held(saved: SavedModel) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in load_model(saved).policy.parameters.items()}


@pytest.mark.parametrize(("asked", "part"), [(None, "ema"), ("ema", "ema"), ("raw", "parameters")])
def test_a_run_opens_with_its_averaged_weights_unless_raw_ones_are_asked_for(asked: Any, part: str, tiny_run: Path) -> None:
    saved = find_model(str(tiny_run), OpenOptions(weights=asked))
    wanted = load_newest(tiny_run / "checkpoints")[0].weights
    found = held(saved)
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted[part].items())
    assert any(not torch.equal(wanted["ema"][name], wanted["parameters"][name]) for name in found)
    assert saved.weights == ("raw" if part == "parameters" else "ema")
    assert saved.policy_version == 3


def test_a_run_without_an_average_opens_raw_and_refuses_an_average(tmp_path: Path, tiny_recipe: RecipeMaker) -> None:
    folder = build_run(tmp_path / "run", tiny_recipe(model={"lora": {"rank": 2}}))
    assert find_model(str(folder)).weights == "raw"
    with pytest.raises(ConfigError, match=r"train\.ema"):
        find_model(str(folder), OpenOptions(weights="ema"))


def test_the_newest_whole_checkpoint_is_used_and_a_damaged_newer_one_is_told_of(copied_run: Path) -> None:
    checkpoints = copied_run / "checkpoints"
    weights = load_newest(checkpoints)[0].weights
    newer = save_checkpoint(checkpoints, 7, weights, {}, keep_last=5)
    assert find_model(str(copied_run)).policy_version == 7
    (newer / "ema.safetensors").write_bytes(b"damaged")
    saved = find_model(str(copied_run))
    assert saved.policy_version == 3
    assert "ema.safetensors" in saved.warnings[0]


def test_a_run_keeps_its_own_eval_settings_and_changes_replace_them(tiny_run: Path) -> None:
    assert find_model(str(tiny_run)).section.seed == 5
    saved = find_model(str(tiny_run), OpenOptions(changes={"eval.seed": 6, "rollout.height": 48, "eval.true_cfg_scale": None}))
    assert (saved.section.seed, saved.recipe.rollout.height, saved.section.num_inference_steps) == (6, 48, 3)
    assert saved.section.true_cfg_scale == 1


def test_guidance_that_is_asked_for_reaches_the_loaded_model(tiny_run: Path) -> None:
    opened = open_model(str(tiny_run), OpenOptions(changes={"eval.true_cfg_scale": 3.0}))
    assert "negative_prompt_embeds" in opened.adapter.encode_prompts(["a"], [""]).tensors


@pytest.mark.parametrize("changes", [{"rollout.height": -8}, {"eval.true_cfg_scale": 0.5}, {"eval.guidance_scale": 4.0}])
def test_a_change_that_cannot_work_is_refused_by_its_key(changes: dict[str, Any], tiny_run: Path) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes)).replace(".", r"\.")):
        open_model(str(tiny_run), OpenOptions(changes=changes))


def test_a_run_from_a_machine_with_more_gpus_opens_on_what_is_here(copied_run: Path) -> None:
    path = copied_run / "recipe.yaml"
    path.write_text(path.read_text(encoding="utf-8").replace("device: cpu", "device: cuda:99"), encoding="utf-8")
    assert find_model(str(copied_run)).device.type in {"cpu", "cuda"}
    with pytest.raises(ConfigError, match="cuda:99"):
        find_model(str(copied_run), OpenOptions(device="cuda:99"))


def test_the_shipped_model_opens_at_the_size_and_the_text_length_it_was_trained_at() -> None:
    saved = find_model("builtin:shapes")
    assert (saved.recipe.rollout.height, saved.recipe.rollout.width) == (32, 32)
    assert saved.recipe.model.settings.model_dump()["max_sequence_length"] == 10
    assert (saved.weights, saved.run, saved.held_out, saved.name) == ("base", None, None, "shapes")


def test_a_model_with_a_third_text_encoder_keeps_its_tokens(tiny_sd3: Path) -> None:
    opened = open_model(str(tiny_sd3), OpenOptions(changes={"rollout.height": 32}))
    rollout = opened.recipe.rollout
    assert (rollout.height, rollout.width) == (32, 64)  # the tiny transformer's 8 latents, times the VAE's 8
    assert opened.recipe.model.settings.model_dump()["max_sequence_length"] == 256


def test_a_model_says_when_its_size_is_not_known(tiny_sd3: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_sd3, tmp_path / "model"))
    config = folder / "transformer" / "config.json"
    content = json.loads(config.read_text(encoding="utf-8"))
    config.write_text(json.dumps({**content, "sample_size": None}), encoding="utf-8")
    with pytest.raises(ConfigError, match="image size") as caught:
        find_model(str(folder))
    assert "--height" in caught.value.fix
    assert find_model(str(folder), OpenOptions(changes={"rollout.height": 32, "rollout.width": 32})).recipe.rollout.width == 32


def test_a_judge_gives_a_model_its_rewards_and_settings_and_no_adapters(tiny_sd3: Path, tiny_recipe: RecipeMaker) -> None:
    judge = tiny_recipe(model={"path": "elsewhere", "lora": {"rank": 4}}, eval=EVAL, rewards=[{"type": "shapes"}])
    saved = find_model(str(tiny_sd3), OpenOptions(judge=judge))
    assert saved.recipe.model.path == str(tiny_sd3)
    assert saved.recipe.model.lora is None
    assert (saved.recipe.rewards[0].name, saved.section.seed, saved.held_out) == ("shapes", 5, EVAL["prompts"])


def test_a_model_has_no_average(tiny_sd3: Path) -> None:
    with pytest.raises(ConfigError, match="only a run"):
        find_model(str(tiny_sd3), OpenOptions(weights="ema"))


def test_a_model_of_an_unknown_family_is_named(tiny_sd3: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_sd3, tmp_path / "model"))
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    (folder / "model_index.json").write_text(json.dumps({**index, "_class_name": "OddPipeline"}), encoding="utf-8")
    with pytest.raises(ConfigError, match="OddPipeline"):
        find_model(str(folder))


@pytest.mark.parametrize(
    ("files", "match"),
    [
        ([], r"no recipe\.yaml and no model_index\.json"),
        (["metrics.jsonl"], r"its recipe\.yaml is missing"),
        (["pytorch_lora_weights.safetensors"], "exported adapter"),
    ],
)
def test_a_folder_that_is_neither_run_nor_model_is_told_what_is_missing(files: list[str], match: str, tmp_path: Path) -> None:
    for file in files:
        (tmp_path / file).touch()
    with pytest.raises(ConfigError, match=match):
        is_run(str(tmp_path))


@pytest.mark.parametrize("source", ["./nothing", "runs/nothing/here", "nothing", "runs/nothing", "builtin:nothing"])
def test_a_source_that_is_not_there_is_named(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=source):
        find_model(source)


def test_a_run_that_has_saved_nothing_yet_says_so(copied_run: Path) -> None:
    shutil.rmtree(copied_run / "checkpoints")
    with pytest.raises(ConfigError, match="no complete checkpoint"):
        find_model(str(copied_run))


def test_weights_of_another_recipe_are_refused(copied_run: Path) -> None:
    path = copied_run / "recipe.yaml"
    path.write_text(path.read_text(encoding="utf-8").replace("rank: 4", "rank: 5"), encoding="utf-8")
    with pytest.raises(ConfigError, match="another model"):
        open_model(str(copied_run))


def test_a_folder_appears_only_when_all_went_well_and_never_replaces_another(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "out"
    with pytest.raises(ZeroDivisionError), fresh_folder(target) as draft:
        (draft / "half").touch()
        assert not target.exists()
        raise ZeroDivisionError
    assert os.listdir(target.parent) == []
    target.mkdir()
    with fresh_folder(target) as draft:
        (draft / "whole").touch()
    assert os.listdir(target) == ["whole"]
    assert os.listdir(target.parent) == ["out"]
    with pytest.raises(ConfigError, match="not an empty folder"):
        check_is_free(target)
    with pytest.raises(ConfigError, match="not an empty folder"), fresh_folder(target / "whole"):
        pass
