"""One call logs a step: ``MetricsLog.log``. ``metrics.jsonl`` is always written; other sinks get a copy.

Invariants: a failing optional sink warns once and never stops a run; a failing metrics.jsonl stops it. Sinks see finite
numbers only. After a resume each step is logged once (``resume_rows``, and the sinks' own cut).
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from digenrl.config.schema import LogSection
from digenrl.errors import ConfigError, RunFailed
from digenrl.metrics.append import RecordFile

Warn = Callable[[str, str], None]
"""(kind, text) of a warning; ``RunConsole.warn``."""


class Sink(Protocol):
    """Another place that metrics go to. Whatever its methods raise becomes a warning."""

    name: str

    def log(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        """One step or evaluation; all numbers are finite."""

    def images(self, tag: str, step: int, images: NDArray[np.uint8], captions: Sequence[str]) -> None:
        """Pictures [N, H, W, 3] with one caption each."""

    def close(self) -> None:
        """Write what is left."""


def _to_stderr(kind: str, text: str) -> None:
    print(f"warning ({kind}): {text}", file=sys.stderr)


class MetricsLog:
    """Appends one JSON object per step or evaluation to ``metrics.jsonl`` and hands copies to the other sinks."""

    def __init__(
        self, path: Path, sinks: Sequence[Sink] = (), *, warn: Warn = _to_stderr, labels: Mapping[str, str] | None = None
    ) -> None:
        """labels: texts that every line carries, as what kind of run it is of."""
        self._path = path
        self._labels = dict(labels or {})
        self._sinks = tuple(sinks)
        self._warn = warn
        self._warned: set[str] = set()
        try:
            self._file = RecordFile(path)
        except OSError as error:
            raise _cannot_write(path, error) from error

    def log(self, kind: str, step: int, metrics: Mapping[str, float | None]) -> None:
        """Write one line. ``kind``: ``train`` (step = RL step, from 0) or ``eval`` (step = policy version).

        None and non-finite numbers are null in the file and left out elsewhere. Raises RunFailed when the line cannot be written.
        """
        plain = {name: _finite(value) for name, value in metrics.items()}
        try:
            self._file.append((json.dumps({"kind": kind, "step": step, **self._labels, **plain}) + "\n").encode())
        except OSError as error:
            raise _cannot_write(self._path, error) from error
        finite = {name: value for name, value in plain.items() if value is not None}
        for sink in self._sinks:
            self._attempt(sink, partial(sink.log, kind, step, finite))

    def images(self, tag: str, step: int, images: NDArray[np.uint8], captions: Sequence[str]) -> None:
        """Hand pictures [N, H, W, 3] to the optional sinks. ``tag`` begins with the kind of ``step``, ``train/`` or ``eval/``."""
        if not tag.startswith(("train/", "eval/")):
            raise ValueError(f"{tag!r} does not begin with train/ or eval/, so a resume could not tell which steps to keep")
        for sink in self._sinks:
            self._attempt(sink, partial(sink.images, tag, step, images, captions))

    def close(self) -> None:
        """Close the file and the sinks."""
        self._file.close()
        for sink in self._sinks:
            self._attempt(sink, sink.close)

    def _attempt(self, sink: Sink, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # whatever a foreign writer raises (no network, full disk): a run is worth more than its plots
            if sink.name not in self._warned:
                self._warned.add(sink.name)
                self._warn(
                    f"log.{sink.name}",
                    f"log.{sink.name} fails: {_describe(error)}. The run goes on and {self._path.name} has everything; "
                    "this is said once.",
                )


def open_sinks(
    section: LogSection,
    folder: Path,
    *,
    run_name: str,
    config: Mapping[str, Any],
    resume_step: int | None,
    warn: Warn = _to_stderr,
) -> tuple[Sink, ...]:
    """The optional sinks that the recipe's ``log`` section asks for; ``folder`` is the run's.

    config: the plain recipe, shown by W&B. resume_step: the first step that will be trained now, None in a new run; what the
    sinks hold of it and later steps is dropped. Raises ConfigError for a library that is missing; a sink that cannot be
    opened for another reason (no network, not logged in) warns and is left out.
    """
    sinks: list[Sink] = []
    if section.tensorboard:
        from digenrl.metrics.tensorboard import TensorBoardSink

        try:
            sinks.append(TensorBoardSink(folder / "tensorboard", resume_step=resume_step))
        except OSError as error:
            warn("log.tensorboard", f"log.tensorboard cannot be opened: {_describe(error)}. The run goes on without it.")
    if section.wandb is not None:
        from digenrl.metrics.wandb_sink import WandbSink, import_wandb

        wandb = import_wandb()
        try:
            sinks.append(WandbSink(wandb, section.wandb, folder, run_name=run_name, config=config))
        except Exception as error:  # W&B's own errors, a refused login, a network that is not there
            warn(
                "log.wandb",
                f"log.wandb cannot be opened: {_describe(error)}. The run goes on without it. "
                "Log in with `wandb login`, or set log.wandb.mode=offline on a machine without a network.",
            )
    return tuple(sinks)


def is_kept(kind: str, step: int, before_step: int) -> bool:
    """Whether something logged stays when a run goes on with step ``before_step``, whose version is evaluated already."""
    return step <= before_step if kind == "eval" else step < before_step


def resume_rows(path: Path, *, before_step: int) -> list[dict[str, Any]]:
    """Cut a JSONL log back to what is older than ``before_step``, the first step that will be trained now; the rows left.

    For metrics.jsonl (``kind`` and ``step``) and samples/index.jsonl (``step``, or ``held_out`` and ``policy_version``).
    Lines that stay keep their bytes; a last line that was cut short by a crash goes. The file is replaced as a whole or not
    at all. Raises ConfigError naming any other line that is not a row, and when the file cannot be written.
    """
    try:
        before = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _cannot_resume(path, error) from error
    lines = before.split(b"\n")
    last = max((number for number, line in enumerate(lines) if line.strip()), default=-1)
    kept, rows = [], []
    for number, line in enumerate(lines):
        row = _row(line) if line.strip() else None
        if row is not None and is_kept(*_kind_and_step(row), before_step):
            kept.append(line + b"\n")
            rows.append(row)
        elif row is None and line.strip() and number != last:
            raise ConfigError(f"{path}:{number + 1}: this line is not a row of a log.", fix="Delete the line.")
    after = b"".join(kept)
    try:
        if after != before:
            _replace(path, after)
    except OSError as error:
        raise _cannot_resume(path, error) from error
    return rows


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All lines of a ``metrics.jsonl``. Raises ConfigError naming the line that is not JSON."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise ConfigError(f"{path}:{number}: this line is not JSON.", fix="Delete the incomplete line.") from error
    return rows


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(_kind_and_step(row)[1], int) else None


def _kind_and_step(row: Mapping[str, Any]) -> tuple[str, Any]:
    if row.get("held_out"):
        return "eval", row.get("policy_version")
    return row.get("kind", "train"), row.get("step")


def _replace(path: Path, content: bytes) -> None:
    draft = path.with_name(f"{path.name}.tmp")
    with draft.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def _finite(value: float | None) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(". ")


def _cannot_write(path: Path, error: OSError) -> RunFailed:
    return RunFailed(
        f"Cannot write {path}: {error.strerror or error}.",
        why="The metrics of a run are its record; training on without one would lose them.",
        fix="Make room or mend the permissions, then resume the run.",
    )


def _cannot_resume(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"Cannot cut {path} back to the step that the run goes on with: {error.strerror or error}.",
        why="Steps that are trained again would be in it twice.",
        fix="Make room or mend the permissions of the run folder.",
    )
