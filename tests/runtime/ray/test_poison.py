"""Work that cannot be done: the run ends after a few attempts, and says what, where and why."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from digenrl.cli.main import main
from digenrl.config.schema import Recipe
from digenrl.errors import RunFailed
from digenrl.runtime.build import build_ledger
from digenrl.runtime.train import train
from digenrl.scheduling.events import WorkerLost
from digenrl.trace.record import read_trace
from tests.runtime.ray.conftest import DISAGGREGATED, QUICKSTART, SMALL, small_recipe

pytestmark = [pytest.mark.usefixtures("ray_session"), pytest.mark.timeout(400)]

POISON = """
import os

from pydantic import BaseModel

from digenrl.algorithms.flow_grpo import FlowGRPO
from digenrl.config.settings.algorithms import FlowGRPOSettings


class Ending:
    class Settings(BaseModel):
        prompt: str

    def __init__(self, settings):
        self.prompt = settings.prompt

    def score(self, samples):
        if any(sample.prompt == self.prompt for sample in samples):
            os._exit(7)
        return {sample.id: float(sample.image.mean()) for sample in samples}


class Raising:
    class Settings(BaseModel):
        pass

    def __init__(self, settings):
        pass

    def score(self, samples):
        raise ValueError("the scale is broken")


class Unplanned(FlowGRPO):
    Settings = FlowGRPOSettings

    def plan_steps(self, samples, num_inference_steps):
        raise RuntimeError("no plan for these samples")
"""


@pytest.fixture
def poison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a user's module, of which only this process knows where it lies."""
    folder = tmp_path / "mine"
    folder.mkdir()
    name = f"poison_{time.time_ns()}"
    (folder / f"{name}.py").write_text(textwrap.dedent(POISON), encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    yield name
    sys.modules.pop(name, None)


def prompt_of(recipe: Recipe, place: int) -> str:
    """Text of a prompt of the first step."""
    return build_ledger(recipe).step(0).prompts[place].text


@pytest.mark.slow
def test_a_prompt_that_kills_every_worker_that_scores_it_ends_the_run_by_its_name(poison: str, tmp_path: Path) -> None:
    text = prompt_of(small_recipe(tmp_path / "unused"), 4)
    reward = f"rewards=[{{type: '{poison}:Ending', prompt: {text!r}}}]"
    run = tmp_path / "run"
    with pytest.raises(RunFailed, match=r"prompts 4 to 4 of step 0.*has failed 3 times") as caught:
        train(small_recipe(run, *DISAGGREGATED, "cluster.generators.0.replicas=2", reward))
    assert "its process ended" in caught.value.what
    lost = [event for entry in read_trace(run / "trace.jsonl").entries for event in entry.events if isinstance(event, WorkerLost)]
    assert len(lost) == 3, "schedule.max_attempts, no more"


def test_a_reward_that_raises_ends_the_run_with_its_traceback_and_the_worker_s_name(
    poison: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = [*SMALL, *DISAGGREGATED, f"rewards=[{{type: '{poison}:Raising'}}]", f"run.output_dir={tmp_path / 'run'}"]
    monkeypatch.setattr(sys, "argv", ["digenrl", "train", str(QUICKSTART), *changes])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 3
    shown = capsys.readouterr().err
    assert "generator-0 (" in shown
    assert "raised ValueError: the scale is broken" in shown
    assert f"{poison}.py" in shown, "the line of the reward that raised"


@pytest.mark.slow
def test_an_algorithm_that_raises_in_a_worker_ends_the_run_with_its_traceback_and_the_worker_s_name(
    poison: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RunFailed, match=r"has failed 3 times: (generator-0|trainer): RuntimeError: no plan for these samples"):
        train(small_recipe(tmp_path / "run", *DISAGGREGATED, f"algorithm.type={poison}:Unplanned"))
    shown = capsys.readouterr().out
    assert "generator-0 failed while" in shown
    assert f"{poison}.py" in shown, "the line of the algorithm that raised"
