"""Whole runs through the command line and through ``train``: what a user sees on disk, and what must not change it."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pydantic import BaseModel, ConfigDict

from digenrl.config.loader import load_recipe
from digenrl.ids import SampleId
from digenrl.metrics.log import read_metrics
from digenrl.rewards.base import RewardSample
from digenrl.runtime.train import train
from digenrl.trace.record import read_trace
from digenrl.trace.replay import replay

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "recipes" / "quickstart.yaml"
SMALL = (
    "cluster.placement=inline",
    "rollout.prompts_per_step=4",
    "rollout.num_generations=4",
    "rollout.forward_batch_size=4",
    "schedule.groups_per_micro_batch=2",
    "train.steps=2",
    "train.deterministic=true",
)


def run(output: Path, *overrides: str) -> dict[str, Any]:
    return train(load_recipe(QUICKSTART, [*SMALL, "eval=null", f"run.output_dir={output}", *overrides]))


def digenrl(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-m", "digenrl.cli.main", *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with evaluation on 6 prompts."""
    folder = tmp_path_factory.mktemp("runs")
    held_out = folder / "held_out.jsonl"
    shipped = ROOT / "digenrl" / "assets" / "shapes" / "heldout.jsonl"
    held_out.write_text("".join(shipped.read_text(encoding="utf-8").splitlines(keepends=True)[:6]), encoding="utf-8")
    done = digenrl(
        "train",
        str(QUICKSTART),
        *SMALL,
        f"eval.prompts={held_out}",
        "eval.freq=1",
        "eval.num_inference_steps=4",
        f"run.output_dir={folder / 'run'}",
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return folder / "run"


def test_a_run_folder_holds_all_that_the_documentation_promises(small_run: Path) -> None:
    files = {str(path.relative_to(small_run)) for path in small_run.rglob("*") if path.is_file()}
    promised = {
        "recipe.yaml",
        "metrics.jsonl",
        "trace.jsonl",
        "summary.json",
        "reward.png",
        "before_after.png",
        "samples/index.jsonl",
    }
    promised |= {f"checkpoints/step-000002/{part}.safetensors" for part in ("parameters", "optimizer", "ema")}
    assert promised <= files


def test_the_summary_has_the_documented_keys_and_the_digests_of_the_files(small_run: Path) -> None:
    summary = json.loads((small_run / "summary.json").read_text())
    assert {"eval", "steps", "seconds", "timing_s", "digests"} <= set(summary)
    assert {"reward_before", "reward_after", "strict_before", "strict_after", "num_images"} <= set(summary["eval"])
    assert summary["eval"]["num_images"] == 6
    assert summary["steps"] == 2
    printed = digenrl("digest", str(small_run))
    assert json.loads(printed.stdout) == summary["digests"]


def test_metrics_have_one_line_per_step_and_evaluation_with_the_names_users_look_for(small_run: Path) -> None:
    rows = read_metrics(small_run / "metrics.jsonl")
    assert [(r["kind"], r["step"]) for r in rows] == [("eval", 0), ("train", 0), ("eval", 1), ("train", 1), ("eval", 2)]
    wanted = {"reward_mean", "reward_std", "zero_std_ratio", "approx_kl", "clip_fraction", "ratio_mean", "ratio_std"}
    wanted |= {"grad_norm", "logprob_abs_diff", "samples_per_second", "timing_s/generate", "timing_s/update"}
    wanted |= {"reward/shapes/strict", "learning_rate", "skipped_steps", "invalid_samples"}
    assert wanted <= set(rows[1])


def test_saved_pictures_are_indexed_with_digest_prompt_and_reward(small_run: Path) -> None:
    rows = [json.loads(line) for line in (small_run / "samples" / "index.jsonl").read_text(encoding="utf-8").splitlines()]
    training = [row for row in rows if not row.get("held_out")]
    assert len({row["file"] for row in rows}) == len(rows) > 0
    assert {row["policy_version"] for row in training} == {0, 1}
    for row in rows:
        path = small_run / row["file"]
        assert hashlib.sha256(path.read_bytes()).hexdigest() == row["sha256"]
        assert np.asarray(Image.open(path)).shape == (32, 32, 3)
        assert row["prompt"]


def test_the_recorded_trace_replays_to_the_same_commands_and_gives_every_reason(small_run: Path) -> None:
    trace = read_trace(small_run / "trace.jsonl")
    commands = [command for entry in trace.entries for command in entry.commands]
    assert replay(trace) == len(commands) > 15
    assert all(command.reason for command in commands)


def test_the_resolved_recipe_of_a_run_is_a_recipe_and_gives_the_same_run(small_run: Path, tmp_path: Path) -> None:
    train(load_recipe(small_run / "recipe.yaml", [f"run.output_dir={tmp_path / 'again'}"]))
    first, again = (json.loads((p / "summary.json").read_text())["digests"] for p in (small_run, tmp_path / "again"))
    assert first == again


def test_the_same_seed_gives_identical_weights_and_another_seed_does_not(tmp_path: Path) -> None:
    first, second = run(tmp_path / "a"), run(tmp_path / "b")
    other = run(tmp_path / "c", "run.seed=1")
    assert first["digests"] == second["digests"]
    assert first["digests"]["parameters"] != other["digests"]["parameters"]


@pytest.mark.parametrize("groups", [1, 3, 4])
def test_deterministic_runs_do_not_depend_on_how_a_step_is_cut(groups: int, tmp_path: Path) -> None:
    base = run(tmp_path / "base")
    assert run(tmp_path / "cut", f"schedule.groups_per_micro_batch={groups}")["digests"] == base["digests"]


def test_holding_updates_until_the_step_is_scored_changes_nothing_for_group_statistics(tmp_path: Path) -> None:
    base = run(tmp_path / "base")
    assert run(tmp_path / "held", "schedule.update_after=step")["digests"] == base["digests"]


def test_a_lora_run_trains_the_adapters_alone(tmp_path: Path) -> None:
    summary = run(tmp_path / "lora", "model.lora={rank: 4, alpha: 8}", "algorithm.kl_beta=0.01")
    assert summary["steps"] == 2
    from safetensors.torch import load_file

    (newest,) = (tmp_path / "lora" / "checkpoints").glob("step-000002")
    names = set(load_file(newest / "parameters.safetensors"))
    assert names
    assert all("lora_" in name for name in names)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_users_reward_rises(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    run(
        tmp_path / "bright",
        "rewards=[{type: 'custom_reward:Brightness', target: 0.5}]",
        "rollout.num_generations=8",
        "rollout.forward_batch_size=16",
        "rollout.num_inference_steps=6",
        "train.steps=12",
        "train.learning_rate=1e-3",
        "train.lr_schedule=constant",
        f"run.seed={seed}",
    )
    rewards = [row["reward_mean"] for row in read_metrics(tmp_path / "bright" / "metrics.jsonl")]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + MARGIN


MARGIN = 0.02


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_quickstart_learns_what_the_readme_says(tmp_path: Path) -> None:
    summary = train(load_recipe(QUICKSTART, [f"run.output_dir={tmp_path / 'demo'}"]))
    result = summary["eval"]
    assert isinstance(result, dict)
    assert result["num_images"] >= 400
    assert result["reward_after"] - result["reward_before"] >= 0.08
    assert result["strict_after"] - result["strict_before"] >= 0.12


class Breaks:
    """A reward that works for a while and then raises, as a broken service would."""

    class Settings(BaseModel):
        """No settings."""

        model_config = ConfigDict(extra="forbid")

    def __init__(self, settings: Settings) -> None:
        self._calls = 0

    def score(self, samples: Sequence[RewardSample]) -> dict[SampleId, float]:
        self._calls += 1
        if self._calls > 3:
            raise OSError("the service is gone")
        return {sample.id: float(sample.image.mean()) for sample in samples}


def test_a_reward_that_raises_ends_the_run_with_exit_3_and_what_was_done_is_kept(tmp_path: Path) -> None:
    (tmp_path / "breaking.py").write_text(Path(__file__).read_text(encoding="utf-8"), encoding="utf-8")
    run_folder = tmp_path / "run"
    done = digenrl(
        "train",
        str(QUICKSTART),
        *SMALL,
        "train.steps=5",
        "eval=null",
        "rewards=[{type: 'breaking:Breaks'}]",
        f"run.output_dir={run_folder}",
        cwd=tmp_path,
    )
    assert done.returncode == 3
    assert "the service is gone" in done.stderr
    assert "never scored as 0" in done.stderr
    assert len(read_metrics(run_folder / "metrics.jsonl")) == 1
    assert json.loads(digenrl("digest", str(run_folder)).stdout)["parameters"]
    assert not (run_folder / "summary.json").exists()


def test_a_run_that_cannot_start_leaves_no_folder_behind(tmp_path: Path) -> None:
    done = digenrl("train", str(QUICKSTART), "data.prompts=missing.txt", f"run.output_dir={tmp_path / 'run'}", cwd=tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_run_whose_rewards_are_never_valid_stops_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "nothing.py").write_text(
        "from pydantic import BaseModel\n"
        "class Nothing:\n"
        "    class Settings(BaseModel):\n"
        "        pass\n"
        "    def __init__(self, settings): pass\n"
        "    def score(self, samples): return {s.id: float('nan') for s in samples}\n",
        encoding="utf-8",
    )
    run_folder = tmp_path / "run"
    changes = ("train.steps=8", "eval=null", "rewards=[{type: 'nothing:Nothing'}]", f"run.output_dir={run_folder}")
    done = digenrl("train", str(QUICKSTART), *SMALL, *changes, cwd=tmp_path)
    assert done.returncode == 3
    assert "No reward was valid in 3 steps in a row" in done.stderr
    assert "equal rewards" not in done.stdout
    rows = read_metrics(run_folder / "metrics.jsonl")
    assert [row["skipped_steps"] for row in rows] == [1, 2, 3]


def test_a_prompt_that_is_too_long_for_the_text_encoders_is_said_to_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "long.txt"
    prompts.write_text("a red circle and " * 20 + "\n", encoding="utf-8")
    run(tmp_path / "run", f"data.prompts={prompts}", "data.stratify_by=null", "rewards=[{type: jpeg}]", "train.steps=1")
    assert "its end is ignored: 'a red circle and" in capsys.readouterr().out
