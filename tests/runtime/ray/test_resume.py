"""A run with stale trajectories that is taken up again trains on the very trajectories that were in flight."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from digenrl.config.loader import load_recipe
from digenrl.runtime.train import resume, train
from digenrl.scheduling.commands import Generate
from digenrl.trace.record import read_trace
from tests.runtime.ray.conftest import DISAGGREGATED, small_recipe

pytestmark = [pytest.mark.usefixtures("ray_session"), pytest.mark.timeout(400)]

STEPS = 5
STALE = (
    *DISAGGREGATED,
    "schedule.max_stale_fraction=0.5",
    "train.save_freq=1",
    "train.keep_last=20",
    "train.lr_schedule=constant",
)


def weights(run: Path, version: int) -> dict[str, str]:
    """Digests of what a checkpoint says of the trainer, by file."""
    manifest = json.loads((run / "checkpoints" / f"step-{version:06d}" / "MANIFEST.json").read_text())
    return {name: manifest["files"][f"{name}.safetensors"]["sha256"] for name in ("parameters", "optimizer", "ema")}


def claims(run: Path, version: int) -> list[int]:
    """Micro-batches that a checkpoint says were generated with the version before."""
    state = json.loads((run / "checkpoints" / f"step-{version:06d}" / "state.json").read_text())
    found: list[int] = state["stale_claims"]
    return found


def cut_back(run: Path, to: Path, version: int) -> Path:
    """The run as it would be if it had been killed right after it saved a version."""
    shutil.copytree(run, to)
    for checkpoint in (to / "checkpoints").iterdir():
        if int(checkpoint.name.removeprefix("step-")) > version:
            shutil.rmtree(checkpoint)
    return to


@pytest.mark.slow
def test_a_step_that_was_begun_with_the_version_before_comes_out_the_same_after_a_resume(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(small_recipe(run, *STALE, f"train.steps={STEPS}"))
    with_claims = [version for version in range(1, STEPS) if claims(run, version)]
    assert with_claims, "no step of this run was begun early"
    version = with_claims[-1]
    again = cut_back(run, tmp_path / "again", version)
    resume(load_recipe(again / "recipe.yaml", [f"train.steps={version + 1}"]), again)
    assert weights(again, version + 1) == weights(run, version + 1)
    trace = read_trace(again / f"trace-from-{version:06d}.jsonl")
    stale = {
        c.micro_batch.index for e in trace.entries for c in e.commands if isinstance(c, Generate) and c.policy_version < version
    }
    assert sorted(stale) == claims(run, version)


@pytest.mark.slow
def test_a_run_of_fewer_steps_than_its_staleness_reaches_ends_after_a_resume(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(small_recipe(run, *STALE, "train.steps=1"))
    done = resume(load_recipe(run / "recipe.yaml", ["train.steps=1"]), run)
    assert done["steps"] == 1
    done = resume(load_recipe(run / "recipe.yaml", ["train.steps=2"]), run)
    assert done["steps"] == 2
