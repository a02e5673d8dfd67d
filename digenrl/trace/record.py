"""Writing and reading ``trace.jsonl``. Each line is flushed, so a run that dies leaves a usable record."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from digenrl.config.text import read_text
from digenrl.errors import ConfigError
from digenrl.scheduling.commands import Command
from digenrl.scheduling.events import Event
from digenrl.scheduling.settings import SchedulerSettings
from digenrl.trace import codec

MADE = {"simulation": "simulated", "emulation": "emulated"}
"""What the runs are called whose workers did nothing, by the trace's source."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What happened at one instant, and the commands that the scheduler answered with."""

    events: tuple[Event, ...]
    commands: tuple[Command, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """A whole record."""

    settings: SchedulerSettings
    entries: tuple[Entry, ...]
    source: str = "run"
    """What made it: ``run``, ``simulation``, whose times are virtual, or ``emulation``, whose workers only slept."""

    @property
    def made(self) -> str:
        """``simulated`` or ``emulated``; empty for a run."""
        return MADE.get(self.source, "")


class TraceWriter:
    """Appends entries to a trace file; a context manager."""

    def __init__(self, path: Path, settings: SchedulerSettings, *, source: str = "run") -> None:
        self._file = path.open("w", encoding="utf-8")
        head = {"format": codec.FORMAT, "version": codec.VERSION, "source": source}
        self._write({**head, "settings": dataclasses.asdict(settings)})

    def record(self, events: Sequence[Event], commands: Sequence[Command]) -> None:
        """Write the events of one instant with the commands that they led to."""
        line = {"events": [codec.to_json(event) for event in events]}
        self._write({**line, "commands": [codec.to_json(command) for command in commands]})

    def close(self) -> None:
        """Close the file; recording afterwards is an error."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def _write(self, line: dict[str, object]) -> None:
        self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._file.flush()


def read_trace(path: Path) -> Trace:
    """Read a trace. Raises ConfigError naming file and line where it is truncated, foreign or newer than this version."""
    lines = [(number, line) for number, line in enumerate(read_text(path).split("\n"), start=1) if line]
    if not lines:
        raise ConfigError(f"{path}:1: an empty file is not a trace.", fix="Give the trace.jsonl of a run folder.")
    head_number, head_line = lines[0]
    head = _parse(head_line, path, head_number)
    if head.get("format") != codec.FORMAT:
        raise ConfigError(f"{path}:1: this is not a DigenRL trace.", fix="Give the trace.jsonl of a run folder.")
    if head.get("version") != codec.VERSION:
        raise ConfigError(
            f"{path}:1: trace version {head.get('version')}, and this DigenRL reads version {codec.VERSION}.",
            fix="Read it with the DigenRL that wrote it.",
        )
    with _named(path, head_number):
        settings: SchedulerSettings = codec.from_plain(SchedulerSettings, head.get("settings"))
    return Trace(settings, tuple(_entries(lines[1:], path)), source=str(head.get("source")))


def _entries(lines: Sequence[tuple[int, str]], path: Path) -> Iterator[Entry]:
    for number, line in lines:
        plain = _parse(line, path, number)
        with _named(path, number):
            events = tuple(codec.event_from_json(item) for item in _list(plain, "events"))
            commands = tuple(codec.command_from_json(item) for item in _list(plain, "commands"))
        yield Entry(events, commands)


@contextmanager
def _named(path: Path, number: int) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{path}:{number}: {error.what}", fix="The file is damaged; use an intact trace.") from error


def _parse(line: str, path: Path, number: int) -> dict[str, object]:
    try:
        plain = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path}:{number}: this line is not JSON: {error}.",
            why="A run that was killed can leave a half line at the end.",
            fix="Delete the last line if it is incomplete.",
        ) from error
    if not isinstance(plain, dict):
        raise ConfigError(f"{path}:{number}: this line is not an object.", fix="Give the trace.jsonl of a run folder.")
    return plain


def _list(plain: dict[str, object], key: str) -> list[object]:
    value = plain.get(key)
    if not isinstance(value, list):
        raise ConfigError(f"`{key}` is not a list.")
    return value
