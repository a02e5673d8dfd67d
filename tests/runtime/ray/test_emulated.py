"""Emulated runs: the real driver, scheduler, executor and actors, whose workers only sleep."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from digenrl.cli.emulation import emulation_of
from digenrl.cli.trace import run as show_trace
from digenrl.cli.train import run as train_verb
from digenrl.config.loader import load_recipe
from digenrl.ids import SampleId
from digenrl.metrics.log import read_metrics
from digenrl.runtime.emulated import reward_of
from digenrl.scheduling.commands import Accumulate, Generate, Score
from digenrl.scheduling.events import CommandFailed, Finished, WorkerJoined, WorkerLost
from digenrl.simulation.measured import costs_of_trace
from digenrl.trace.record import Trace, read_trace
from digenrl.trace.spans import spans
from digenrl.trace.utilization import utilization
from tests.runtime.ray.conftest import QUICKSTART

pytestmark = [pytest.mark.usefixtures("ray_session"), pytest.mark.timeout(300)]

PRESET = "hunyuanvideo-32gpu"
SIZES = (
    "rollout.prompts_per_step=8",
    "rollout.num_generations=16",
    "schedule.groups_per_micro_batch=1",
    "data.stratify_by=null",
    "log.tensorboard=false",
    "train.steps=3",
    "cluster.placement=disaggregated",
    "cluster.generators.0.ranks=4",
    "cluster.trainer.ranks=4",
)


def emulate(**keys: Any) -> str:
    given = {"preset": PRESET, "time_scale": 0.0005, **keys}  # a generation of 46 ms
    return f"cluster.emulate={json.dumps(given)}"


Run = Callable[..., Path]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Train the quickstart with emulated workers, as the command line does; the run's folder."""

    def train(*changes: str) -> Path:
        folder = tmp_path / "run"
        train_verb(str(QUICKSTART), [*SIZES, emulate(), *changes, f"run.output_dir={folder}"])
        return folder

    return train


def trace_of(folder: Path) -> Trace:
    return read_trace(folder / "trace.jsonl")


def finished(trace: Trace, kind: type) -> list[Any]:
    events = [event for entry in trace.entries for event in entry.events]
    return [event.command for event in events if isinstance(event, Finished) and isinstance(event.command, kind)]


def test_everything_that_an_emulated_run_leaves_behind_says_so(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run()
    said = capsys.readouterr().out
    assert f"EMULATION of {PRESET}: no picture is made, nothing is learned" in said
    assert "emulated: workers slept" in said, "the report"
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["emulated"], summary["eval"], summary["digests"]) == (PRESET, None, {})
    assert {row["emulated"] for row in read_metrics(folder / "metrics.jsonl")} == {PRESET}
    assert trace_of(folder).source == "emulation"
    assert not (folder / "samples").exists()
    show_trace(str(folder / "trace.jsonl"), gantt=None, chrome=None, utilization=True, replay=True, as_json=False)
    shown = capsys.readouterr().out
    assert "of emulated work" in shown
    assert "commands identical" in shown
    show_trace(
        str(folder / "trace.jsonl"),
        gantt=str(folder / "t.svg"),
        chrome=str(folder / "t.json"),
        utilization=False,
        replay=False,
        as_json=True,
    )
    assert json.loads(capsys.readouterr().out)["source"] == "emulation"
    assert ", emulated" in (folder / "t.svg").read_text()
    assert "(emulated)" in (folder / "t.json").read_text()


def test_rewards_of_a_step_are_those_of_its_samples_ids(run: Run) -> None:
    rows = read_metrics(run() / "metrics.jsonl")
    for step, row in enumerate(rows):
        expected = [reward_of(SampleId(step, prompt, sample)) for prompt in range(8) for sample in range(16)]
        assert row["reward_mean"] == pytest.approx(sum(expected) / len(expected))


