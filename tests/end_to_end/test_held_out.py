"""Held-out rewards of their own in whole runs: what is logged, what is warned of, and what `digenrl eval` shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from digenrl.cli.evaluate import run as evaluate
from digenrl.config.loader import load_recipe
from digenrl.errors import ConfigError
from digenrl.metrics.log import read_metrics
from digenrl.runtime.train import resume, train

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"
SMALL = (
    "cluster.placement=inline",
    "rollout.prompts_per_step=4",
    "rollout.num_generations=6",
    "rollout.num_inference_steps=4",
    "rollout.forward_batch_size=8",
    "algorithm.sde_window_size=2",
    "algorithm.sde_window_range=[0, 3]",
    "schedule.groups_per_micro_batch=1",
    "train.learning_rate=1.0e-3",
    "train.lr_schedule=constant",
    "train.deterministic=true",
    "train.ema=null",
    "log.tensorboard=false",
    "log.sample_freq=0",
    "rewards=[{type: brightness}]",
)
DARK = "rewards: [{type: brightness, name: dark, weight: -1}, {type: jpeg, weight: 0, required: false}]"


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight held-out prompts."""
    path = tmp_path_factory.mktemp("prompts") / "held_out.txt"
    path.write_text("".join(f"{number} red circles\n" for number in range(8)))
    return path


def recipe(output: Path, prompts: Path, *changes: str) -> Any:
    section = f"eval={{prompts: {prompts}, freq: 2, num_inference_steps: 2, alarm_errors: 0.5, {DARK}}}"
    return load_recipe(QUICKSTART, [*SMALL, section, "train.steps=12", f"run.output_dir={output}", *changes])


def warnings(text: str) -> list[str]:
    return [line for line in text.splitlines() if "reward hacking?" in line]


def test_a_held_out_reward_that_falls_while_the_trained_one_rises_is_told_of_once_also_when_the_run_goes_on(
    tmp_path: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = train(recipe(tmp_path / "run", prompts))
    (warning,) = warnings(capsys.readouterr().out)
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    held_out = [row for row in rows if row["kind"] == "eval"]
    assert all(row["reward"] == -row["reward/dark"] for row in held_out)
    assert all({"reward/jpeg", "reward/jpeg/kilobytes", "reward_std", "timing_s/reward/dark"} <= row.keys() for row in held_out)
    assert not any("reward/brightness" in row for row in held_out)
    assert not any("reward/dark" in row for row in rows if row["kind"] == "train")
    alarms = [row["hacking_alarm"] for row in held_out]
    assert alarms == sorted(alarms)
    first = held_out[alarms.index(1.0)]
    assert f"(version {first['step']})" in warning
    evaluated = summary["eval"]
    assert isinstance(evaluated, dict)
    assert evaluated["reward_after"] < evaluated["reward_before"] < 0
    resume(recipe(tmp_path / "run", prompts, "train.steps=13", "eval.alarm_errors=0.4"), tmp_path / "run")
    assert warnings(capsys.readouterr().out) == []
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["hacking_alarm"] == 1


def test_eval_scores_with_the_held_out_rewards_as_the_run_did(tmp_path: Path, prompts: Path) -> None:
    train(recipe(tmp_path / "run", prompts, "train.steps=1"))
    evaluate(str(tmp_path / "run"), out=str(tmp_path / "out"))
    logged = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
    shown = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert set(shown["parts"]) == {"dark", "jpeg", "jpeg/kilobytes"}
    np.testing.assert_allclose(shown["reward"], logged["reward"], rtol=1e-6)


@pytest.mark.parametrize(
    ("section", "detail"),
    [
        ("rewards: []", "eval.rewards cannot stand as it is: a run needs at least one reward"),
        ("rewards: [{type: jpeg}, {type: jpeg}]", "two rewards have the same name"),
        ("rewards: [{type: jepg}]", "Did you mean 'jpeg'?"),
        ("rewards: [{type: jpeg, qualty: 3}]", "eval.rewards.0.qualty is not a known key; did you mean quality?"),
        ("rewards: [{type: jpeg, weight: 0}]", "All weights in eval.rewards are 0"),
        ("rewards: [{type: jpeg, required: false}]", "eval.rewards.0: required: false needs weight: 0"),
        ("alarm_window: 3", "fewer than 5 evaluations"),
    ],
)
def test_held_out_rewards_that_cannot_work_are_refused_with_their_place(
    section: str, detail: str, tmp_path: Path, prompts: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        train(load_recipe(QUICKSTART, [*SMALL, f"eval={{prompts: {prompts}, {section}}}", f"run.output_dir={tmp_path / 'run'}"]))
    assert detail in str(caught.value)
    assert not (tmp_path / "run").exists()
