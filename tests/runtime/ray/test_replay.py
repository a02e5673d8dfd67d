"""A recorded run can be followed: the same order, the same versions, the same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from digenrl.config.loader import load_recipe
from digenrl.runtime.train import replay, train
from digenrl.scheduling.commands import Generate
from digenrl.trace.record import read_trace
from tests.runtime.ray.conftest import DISAGGREGATED, small_recipe

pytestmark = [pytest.mark.usefixtures("ray_session"), pytest.mark.timeout(400)]

STALE = (*DISAGGREGATED, "cluster.generators.0.replicas=2", "schedule.max_stale_fraction=0.5", "train.steps=5")


def test_a_run_with_stale_trajectories_gives_the_same_weights_along_its_record(tmp_path: Path) -> None:
    digests = train(small_recipe(tmp_path / "run", *STALE))["digests"]
    trace = read_trace(tmp_path / "run" / "trace.jsonl")
    generated = {c.micro_batch: c.policy_version for entry in trace.entries for c in entry.commands if isinstance(c, Generate)}
    stale = [micro_batch for micro_batch, version in generated.items() if version == micro_batch.step - 1]
    assert stale, "this run had no stale trajectory to be repeated"
    assert all(version in (m.step, m.step - 1) for m, version in generated.items())
    assert all(sum(m.step == step for m in stale) <= 3 for step in range(5))
    for name, placement in (("again", "disaggregated"), ("inline", "inline")):
        recipe = load_recipe(
            tmp_path / "run" / "recipe.yaml", [f"run.output_dir={tmp_path / name}", f"cluster.placement={placement}"]
        )
        assert replay(recipe, trace)["digests"] == digests, placement
