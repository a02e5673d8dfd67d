"""A trace says exactly what happened, or it says nothing: round trips, replay, and every way a file can be wrong."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from digenrl.errors import ConfigError, ProtocolError
from digenrl.ids import MicroBatchId, StepOutcome, WorkerId
from digenrl.scheduling.commands import (
    Accumulate,
    Encode,
    Evaluate,
    Generate,
    OptimizerStep,
    Score,
    StopRun,
    SyncWeights,
    WorkerCommand,
)
from digenrl.scheduling.events import (
    CommandFailed,
    ConditioningLost,
    Finished,
    RunStarted,
    TrajectoryLost,
    WorkerJoined,
    WorkerLost,
    WorkerOverdue,
)
from digenrl.scheduling.scheduler import Scheduler
from digenrl.scheduling.settings import SchedulerSettings
from digenrl.trace import codec
from digenrl.trace.record import TraceWriter, read_trace
from digenrl.trace.replay import replay

whole = st.integers(0, 2**40)
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
workers = names.map(WorkerId)
micro_batches = st.builds(MicroBatchId, whole, whole)
worker_commands = st.one_of(
    st.builds(Encode, worker=workers, step=whole, reason=names),
    st.builds(Generate, worker=workers, micro_batch=micro_batches, policy_version=whole, reason=names),
    st.builds(Score, worker=workers, micro_batch=micro_batches, reason=names),
    st.builds(Accumulate, worker=workers, micro_batch=micro_batches, reason=names),
    st.builds(OptimizerStep, worker=workers, step=whole, reason=names),
    st.builds(SyncWeights, worker=workers, policy_version=whole, reason=names),
    st.builds(Evaluate, worker=workers, policy_version=whole, reason=names),
)
commands = st.one_of(worker_commands, st.builds(StopRun, reason=names))
outcomes = st.none() | st.sampled_from(StepOutcome)
events = st.one_of(
    st.builds(RunStarted, at_us=whole),
    st.builds(Finished, at_us=whole, command=worker_commands, outcome=outcomes),
    st.builds(CommandFailed, at_us=whole, command=worker_commands, error=names, untouched=st.booleans()),
    st.builds(WorkerLost, at_us=whole, worker=workers, error=names),
    st.builds(WorkerJoined, at_us=whole, worker=workers),
    st.builds(WorkerOverdue, at_us=whole, worker=workers),
    st.builds(TrajectoryLost, at_us=whole, micro_batch=micro_batches),
    st.builds(ConditioningLost, at_us=whole, step=whole),
)


@settings(max_examples=200, deadline=None, database=None)
@given(event=events, command=commands)
def test_every_event_and_command_comes_back_from_json_as_it_was(event: Any, command: Any) -> None:
    assert codec.event_from_json(json.loads(json.dumps(codec.to_json(event)))) == event
    assert codec.command_from_json(json.loads(json.dumps(codec.to_json(command)))) == command


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.sampled_from(["Encode", "Finished", "applied"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "worker", "step", "at_us", "x"]), inner),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None, database=None)
@given(event=events, where=st.integers(0, 20), value=junk)
def test_a_damaged_event_is_a_config_error_or_another_event_and_never_a_crash(event: Any, where: int, value: Any) -> None:
    plain = codec.to_json(event)
    target = plain.get("command", plain) if where % 2 else plain
    target[sorted(target)[where % len(target)]] = value
    try:
        again = codec.event_from_json(plain)
    except ConfigError:
        return
    assert json.loads(json.dumps(codec.to_json(again))) == {**codec.to_json(again), **plain}


@pytest.mark.parametrize(
    ("plain", "named"),
    [
        (None, "none of RunStarted, Finished"),
        ({"type": "Started", "at_us": 0}, "none of RunStarted, Finished"),
        ({"type": ["RunStarted"], "at_us": 0}, "none of RunStarted, Finished"),
        ({"type": "RunStarted"}, "at_us"),
        ({"type": "RunStarted", "at_us": "0"}, "'0' is not int"),
        ({"type": "RunStarted", "at_us": True}, "True is not int"),
        ({"type": "RunStarted", "at_us": 0, "by": "me"}, "RunStarted has no by"),
        ({"type": "Finished", "at_us": 0, "command": {"type": "StopRun", "reason": ""}}, "none of Encode"),
        ({"type": "Finished", "at_us": 0, "command": None}, "none of Encode"),
        ({"type": "Finished", "at_us": 0, "command": {"type": "Score", "worker": "w", "micro_batch": [0, 1]}}, "MicroBatchId"),
        ({"type": "Finished", "at_us": 0, "command": {"type": "Encode", "worker": 3, "step": 0}}, "3 is not str"),
        (
            {"type": "Finished", "at_us": 0, "command": {"type": "OptimizerStep", "worker": "w", "step": 0}, "outcome": "fine"},
            "fine",
        ),
    ],
)
def test_an_event_that_does_not_fit_is_refused_with_the_field_that_is_wrong(plain: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        codec.event_from_json(plain)


def record(path: Path, setup: SchedulerSettings, seed: int) -> int:
    """Run a schedule to its end in random order and write its trace. Returns the number of commands."""
    rng, scheduler, count = random.Random(seed), Scheduler(setup), 0
    outstanding: list[WorkerCommand] = []
    event: Any = RunStarted(at_us=0)
    with TraceWriter(path, setup) as trace:
        while True:
            answer = scheduler.handle(event)
            trace.record((event,), answer)
            count += len(answer)
            outstanding += [c for c in answer if not isinstance(c, StopRun)]
            if not outstanding:
                return count
            command = outstanding.pop(rng.randrange(len(outstanding)))
            outcome = rng.choice(list(StepOutcome)) if isinstance(command, OptimizerStep) else None
            event = Finished(at_us=event.at_us + rng.randint(0, 9), command=command, outcome=outcome)


@st.composite
def schedules(draw: st.DrawFn) -> SchedulerSettings:
    generators = tuple(WorkerId(f"生成-{i}") for i in range(draw(st.integers(1, 3))))
    steps = draw(st.integers(0, 4))
    return SchedulerSettings(
        steps=steps,
        micro_batches=draw(st.integers(1, 4)),
        generators=generators,
        trainer=draw(st.sampled_from([generators[0], WorkerId("trainer")])),
        update_order=draw(st.sampled_from(["arrival", "index"])),
        update_after=draw(st.sampled_from(["group", "step"])),
        max_skipped_steps=draw(st.integers(1, 3)),
        evaluate_at=tuple(sorted(draw(st.sets(st.integers(0, steps))))),
    )


@settings(max_examples=100, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(setup=schedules(), seed=st.integers(0, 2**32))
def test_a_recorded_run_replays_to_identical_commands(tmp_path: Path, setup: SchedulerSettings, seed: int) -> None:
    count = record(tmp_path / "trace.jsonl", setup, seed)
    trace = read_trace(tmp_path / "trace.jsonl")
    assert trace.settings == setup
    assert replay(trace) == count


SETUP = SchedulerSettings(
    steps=2, micro_batches=2, generators=(WorkerId("g0"), WorkerId("g1")), trainer=WorkerId("t"), evaluate_at=(0, 2)
)


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    record(path, SETUP, seed=1)
    return path


def refused(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    return caught.value.what


def test_each_line_is_on_disk_before_the_next_event_comes(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with TraceWriter(path, SETUP) as trace:
        trace.record([RunStarted(at_us=0)], [])
        assert read_trace(path).entries[0].events == (RunStarted(at_us=0),)


def test_a_trace_cut_off_inside_a_line_names_that_line(trace_file: Path) -> None:
    lines = trace_file.read_bytes().splitlines(keepends=True)
    trace_file.write_bytes(b"".join(lines[:4]) + lines[4][:25])
    assert f"{trace_file}:5:" in refused(trace_file)


def test_a_trace_cut_off_inside_a_character_names_that_line(trace_file: Path) -> None:
    trace_file.write_bytes(b"".join(trace_file.read_bytes().splitlines(keepends=True)[:2]) + '{"events": "é'.encode()[:-1])
    assert f"{trace_file}:3:" in refused(trace_file)


def test_the_trace_of_a_run_that_died_between_two_lines_still_replays(trace_file: Path) -> None:
    trace_file.write_bytes(b"".join(trace_file.read_bytes().splitlines(keepends=True)[:6]))
    trace = read_trace(trace_file)
    assert len(trace.entries) == 5
    assert replay(trace) > 0


def test_an_empty_file_is_not_a_trace(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_bytes(b"")
    assert f"{tmp_path / 'trace.jsonl'}:1:" in refused(tmp_path / "trace.jsonl")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "nothing.jsonl" in refused(tmp_path / "nothing.jsonl")


def edit(path: Path, number: int, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the JSON object of one line (from 1)."""
    lines = path.read_text(encoding="utf-8").splitlines()
    plain = json.loads(lines[number - 1])
    change(plain)
    lines[number - 1] = json.dumps(plain)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda head: head.update(format="chrome"), "not a DigenRL trace"),
        (lambda head: head.pop("format"), "not a DigenRL trace"),
        (lambda head: head.update(version=2), "trace version 2, and this DigenRL reads version 1"),
        (lambda head: head.pop("settings"), "SchedulerSettings"),
        (lambda head: head["settings"].update(speed=3), "has no speed"),
        (lambda head: head["settings"].update(steps="many"), "'many' is not int"),
        (lambda head: head["settings"].update(steps=-1), "steps"),
        (lambda head: head["settings"].update(generators="g0"), "'g0' is not"),
        (lambda head: head["settings"].update(generators=[]), "generators"),
        (lambda head: head["settings"].update(generators=["g0", 3]), "3 is not str"),
        (lambda head: head["settings"].update(evaluate_at=[7]), "evaluate_at"),
        (lambda head: head["settings"].update(update_order="random"), "'random' is not"),
        (lambda head: head["settings"].pop("trainer"), "trainer"),
    ],
)
def test_a_foreign_newer_or_edited_head_is_refused_in_line_one(
    trace_file: Path, change: Callable[[dict[str, Any]], object], named: str
) -> None:
    edit(trace_file, 1, change)
    what = refused(trace_file)
    assert f"{trace_file}:1:" in what
    assert named in what


