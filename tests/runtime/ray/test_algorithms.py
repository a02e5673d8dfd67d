"""Every algorithm gives one run, whether one process or several do the work."""

from __future__ import annotations

from pathlib import Path

import pytest

from digenrl.metrics.log import read_metrics
from tests.runtime.ray.conftest import DISAGGREGATED, SHARED, TrainSmall

pytestmark = [pytest.mark.usefixtures("ray_session"), pytest.mark.timeout(600), pytest.mark.slow]

TWO_REWARDS = "rewards=[{type: shapes, weight: 1.0}, {type: jpeg, weight: 0.1}]"
ALGORITHMS = {
    "dance_grpo, two rewards, best of 2": ("algorithm={type: dance_grpo, best_of_n: 2, timestep_fraction: 0.7}", TWO_REWARDS),
    "mix_grpo, flash": ("algorithm={type: mix_grpo, sde_window_size: 1, window_steps: 1, flash_fraction: 0.5}",),
    "two updates per rollout": ("algorithm.updates_per_rollout=2",),
    "batch statistics": ("algorithm.advantage_std=batch", "schedule.update_after=step"),
}


PLACES = {
    "two generators": (*DISAGGREGATED, "cluster.generators.0.replicas=2"),
    "one worker for both": ("cluster.placement=colocated", *SHARED),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_place_gives_the_weights_of_one_process(name: str, train_small: TrainSmall) -> None:
    inline = train_small("inline", *ALGORITHMS[name])
    found = {place: train_small(place.replace(" ", "_"), *PLACES[place], *ALGORITHMS[name])["digests"] for place in PLACES}
    assert found == dict.fromkeys(PLACES, inline["digests"])


def test_two_updates_are_one_step_in_the_logs(train_small: TrainSmall, tmp_path: Path) -> None:
    train_small("run", *DISAGGREGATED, "algorithm.updates_per_rollout=2", "train.steps=2")
    rows = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if row["kind"] == "train"]
    assert [row["step"] for row in rows] == [0, 1]
    assert all("later_updates/ratio_mean" in row and row["ratio_mean"] == 1.0 for row in rows)