def test_commands_take_their_durations_and_little_more(run: Run) -> None:
    scale = 0.002  # a generation of 184 ms: what Ray adds is small beside it, even on a busy machine
    trace = trace_of(run(emulate(time_scale=scale), "train.steps=2", "schedule.tag=never"))
    measured = costs_of_trace(trace, "trace")
    emulation = emulation_of(load_recipe(QUICKSTART, [*SIZES, emulate(time_scale=scale)]))
    assert emulation is not None
    generator, trainer = (emulation.costs.plan(name, 0).durations for name in trace.settings.workers)
    for name, took, nominal in (
        ("generate", measured.generate[0], generator.generate),
        ("update", measured.update, trainer.update),
        ("optimizer", measured.optimizer, trainer.optimizer),
    ):
        assert nominal <= took < nominal + 0.1, name


def test_tag_and_stale_generation_happen_as_in_a_real_run(run: Run) -> None:
    trace = trace_of(run("schedule.max_stale_fraction=0.25", emulate(durations="known")))
    use = utilization(spans(trace))
    assert sum(step.tags for step in use.steps) > 0
    assert use.stale_fraction > 0
    assert trace.settings.costs is not None


@pytest.mark.parametrize(
    "changes",
    [
        ["cluster.placement=colocated"],
        ["cluster.scorers={placement: pool, replicas: 2}"],
        ["cluster.scorers.placement=driver"],
        ["schedule.micro_batching=none", "schedule.tag=never"],
        ["schedule.micro_batching=batch_axis", "schedule.groups_per_micro_batch=2", "schedule.update_after=step"],
        ["cluster.generators=[{replicas: 2, ranks: 4}, {replicas: 1, ranks: 2}]", "rollout.prompts_per_step=7"],
        [emulate(weight_bytes=3_000_000), "cluster.generators.0.replicas=2"],
        [emulate(jitter=0.3, straggler_share=0.1), "schedule.max_stale_fraction=0.5"],
    ],
    ids=["colocated", "scorers", "driver scores", "naive", "batch axis", "unlike pools", "weights", "scatter"],
)
def test_every_sample_is_accumulated_once_whoever_there_is(run: Run, changes: list[str]) -> None:
    trace = trace_of(run(*changes))
    accumulated = Counter(command.micro_batch for command in finished(trace, Accumulate))
    assert set(accumulated.values()) == {1}
    assert len(accumulated) == 3 * trace.settings.micro_batches


def test_a_worker_that_dies_is_started_anew_and_its_work_done_once(run: Run) -> None:
    deaths = [{"worker": "generator-1", "at_command": 5}]
    trace = trace_of(run("cluster.generators.0.replicas=3", "train.steps=40", emulate(deaths=deaths)))
    events = [event for entry in trace.entries for event in entry.events]
    lost, back = ([event.worker for event in events if isinstance(event, kind)] for kind in (WorkerLost, WorkerJoined))
    assert lost == ["generator-1"]
    assert back == lost, "40 steps last longer than the start of a process"
    assert not [event for event in events if isinstance(event, CommandFailed)]
    for kind in (Generate, Score, Accumulate):
        counted = Counter(command.micro_batch for command in finished(trace, kind))
        assert len(counted) == 40 * trace.settings.micro_batches
        if kind is Accumulate:
            assert set(counted.values()) == {1}


def test_the_processes_of_emulated_workers_stay_small(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Ray must not be imported before the session is prepared.
    from digenrl.runtime.ray.executor import RayExecutor

    maps: list[str] = []
    finish = RayExecutor.finish

    def look_then_finish(self: RayExecutor) -> None:
        listed = json.loads((tmp_path / "run" / "workers.json").read_text())
        assert set(listed) == {"generator-0", "trainer"}
        maps.extend(each.path for entry in listed.values() for each in psutil.Process(entry["pid"]).memory_maps())
        finish(self)

    monkeypatch.setattr(RayExecutor, "finish", look_then_finish)
    run()
    assert maps
    assert not [path for path in maps if "torch" in path]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sixty_four_emulated_replicas_run_on_this_machine(run: Run) -> None:
    trace = trace_of(run("cluster.generators.0.replicas=64", "rollout.prompts_per_step=128", emulate(time_scale=0.01)))
    assert len(trace.settings.generators) == 64
    workers = {command.worker for command in finished(trace, Generate)}
    assert len(workers & set(trace.settings.generators)) == 64
