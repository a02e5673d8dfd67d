"""``digenrl trace``: look at the record of a run, turn it into charts, and check that it replays."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from digenrl.config.text import expand_home
from digenrl.errors import ConfigError, ProtocolError
from digenrl.trace.chrome import chrome_trace
from digenrl.trace.gantt import svg_gantt
from digenrl.trace.record import Trace, read_trace
from digenrl.trace.replay import replay_to_the_end
from digenrl.trace.spans import spans
from digenrl.trace.terminal import text_gantt
from digenrl.trace.timeline import Mark, Spans
from digenrl.trace.utilization import utilization as utilization_of


def run(path: str, *, gantt: str | None, chrome: str | None, utilization: bool, replay: bool, as_json: bool) -> None:
    """Print the timeline of a trace or what was asked for, and write the charts. Raises ConfigError for a damaged trace."""
    trace = read_trace(expand_home(path, where="FILE"))
    timeline = spans(trace)
    use = utilization_of(timeline)
    found: dict[str, object] = {}
    lines = [*use.lines(), ""] if utilization else []
    if replay:
        count, complete = _replayed(trace)
        found |= {"replayed_commands": count, "complete": complete}
        end = "" if complete else "; the record stops before the run's end"
        lines.append(f"replay: {count} of {count} commands identical{end}")
    if gantt is not None:
        _write(gantt, svg_gantt(timeline), "--gantt")
        found["gantt"] = gantt
        lines.append(f"{gantt} written")
    if chrome is not None:
        _write(chrome, json.dumps(chrome_trace(timeline), ensure_ascii=False), "--chrome")
        found["chrome"] = chrome
        lines.append(f"{chrome} written: open it in ui.perfetto.dev")
    if as_json:
        print(json.dumps({**use.to_plain(), "instants": _instants(timeline), **found}, indent=2, ensure_ascii=False))
        return
    if not lines:
        columns = min(max(shutil.get_terminal_size().columns, 60), 200)
        lines = [text_gantt(timeline, columns=columns), "", use.summary(), *_happened(timeline)]
    print("\n".join(lines).rstrip("\n"))


def _replayed(trace: Trace) -> tuple[int, bool]:
    """Commands that a fresh scheduler repeats, and whether the record is complete. ConfigError where it decides otherwise."""
    try:
        return replay_to_the_end(trace)
    except ProtocolError as error:
        raise ConfigError(error.what, why=error.why, fix=error.fix) from error


def _happened(timeline: Spans) -> list[str]:
    """What went wrong, one line each; of very many, the first ones."""
    found = [i for i in timeline.instants if i.mark is not Mark.PUBLISHED]
    shown = [f"at {instant.at_us / 1e6:.3f} s: {instant.text}" for instant in found[:20]]
    return shown + ([f"... and {len(found) - 20} more"] if len(found) > 20 else [])


def _instants(timeline: Spans) -> list[dict[str, object]]:
    return [{"at_s": i.at_us / 1e6, "what": str(i.mark), "text": i.text} for i in timeline.instants]


def _write(file: str, content: str, option: str) -> None:
    try:
        Path(expand_home(file, where=option)).write_text(content, encoding="utf-8", errors="backslashreplace")
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the path
        raise ConfigError(
            f"{option}: cannot write {file!r}: {getattr(error, 'strerror', None) or error}.",
            fix="Choose a file in a folder that exists and that you may write to.",
        ) from error
