"""One call logs a step: ``MetricsLog.log``. The JSONL file is always written, line by line."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from digenrl.errors import ConfigError


class MetricsLog:
    """Appends one JSON object per step or evaluation to ``metrics.jsonl``. Non-finite numbers become null."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def log(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        """Write one line. ``kind``: ``train`` (step = RL step, from 0) or ``eval`` (step = policy version)."""
        plain = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps({"kind": kind, "step": step, **plain}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All lines of a ``metrics.jsonl``. Raises ConfigError naming the line that is not JSON."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise ConfigError(f"{path}:{number}: this line is not JSON.", fix="Delete the incomplete line.") from error
    return rows
