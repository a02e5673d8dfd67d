"""One Ray session per module, and the small recipe that all its tests train."""

from __future__ import annotations

import os

os.environ["RAY_AUTH_MODE"] = "token"
os.environ.setdefault("RAY_AUTH_TOKEN", "0123456789abcdef" * 4)

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from digenrl.config.loader import load_recipe
from digenrl.runtime.ray.environment import prepare
from digenrl.runtime.train import train

QUICKSTART = Path(__file__).parents[3] / "recipes" / "quickstart.yaml"
SMALL = (
    "cluster.placement=inline",
    "rollout.prompts_per_step=6",
    "rollout.num_generations=4",
    "rollout.forward_batch_size=4",
    "rollout.num_inference_steps=4",
    "algorithm.sde_window_size=2",
    "algorithm.sde_window_range=[0, 3]",
    "schedule.groups_per_micro_batch=1",
    "train.deterministic=true",
    "train.steps=3",
    "eval=null",
    "log.tensorboard=false",
    "log.sample_freq=0",
)
SHARED = ("cluster.generators.0.resources.cpus=0.25", "cluster.trainer.resources.cpus=0.25")
"""Ranks that share the two cores of a test machine."""
DISAGGREGATED = ("cluster.placement=disaggregated", *SHARED)

Summary = dict[str, Any]
TrainSmall = Callable[..., Summary]


@pytest.fixture(scope="module")
def ray_session() -> Iterator[None]:
    """A private cluster for the tests of one module."""
    prepare(private=True)
    from digenrl.runtime.ray.session import RaySession

    with RaySession(None):
        yield


def small_recipe(output: Path, *changes: str) -> Any:
    """The quickstart with six micro-batches of four samples, for three steps."""
    return load_recipe(QUICKSTART, [*SMALL, f"run.output_dir={output}", *changes])


@pytest.fixture
def train_small(tmp_path: Path) -> TrainSmall:
    """Train the small recipe with some changes, in a folder of its own, and return its summary."""

    def run(name: str, *changes: str) -> Summary:
        return train(small_recipe(tmp_path / name, *changes))

    return run
