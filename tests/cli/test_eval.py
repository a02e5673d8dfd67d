"""``digenrl eval``: the numbers of training's own evaluation, every prompt once, and files that are there as a whole."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from digenrl.cli import evaluate
from digenrl.config.schema import Recipe
from digenrl.data.prompts import load_prompts
from digenrl.errors import ConfigError
from digenrl.metrics import sheet
from digenrl.rewards.compose import WeightedRewards
from digenrl.runtime.saved_run import OpenOptions, open_model
from digenrl.testing.tiny_runs import build_run
from digenrl.workers.evaluator import Evaluation, Evaluator
from digenrl.workers.scorer import Scorer

RecipeMaker = Callable[..., Recipe]
SHIPPED = Path(__file__).parents[2] / "digenrl" / "assets" / "shapes" / "heldout.jsonl"
REWARDS = [{"type": "shapes"}, {"type": "jpeg", "weight": 0.01}]


@pytest.fixture(scope="session")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven shipped prompts, of all five categories, and one of them twice."""
    lines = SHIPPED.read_text(encoding="utf-8").splitlines(keepends=True)[:6]
    path = tmp_path_factory.mktemp("prompts") / "held_out.jsonl"
    path.write_text("".join([*lines, lines[1]]), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def shapes_recipe(tiny_recipe: RecipeMaker, held_out: Path) -> Recipe:
    return tiny_recipe(
        model={"path": "builtin:shapes", "max_sequence_length": 10, "lora": {"rank": 4, "alpha": 16}},
        train={"ema": {"decay": 0.9}},
        eval={"prompts": str(held_out), "num_inference_steps": 4},
        rewards=REWARDS,
    )


@pytest.fixture(scope="session")
def made_run(tmp_path_factory: pytest.TempPathFactory, shapes_recipe: Recipe) -> Path:
    """A LoRA run of the shipped model. Read only."""
    return build_run(tmp_path_factory.mktemp("runs") / "shapes", shapes_recipe)


@pytest.fixture
def a_run(made_run: Path, tmp_path: Path) -> Path:
    """A copy that an evaluation may write into."""
    return Path(shutil.copytree(made_run, tmp_path / "a_run"))


@pytest.fixture
def digenrl_eval(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    def call(source: Path | str, **options: Any) -> dict[str, Any]:
        capsys.readouterr()
        evaluate.run(str(source), as_json=True, **options)
        printed: dict[str, Any] = json.loads(capsys.readouterr().out)
        return printed

    return call


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "scores.jsonl").read_text(encoding="utf-8").splitlines()]


def as_in_training(run: Path, weights: Any) -> Evaluation:
    """The evaluator wired the way training does it."""
    opened = open_model(str(run), OpenOptions(weights=weights))
    recipe = opened.recipe
    rewards = WeightedRewards.from_recipe(recipe.rewards)
    scorer = Scorer(opened.adapter, rewards, forward_batch_size=recipe.rollout.forward_batch_size)
    assert recipe.eval is not None
    prompts = load_prompts(Path(recipe.eval.prompts)).prompts
    return Evaluator(opened.policy, None, scorer, recipe, recipe.eval, prompts).evaluate()


@pytest.mark.parametrize(("weights", "name"), [(None, "eval-step-3"), ("raw", "eval-step-3-raw")])
def test_the_numbers_are_those_of_training_bit_for_bit(
    weights: Any, name: str, a_run: Path, digenrl_eval: Callable[..., Any]
) -> None:
    summary = digenrl_eval(a_run, weights=weights)
    wanted = as_in_training(a_run, weights or "ema")
    assert summary["reward"] == wanted.reward
    assert summary["parts"] == wanted.parts
    assert [row["reward"] for row in rows_of(a_run / name)] == wanted.rewards.tolist()
    assert Path(summary["out"]) == a_run / name


def test_raw_and_averaged_weights_get_other_numbers(a_run: Path, digenrl_eval: Callable[..., Any]) -> None:
    raw, averaged = digenrl_eval(a_run, weights="raw"), digenrl_eval(a_run)
    assert (raw["weights"], averaged["weights"]) == ("raw", "ema")
    assert raw["parts"]["jpeg"] != averaged["parts"]["jpeg"]


def test_every_prompt_counts_once_in_the_whole_and_in_its_category(
    a_run: Path, held_out: Path, digenrl_eval: Callable[..., Any]
) -> None:
    summary, prompts = digenrl_eval(a_run), load_prompts(held_out).prompts
    rows = rows_of(a_run / "eval-step-3")
    assert [(row["index"], row["prompt"]) for row in rows] == [(i, prompt.text) for i, prompt in enumerate(prompts)]
    counts = Counter(str(prompt.metadata["category"]) for prompt in prompts)
    assert {name: means["num_prompts"] for name, means in summary["categories"].items()} == counts
    assert (summary["num_prompts"], summary["num_invalid"], summary["category_field"]) == (7, 0, "category")
    for name, means in {"all": summary, **summary["categories"]}.items():
        its = [row for row in rows if name in ("all", row["category"])]
        assert means["reward"] == pytest.approx(np.mean([row["reward"] for row in its]))
        assert means["parts"]["shapes/soft"] == pytest.approx(np.mean([row["rewards"]["shapes/soft"] for row in its]))


def test_the_files_are_the_summary_and_a_sheet_of_pictures(a_run: Path, digenrl_eval: Callable[..., Any]) -> None:
    printed = digenrl_eval(a_run)
    folder = a_run / "eval-step-3"
    assert {path.name for path in folder.iterdir()} == {"scores.jsonl", "summary.json", "sheet.png"}
    del printed["out"]
    assert json.loads((folder / "summary.json").read_text(encoding="utf-8")) == printed
    with Image.open(folder / "sheet.png") as picture:
        assert picture.width > 3 * 100


