"""A run that was interrupted and went on is the run that was never interrupted: same weights, same samples, same log."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

from digenrl.config.loader import load_recipe
from digenrl.errors import ConfigError, RunFailed
from digenrl.ids import SampleId
from digenrl.metrics.log import read_metrics
from digenrl.rewards.base import RewardSample
from digenrl.runtime.interrupt import StopRequested
from digenrl.runtime.journal import Journal
from digenrl.runtime.train import resume, train
from digenrl.scheduling.commands import Accumulate
from digenrl.scheduling.events import Finished
from digenrl.trace.record import read_trace
from digenrl.training.report import StepReport
from digenrl.training.trainer import Trainer

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "recipes" / "quickstart.yaml"
STEPS = 6
SMALL = (
    "cluster.placement=inline",
    "rollout.prompts_per_step=3",
    "rollout.num_generations=4",
    "rollout.forward_batch_size=4",
    "rollout.num_inference_steps=4",
    "algorithm.sde_window_size=2",
    "algorithm.sde_window_range=[0, 3]",
    "schedule.groups_per_micro_batch=1",
    "schedule.update_order=index",
    f"train.steps={STEPS}",
    "train.save_freq=2",
    "eval=null",
    "log.tensorboard=false",
)
KINDS = {"lora": ("model.lora={rank: 4, alpha: 8}", "algorithm.kl_beta=0.01"), "full": ()}


class Interrupting:
    """A reward that sends this process a signal when it scores a given step."""

    at_step = -1

    class Settings(BaseModel):
        """No settings: the run's recipe is the one of an uninterrupted run."""

        model_config = ConfigDict(extra="forbid")

    def __init__(self, settings: Settings) -> None:
        pass

    def score(self, samples: Sequence[RewardSample]) -> dict[SampleId, float]:
        if any(sample.id.step == self.at_step for sample in samples):
            os.kill(os.getpid(), signal.SIGTERM)
        return {sample.id: float(sample.image.mean()) + sample.id.sample for sample in samples}


