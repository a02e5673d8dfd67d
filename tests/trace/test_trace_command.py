"""``digenrl trace``: what it prints and writes, and how it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from digenrl.cli.trace import run
from digenrl.errors import ConfigError
from digenrl.trace.record import Trace, TraceWriter
from digenrl.trace.replay import replay

NOTHING: dict[str, Any] = {"gantt": None, "chrome": None, "utilization": False, "replay": False, "as_json": False}


@pytest.fixture
def written(tmp_path: Path, traces: dict[str, Trace]) -> str:
    """A trace file with a lost worker, TAG and stale work."""
    trace = traces["lost and back"]
    with TraceWriter(tmp_path / "trace.jsonl", trace.settings, source=trace.source) as file:
        for entry in trace.entries:
            file.record(entry.events, entry.commands)
    return str(tmp_path / "trace.jsonl")


def test_without_options_it_draws_the_run_and_says_what_happened(written: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(written, **NOTHING)
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith(("g0 ", "g1 ", "trainer ")) and line.endswith("|") for line in lines) == 3
    assert any(line.startswith("3 steps in ") and "TAG" in line for line in lines)
    assert "at 2.500 s: g1 was lost" in lines


def test_charts_are_written_and_named(written: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    svg, chrome = tmp_path / "t.svg", tmp_path / "t.json"
    run(written, **{**NOTHING, "gantt": str(svg), "chrome": str(chrome)})
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    assert json.loads(chrome.read_text(encoding="utf-8"))["traceEvents"]
    assert capsys.readouterr().out.splitlines() == [f"{svg} written", f"{chrome} written: open it in ui.perfetto.dev"]


def test_replay_says_how_many_commands_were_identical(
    written: str, traces: dict[str, Trace], capsys: pytest.CaptureFixture[str]
) -> None:
    count = replay(traces["lost and back"])
    run(written, **{**NOTHING, "replay": True})
    assert capsys.readouterr().out == f"replay: {count} of {count} commands identical\n"


def test_json_is_one_object_with_the_utilization_and_what_was_asked_for(
    written: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(written, **{**NOTHING, "as_json": True, "replay": True, "gantt": str(tmp_path / "t.svg")})
    plain = json.loads(capsys.readouterr().out)
    assert plain["source"] == "simulation"
    assert len(plain["steps"]) == 3
    assert plain["replayed_commands"] > 0
    assert plain["gantt"] == str(tmp_path / "t.svg")
    assert "worker lost" in [instant["what"] for instant in plain["instants"]]


def test_utilization_is_a_table(written: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(written, **{**NOTHING, "utilization": True})
    out = capsys.readouterr().out
    assert "generators" in out
    assert "step 2" in out
    assert " |" not in out


@pytest.mark.parametrize("option", ["gantt", "chrome"])
@pytest.mark.parametrize("bad", ["no/such/folder/file", ".", "a\0b"])
def test_a_path_that_cannot_be_written_is_refused_with_its_option(written: str, tmp_path: Path, option: str, bad: str) -> None:
    with pytest.raises(ConfigError, match=rf"--{option}: cannot write"):
        run(written, **{**NOTHING, option: str(tmp_path / bad)})


def test_a_trace_that_does_not_replay_is_refused_as_an_edited_file(written: str) -> None:
    text = Path(written).read_text(encoding="utf-8")
    Path(written).write_text(text.replace("first of 8 pending", "because"), encoding="utf-8")
    run(written, **NOTHING)
    with pytest.raises(ConfigError, match="replays to other commands"):
        run(written, **{**NOTHING, "replay": True})


def test_a_trace_with_a_line_missing_is_refused_with_its_instant(written: str) -> None:
    lines = Path(written).read_text(encoding="utf-8").splitlines(keepends=True)
    Path(written).write_text("".join(lines[:5] + lines[6:]), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"Instant \d+ of the trace"):
        run(written, **NOTHING)


def test_a_record_that_stops_before_the_run_does_is_said_to(written: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(written, **{**NOTHING, "replay": True})
    assert "stops before" not in capsys.readouterr().out
    lines = Path(written).read_text(encoding="utf-8").splitlines(keepends=True)
    Path(written).write_text("".join(lines[:20]), encoding="utf-8")
    run(written, **{**NOTHING, "replay": True})
    assert "commands identical; the record stops before the run's end" in capsys.readouterr().out