def test_another_prompt_file_may_be_named_and_needs_no_categories(
    a_run: Path, tmp_path: Path, digenrl_eval: Callable[..., Any]
) -> None:
    (tmp_path / "own.txt").write_text("an owl\ntwo owls\n", encoding="utf-8")
    recipe = a_run / "recipe.yaml"
    plain = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    recipe.write_text(yaml.safe_dump({**plain, "rewards": [{"type": "jpeg"}]}), encoding="utf-8")
    summary = digenrl_eval(a_run, prompts=str(tmp_path / "own.txt"))
    assert (summary["num_prompts"], summary["category_field"], summary["categories"]) == (2, None, {})
    assert "category" not in rows_of(a_run / "eval-step-3")[0]


def test_genevals_tag_is_a_category(a_run: Path, tmp_path: Path, digenrl_eval: Callable[..., Any]) -> None:
    lines = [json.loads(line) for line in SHIPPED.read_text(encoding="utf-8").splitlines()[:3]]
    tagged = [{**line, "tag": f"tag of {line['category']}"} for line in lines]
    rewards = yaml.safe_load((a_run / "recipe.yaml").read_text(encoding="utf-8"))
    rewards["rewards"] = [{"type": "jpeg"}]
    (a_run / "recipe.yaml").write_text(yaml.safe_dump(rewards), encoding="utf-8")
    for line in tagged:
        del line["category"]
    (tmp_path / "geneval.jsonl").write_text("".join(json.dumps(line) + "\n" for line in tagged), encoding="utf-8")
    summary = digenrl_eval(a_run, prompts=str(tmp_path / "geneval.jsonl"))
    assert summary["category_field"] == "tag"
    assert set(summary["categories"]) == {line["tag"] for line in tagged}


def test_nothing_is_overwritten(a_run: Path, digenrl_eval: Callable[..., Any], tmp_path: Path) -> None:
    digenrl_eval(a_run)
    before = (a_run / "eval-step-3" / "summary.json").read_bytes()
    with pytest.raises(ConfigError, match="eval-step-3"):
        evaluate.run(str(a_run))
    assert (a_run / "eval-step-3" / "summary.json").read_bytes() == before
    assert digenrl_eval(a_run, out=str(tmp_path / "other"))["out"] == str(tmp_path / "other")


def test_an_evaluation_that_fails_leaves_no_folder(a_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_arguments: Any, **_options: Any) -> None:
        raise OSError("no space left on device")

    before = sorted(a_run.iterdir())
    monkeypatch.setattr(sheet, "contact_sheet", fails)
    with pytest.raises(OSError, match="no space"):
        evaluate.run(str(a_run))
    assert sorted(a_run.iterdir()) == before


def test_a_model_is_judged_by_a_recipe(
    shapes_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, digenrl_eval: Callable[..., Any], a_run: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(shapes_recipe.to_plain()), encoding="utf-8")
    summary = digenrl_eval("builtin:shapes", recipe="recipe.yaml")
    assert (summary["weights"], summary["policy_version"], summary["out"]) == ("base", None, "eval-shapes")
    assert (tmp_path / "eval-shapes" / "sheet.png").is_file()
    assert summary["parts"]["jpeg"] != digenrl_eval(a_run)["parts"]["jpeg"]


def test_a_recipe_replaces_the_rewards_and_settings_of_a_run_and_not_its_weights(
    shapes_recipe: Recipe, a_run: Path, tmp_path: Path, digenrl_eval: Callable[..., Any]
) -> None:
    plain = shapes_recipe.to_plain()
    other = {**plain, "model": {**plain["model"], "lora": None}, "rewards": [{"type": "jpeg", "name": "small"}]}
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(other), encoding="utf-8")
    own = digenrl_eval(a_run)
    summary = digenrl_eval(a_run, recipe=str(tmp_path / "other.yaml"), out=str(tmp_path / "out"))
    assert set(summary["parts"]) == {"small", "small/kilobytes"}
    assert summary["parts"]["small"] == own["parts"]["jpeg"]


def test_a_model_without_a_recipe_and_a_run_without_prompts_say_what_to_give(tmp_path: Path, tiny_recipe: RecipeMaker) -> None:
    with pytest.raises(ConfigError, match="nothing of rewards") as caught:
        evaluate.run("builtin:shapes", out=str(tmp_path / "out"))
    assert "--recipe" in caught.value.fix
    run = build_run(tmp_path / "run", tiny_recipe(model={"lora": {"rank": 2}}))
    with pytest.raises(ConfigError, match="no prompts") as caught:
        evaluate.run(str(run))
    assert "--prompts" in caught.value.fix


def test_the_table_for_people_has_a_row_for_all_and_for_each_category(a_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluate.run(str(a_run))
    lines = capsys.readouterr().out.splitlines()
    header = next(line for line in lines if "prompts   " in line and "reward" in line)
    assert header.split() == ["prompts", "reward", "shapes", "shapes/strict", "shapes/soft", "jpeg", "jpeg/kilobytes"]
    rows = {line.split()[0]: line.split()[1:] for line in lines[lines.index(header) + 1 : -1]}
    assert rows["all"][0] == "7"
    assert set(rows) == {"all", "single", "color", "counting", "two_objects", "position"}
    assert all(len(values) == 7 for values in rows.values())
