"""Files that are either whole or absent, however the process ends."""

from __future__ import annotations

import csv
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor


def save_tensors(path: Path, tensors: Mapping[str, Tensor], notes: Mapping[str, str] | None = None) -> None:
    """Write named tensors and text to a safetensors file."""
    partial = path.with_suffix(".partial")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial, dict(notes or {}))
    os.replace(partial, path)


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """What ``save_tensors`` wrote, in memory of its own."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118


def save_folder(path: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a folder, then put it in the place of the one at ``path``."""
    partial = path.with_name(path.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write(partial)
    shutil.rmtree(path, ignore_errors=True)
    os.replace(partial, path)


class Table:
    """A csv file that grows by rows whose first column counts steps."""

    def __init__(self, path: Path, columns: Sequence[str], *, keep_below: int) -> None:
        """Begin the file, or go on with it from the rows whose step is below ``keep_below``."""
        kept: list[list[str]] = []
        if keep_below and path.exists():
            with path.open(newline="", encoding="utf-8") as file:
                kept = [row for row in list(csv.reader(file))[1:] if int(row[0]) < keep_below]
        self._file = path.open("w", newline="", encoding="utf-8")
        self._writer = csv.writer(self._file, lineterminator="\n")
        self._writer.writerows([list(columns), *kept])

    def append(self, *row: object) -> None:
        """Add a row."""
        self._writer.writerow(row)

    def flush(self) -> None:
        """Bring all rows to the disk."""
        self._file.flush()

    def close(self) -> None:
        """End the file."""
        self._file.close()