@pytest.mark.parametrize(
    "change",
    [
        lambda line: line.pop("events"),
        lambda line: line.pop("commands"),
        lambda line: line.update(commands={}),
        lambda line: line.update(commands=[3]),
        lambda line: line["events"][0].update(at_us=None),
        lambda line: line["events"][0].pop("command"),
        lambda line: line["events"][0].update(type="Failed"),
    ],
)
def test_an_edited_line_is_refused_with_its_number(trace_file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    edit(trace_file, 4, change)
    assert refused(trace_file).startswith(f"{trace_file}:4: ")


@pytest.mark.parametrize("line", ["[1, 2]", "3", "not JSON", "[" * 100_000, '"' + "é" * 3])
def test_a_line_that_is_no_object_is_refused_with_its_number(trace_file: Path, line: str) -> None:
    lines = trace_file.read_text(encoding="utf-8").splitlines()
    trace_file.write_text("\n".join([*lines[:2], line, *lines[3:]]), encoding="utf-8")
    assert refused(trace_file).startswith(f"{trace_file}:3: ")


def test_a_blank_line_does_not_shift_the_numbers(trace_file: Path) -> None:
    lines = trace_file.read_text(encoding="utf-8").splitlines()
    trace_file.write_text("\n".join([*lines[:2], "", "broken"]), encoding="utf-8")
    assert refused(trace_file).startswith(f"{trace_file}:4: ")


def test_replay_of_a_trace_with_another_command_names_the_event(trace_file: Path) -> None:
    edit(trace_file, 2, lambda line: line["commands"][0].update(reason="because"))
    with pytest.raises(ProtocolError, match=r"Instant 0 .*replays to other commands"):
        replay(read_trace(trace_file))


def test_replay_of_a_trace_with_an_impossible_event_names_it(trace_file: Path) -> None:
    edit(trace_file, 4, lambda line: line["events"][0]["command"].update(worker="g7"))
    with pytest.raises(ProtocolError, match="Instant 2: The end of"):
        replay(read_trace(trace_file))


def test_replay_of_a_trace_with_a_line_missing_is_refused(trace_file: Path) -> None:
    lines = trace_file.read_text(encoding="utf-8").splitlines()
    trace_file.write_text("\n".join(lines[:5] + lines[6:]), encoding="utf-8")
    with pytest.raises(ProtocolError):
        replay(read_trace(trace_file))


def test_replay_under_other_settings_is_refused(trace_file: Path) -> None:
    trace = read_trace(trace_file)
    with pytest.raises(ProtocolError):
        replay(replace(trace, settings=replace(SETUP, micro_batches=3)))