def recipe(output: Path, *changes: str) -> Any:
    reward = f"rewards=[{{type: '{__name__}:Interrupting'}}]"
    return load_recipe(QUICKSTART, [*SMALL, reward, f"run.output_dir={output}", *changes])


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or __import__(__name__))


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Uninterrupted runs by kind: their folder and summary."""
    folder = tmp_path_factory.mktemp("straight")
    return {kind: (folder / kind, train(recipe(folder / kind, *changes))) for kind, changes in KINDS.items()}


def trained(folder: Path) -> Counter[tuple[int, int]]:
    """(step, micro-batch) accumulated into the weights that the run has: what came before each continuation, and after."""
    traces = sorted((read_trace(path) for path in folder.glob("trace*.jsonl")), key=lambda trace: trace.settings.first_version)
    ends = [*(trace.settings.first_version for trace in traces[1:]), STEPS * 100]
    found: Counter[tuple[int, int]] = Counter()
    for trace, end in zip(traces, ends, strict=True):
        for event in (event for entry in trace.entries for event in entry.events):
            command = event.command if isinstance(event, Finished) else None
            if isinstance(command, Accumulate) and command.micro_batch.step < end:
                found[command.micro_batch.step, command.micro_batch.index] += 1
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", range(STEPS))
def test_a_run_stopped_in_any_step_resumes_to_identical_weights(
    step: int, kind: str, straight: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[__name__].Interrupting, "at_step", step)
        with pytest.raises(StopRequested):
            train(recipe(tmp_path / "run", *KINDS[kind]))
    summary = resume(load_recipe(tmp_path / "run" / "recipe.yaml"), tmp_path / "run")
    folder, expected = straight[kind]
    assert summary["digests"] == expected["digests"]
    assert summary["steps"] == STEPS
    assert trained(tmp_path / "run") == trained(folder)
    logged = [(row["kind"], row["step"]) for row in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert logged == [("train", index) for index in range(STEPS)], "each step is logged once"


def test_a_finished_run_has_nothing_to_go_on_with_and_more_steps_extend_it(straight: dict[str, Any], tmp_path: Path) -> None:
    constant = ("train.lr_schedule=constant", "train.lr_warmup_steps=0")
    whole = train(recipe(tmp_path / "whole", *constant))
    train(recipe(tmp_path / "part", *constant, "train.steps=4"))
    longer = load_recipe(tmp_path / "part" / "recipe.yaml", [f"train.steps={STEPS}"])
    assert resume(longer, tmp_path / "part")["digests"] == whole["digests"]
    assert load_recipe(tmp_path / "part" / "recipe.yaml").train.steps == STEPS, "the change is remembered"
    with pytest.raises(ConfigError, match="less than the 6 steps"):
        resume(load_recipe(tmp_path / "part" / "recipe.yaml", ["train.steps=3"]), tmp_path / "part")
    folder, expected = straight["full"]
    assert resume(load_recipe(folder / "recipe.yaml"), folder)["digests"] == expected["digests"]


@pytest.mark.parametrize("change", ["run.seed=5", "train.learning_rate=1", "rollout.num_generations=8"])
def test_a_change_that_would_change_the_numbers_is_refused(change: str, straight: dict[str, Any]) -> None:
    folder, _ = straight["full"]
    with pytest.raises(ConfigError, match=change.split("=", maxsplit=1)[0]):
        resume(load_recipe(folder / "recipe.yaml", [change]), folder)


def test_a_folder_that_holds_no_run_is_refused(tmp_path: Path, straight: dict[str, Any]) -> None:
    folder, _ = straight["full"]
    with pytest.raises(ConfigError, match="is not a run folder"):
        resume(load_recipe(folder / "recipe.yaml"), tmp_path)


def start(*arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "digenrl.cli.main", "train", *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_training(process: subprocess.Popen[str], lines: int = 1) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines -= line.startswith(("training ", "step "))
        if lines <= 0:
            return
    raise AssertionError("the run ended before it trained")


KILLED = (
    "train.steps=10",
    "train.save_freq=1",
    "rewards=[{type: jpeg}]",
    "eval={prompts: HELD_OUT, num_inference_steps: 4, freq: 2}",
)


def kill_and_resume(tmp_path: Path, kills: int, seed: int, *more: str) -> None:
    held_out = tmp_path / "held_out.jsonl"
    shipped = (ROOT / "digenrl" / "assets" / "shapes" / "heldout.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    held_out.write_text("".join(shipped[:8]), encoding="utf-8")
    changes = [c for c in SMALL if c != "eval=null"] + [change.replace("HELD_OUT", str(held_out)) for change in (*KILLED, *more)]
    straight = train(load_recipe(QUICKSTART, [*changes, f"run.output_dir={tmp_path / 'straight'}"]))
    draw, run = random.Random(seed), tmp_path / "killed"
    arguments = [str(QUICKSTART), *changes, f"run.output_dir={run}", "--resume", "auto"]
    for _ in range(kills):
        process = start(*arguments)
        try:
            wait_for_training(process)
        except AssertionError:
            process.communicate(timeout=20)
            break  # it was finished
        time.sleep(draw.uniform(0.0, 0.8))
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=20)
    process = start(*arguments)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 0, output
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    assert summary["digests"] == straight["digests"], f"seed {seed}"
    assert trained(run) == trained(tmp_path / "straight")
    both = [[(r["kind"], r["step"]) for r in read_metrics(p / "metrics.jsonl")] for p in (run, tmp_path / "straight")]
    assert both[0] == both[1]


def test_a_run_that_was_killed_resumes_to_identical_weights(tmp_path: Path) -> None:
    kill_and_resume(tmp_path, kills=2, seed=int(time.time()))


@pytest.mark.slow
def test_a_run_of_two_updates_per_rollout_that_was_killed_resumes_to_identical_weights(tmp_path: Path) -> None:
    kill_and_resume(tmp_path, 4, int(time.time()), "algorithm.updates_per_rollout=2")


def test_a_run_stopped_between_two_updates_of_a_step_does_the_step_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = ("algorithm.updates_per_rollout=2", "train.save_freq=1", "train.steps=3")
    straight = train(recipe(tmp_path / "straight", *changes))
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "optimizer_step", _stopping_after(3, Trainer.optimizer_step))
        with pytest.raises(StopRequested):
            train(recipe(tmp_path / "run", *changes))
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [0]
    assert resume(recipe(tmp_path / "run", *changes), tmp_path / "run")["digests"] == straight["digests"]


def _stopping_after(number: int, optimizer_step: Callable[[Trainer], StepReport]) -> Callable[[Trainer], StepReport]:
    """An optimizer step after which, the ``number``-th time, this process is asked to stop."""
    calls = itertools.count(1)

    def step(trainer: Trainer) -> StepReport:
        report = optimizer_step(trainer)
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGTERM)
        return report

    return step


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_that_was_killed_twenty_times_resumes_to_identical_weights(tmp_path: Path) -> None:
    kill_and_resume(tmp_path, kills=20, seed=int(time.time()))


def test_sigterm_saves_and_exits_with_143_and_two_processes_cannot_share_a_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    endless = ("train.steps=100000", "train.save_freq=0", "rewards=[{type: jpeg}]", f"run.output_dir={run}")
    process = start(str(QUICKSTART), *SMALL, *endless)
    wait_for_training(process, lines=3)
    second = start("--resume", str(run))
    output, _ = second.communicate(timeout=60)
    assert second.returncode == 2
    assert "in another process" in output
    rows = len(read_metrics(run / "metrics.jsonl"))
    assert rows >= 1, "a refused second process has touched nothing"
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=40)
    assert process.returncode == 143, output
    assert "Traceback" not in output
    assert time.monotonic() - began < 30
    assert list((run / "checkpoints").glob("step-*"))
    assert len(read_metrics(run / "metrics.jsonl")) >= rows


def test_more_steps_are_refused_where_the_learning_rate_was_made_for_the_old_number(straight: dict[str, Any]) -> None:
    folder, _ = straight["full"]
    with pytest.raises(ConfigError, match=r"train\.steps was 6") as caught:
        resume(load_recipe(folder / "recipe.yaml", ["train.steps=9"]), folder)
    assert "learning rate" in caught.value.why


def test_a_step_whose_row_could_not_be_written_is_done_again(
    straight: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Journal.stepped

    def stepped(self: Journal, step: int, *rest: Any) -> None:
        if step == 3:
            raise RunFailed("The metrics could not be written: No space left on device.")
        real(self, step, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "stepped", stepped)
        with pytest.raises(RunFailed, match="No space left"):
            train(recipe(tmp_path / "run"))
    summary = resume(load_recipe(tmp_path / "run" / "recipe.yaml"), tmp_path / "run")
    assert summary["digests"] == straight["full"][1]["digests"]
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == list(range(STEPS))
