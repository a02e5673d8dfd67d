"""Whole runs in one process with each algorithm, with two updates per rollout, and stopped between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from digenrl.config.loader import load_recipe
from digenrl.config.schema import Recipe
from digenrl.errors import ConfigError
from digenrl.ids import WorkerId
from digenrl.metrics.log import read_metrics
from digenrl.runtime.build import Start, schedule_settings
from digenrl.runtime.train import train

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"
SMALL = (
    "cluster.placement=inline",
    "rollout.prompts_per_step=2",
    "rollout.num_generations=4",
    "rollout.forward_batch_size=4",
    "rollout.num_inference_steps=4",
    "algorithm.sde_window_size=2",
    "algorithm.sde_window_range=null",
    "schedule.groups_per_micro_batch=1",
    "train.deterministic=true",
    "train.timestep_batch_size=4",
    "train.steps=1",
    "eval=null",
    "log.tensorboard=false",
    "log.sample_freq=0",
)


def recipe(*changes: str) -> Recipe:
    return load_recipe(QUICKSTART, [*SMALL, *changes])


def rows_of(folder: Path, *changes: str) -> list[dict[str, Any]]:
    train(recipe(f"run.output_dir={folder}", *changes))
    return [row for row in read_metrics(folder / "metrics.jsonl") if row["kind"] == "train"]


TWO = "rewards=[{type: shapes, weight: 1.0}, {type: jpeg, weight: 0.5}]"


@pytest.mark.parametrize(
    "algorithm",
    [
        "{type: dance_grpo, best_of_n: 2, timestep_fraction: 1.0}",
        "{type: mix_grpo, sde_window_size: 1, window_steps: 1, flash_fraction: 0.5}",
    ],
)
def test_a_run_says_how_far_it_went_and_what_each_reward_was(algorithm: str, tmp_path: Path) -> None:
    (row,) = rows_of(tmp_path / "run", f"algorithm={algorithm}", TWO)
    assert (row["ratio_mean"], row["ratio_std"], row["logprob_abs_diff"]) == (1.0, 0.0, 0.0)
    assert {"clip_fraction_above", "clip_fraction_below", "approx_kl", "zero_std_ratio"} <= row.keys()
    assert row["update_norm"] > 0
    assert row["reward_weighted/jpeg"] == pytest.approx(0.5 * row["reward/jpeg"])
    assert row["reward_mean"] == pytest.approx(row["reward_weighted/shapes"] + row["reward_weighted/jpeg"])


def test_two_updates_per_rollout_are_two_optimizer_steps_on_one_version(tmp_path: Path) -> None:
    (row,) = rows_of(tmp_path / "run", "algorithm.updates_per_rollout=2", TWO)
    assert row["ratio_mean"] == 1.0
    assert row["later_updates/ratio_std"] > 0
    assert row["trained_pairs"] == 2 * 4 * 2


def test_in_one_pool_a_step_is_generated_before_its_first_update() -> None:
    one = WorkerId("one")
    settings = schedule_settings(recipe("algorithm.updates_per_rollout=2"), Start(), generators=(one,), trainer=one)
    assert (settings.updates_per_rollout, settings.update_after) == (2, "step")
    apart = schedule_settings(
        recipe("algorithm.updates_per_rollout=2", "cluster.placement=disaggregated"),
        Start(),
        generators=(one,),
        trainer=WorkerId("trainer"),
    )
    assert (apart.updates_per_rollout, apart.update_after) == (2, "group")


def test_more_updates_than_micro_batches_are_refused() -> None:
    one = WorkerId("one")
    with pytest.raises(ConfigError, match="updates_per_rollout"):
        schedule_settings(recipe("algorithm.updates_per_rollout=3"), Start(), generators=(one,), trainer=one)
