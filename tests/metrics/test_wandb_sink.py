"""The calls that the W&B sink makes, seen by a stand-in for the library (which tests do not install)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from digenrl.config.loader import recipe_from_plain
from digenrl.config.schema import LogSection, Recipe, WandbSection
from digenrl.errors import ConfigError
from digenrl.metrics.log import MetricsLog, open_sinks


class FakeRun:
    def __init__(self, summary: dict[str, Any]) -> None:
        self.summary = summary
        self.rows: list[dict[str, Any]] = []
        self.axes: dict[str, str | None] = {}
        self.finished = False

    def define_metric(self, name: str, step_metric: str | None = None, hidden: bool | None = None) -> None:
        self.axes[name] = step_metric

    def log(self, data: dict[str, Any]) -> None:
        self.rows.append(data)
        self.summary.update(data)

    def finish(self) -> None:
        self.finished = True


class FakeWandb(ModuleType):
    """Keeps runs by id, as the server does, so that a resumed one has its summary."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.asked: list[dict[str, Any]] = []
        self.runs: list[FakeRun] = []
        self.summaries: dict[str, dict[str, Any]] = {}
        self.error: Exception | None = None

    def init(self, **arguments: Any) -> FakeRun:
        self.asked.append(arguments)
        if self.error:
            raise self.error
        self.runs.append(FakeRun(self.summaries.setdefault(arguments["id"], {})))
        return self.runs[-1]

    def Image(self, data: np.ndarray, caption: str) -> tuple[str, int]:  # noqa: N802
        return caption, int(data[0, 0, 0])


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


@pytest.fixture
def open_log() -> Iterator[Callable[..., MetricsLog]]:
    """A function that opens the log of a run with W&B, as a run does; its keywords are those of log.wandb."""
    with ExitStack() as opened:

        def make(folder: Path, resume_step: int | None = None, **keys: Any) -> MetricsLog:
            section = LogSection(tensorboard=False, wandb=WandbSection(**keys))
            sinks = open_sinks(section, folder, run_name="mine", config={"train": {"steps": 3}}, resume_step=resume_step)
            return opened.enter_context(closing(MetricsLog(folder / "metrics.jsonl", sinks)))

        yield make


def test_a_run_is_opened_as_the_recipe_says(tmp_path: Path, wandb: FakeWandb, open_log: Any) -> None:
    open_log(tmp_path, project="pictures", entity="lab", mode="offline")
    [asked] = wandb.asked
    expected = {"project": "pictures", "entity": "lab", "mode": "offline", "name": "mine", "dir": str(tmp_path)}
    assert {key: asked[key] for key in expected} == expected
    assert asked["config"] == {"train": {"steps": 3}}


def test_numbers_stand_on_the_axis_of_their_kind(tmp_path: Path, wandb: FakeWandb, open_log: Any) -> None:
    log = open_log(tmp_path)
    log.log("eval", 0, {"reward": 0.25})
    log.log("train", 0, {"reward_mean": 0.5, "grad_norm": float("nan"), "approx_kl": None})
    log.close()
    [run] = wandb.runs
    assert run.rows == [{"eval/step": 0, "eval/reward": 0.25}, {"train/step": 0, "train/reward_mean": 0.5}]
    assert run.axes == {"eval/step": None, "eval/*": "eval/step", "train/step": None, "train/*": "train/step"}
    assert run.finished


def test_pictures_that_were_generated_ahead_do_not_hide_the_step_before(tmp_path: Path, wandb: FakeWandb, open_log: Any) -> None:
    log = open_log(tmp_path)
    images = np.stack([np.full((2, 2, 3), value, np.uint8) for value in (7, 9)])
    log.images("train/samples", 1, images, ["a dog", "a cat"])
    log.log("train", 0, {"reward_mean": 0.5})
    [run] = wandb.runs
    assert run.rows[0] == {"train/samples_step": 1, "train/samples": [("a dog", 7), ("a cat", 9)]}
    assert run.rows[1] == {"train/step": 0, "train/reward_mean": 0.5}
    assert run.axes["train/samples"] == "train/samples_step"


def test_a_resumed_run_goes_on_under_its_id_and_has_each_step_once(tmp_path: Path, wandb: FakeWandb, open_log: Any) -> None:
    first = open_log(tmp_path)
    for step in range(4):
        first.log("train", step, {"reward_mean": float(step)})
    second = open_log(tmp_path, resume_step=2)
    for step in range(2, 6):
        second.log("train", step, {"reward_mean": float(step)})
    assert wandb.asked[0]["id"] == wandb.asked[1]["id"]
    assert wandb.asked[1]["resume"] == "allow"
    assert [row["train/step"] for run in wandb.runs for row in run.rows] == list(range(6))


def test_two_runs_have_two_ids(tmp_path: Path, wandb: FakeWandb, open_log: Any) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        open_log(tmp_path / name)
    assert wandb.asked[0]["id"] != wandb.asked[1]["id"]


def test_a_run_that_cannot_be_opened_is_a_warning_that_names_the_way_out(tmp_path: Path, wandb: FakeWandb) -> None:
    wandb.error = RuntimeError("api_key not configured (no-tty)")
    warnings: list[tuple[str, str]] = []
    section = LogSection(tensorboard=False, wandb=WandbSection())
    sinks = open_sinks(
        section, tmp_path, run_name="mine", config={}, resume_step=None, warn=lambda *warning: warnings.append(warning)
    )
    assert sinks == ()
    [(kind, text)] = warnings
    assert kind == "log.wandb"
    assert "api_key not configured" in text and "log.wandb.mode=offline" in text


def test_a_recipe_asks_for_wandb_with_an_empty_section_and_knows_its_keys(tiny_recipe: Callable[..., Recipe]) -> None:
    assert tiny_recipe().log.wandb is None
    recipe = tiny_recipe(log={"wandb": {}})
    assert recipe.log.wandb == WandbSection(project="digenrl", entity=None, mode="online")
    plain = recipe.to_plain()
    assert recipe_from_plain(plain) == recipe
    plain["log"]["wandb"]["projekt"] = "x"
    with pytest.raises(ConfigError, match="project"):
        recipe_from_plain(plain)
