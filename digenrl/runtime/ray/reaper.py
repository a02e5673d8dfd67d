"""A process that outlives the driver: whatever ends the driver, nothing of its private cluster is left.

Ray's daemons notice that their driver is gone, but two of their helpers do not, and neither do workers that are just starting.
The driver writes the processes of its cluster, one JSON list of [pid, creation time] a line, to this one's standard input, which
ends when the driver does. What a driver that was killed had no time to name is known by its log files in the cluster's folder.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import psutil

_PATIENCE_S = 3.0
_PATIENCE_WITH_ORPHANS_S = 1.0
_END_TIMEOUT_S = 15.0
_GOODBYE = "null\n"
"""Last line of a driver that ends in good order, and has named all that there is."""


class Reaper:
    """The driver's side; a context manager. Leaving it ends what is left of the cluster."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(self._folder)], stdin=subprocess.PIPE, text=True, start_new_session=True
        )
        return self

    def watch(self, processes: Iterable[psutil.Process]) -> None:
        """These are to be ended when the driver ends, in place of any named before."""
        assert self._process is not None and self._process.stdin is not None, "entered"
        self._process.stdin.write(json.dumps([[each.pid, each.create_time()] for each in processes]) + "\n")
        self._process.stdin.flush()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        assert self._process is not None and self._process.stdin is not None, "entered"
        self._process.stdin.write(_GOODBYE)
        self._process.stdin.close()
        self._process.wait(_END_TIMEOUT_S)


def reap(folder: Path, driver: int, lines: IO[str]) -> None:
    """Wait until ``lines`` end; then end the processes of the last line that are still there, and remove the folder."""
    newest, orderly = "[]", False
    for line in lines:
        newest, orderly = (newest, True) if line == _GOODBYE else (line, False)
    wanted = {(int(pid), float(created)) for pid, created in json.loads(newest)}
    deadline = time.monotonic() + (_PATIENCE_S if orderly else _PATIENCE_WITH_ORPHANS_S)  # most end by themselves, in good order
    while (left := [*_alive(wanted), *(() if orderly else _writers(folder, driver))]) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in left:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(left, timeout=_PATIENCE_S)  # what still runs could make the folder anew
    shutil.rmtree(folder, ignore_errors=True)


def _alive(wanted: set[tuple[int, float]]) -> list[psutil.Process]:
    found = []
    for pid, created in wanted:
        try:
            process = psutil.Process(pid)
            if process.create_time() == created and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def _writers(folder: Path, driver: int) -> list[psutil.Process]:
    """Processes that have a file of the folder open, other than to read it, as people do who look at a log; but the driver."""
    if not psutil.LINUX:
        return []
    return [process for process in psutil.process_iter() if process.pid != driver and _writes(process, folder)]


def _writes(process: psutil.Process, folder: Path) -> bool:
    try:
        return any(file.mode != "r" and folder in Path(file.path).parents for file in process.open_files())
    except psutil.Error:
        return False  # gone meanwhile, or another user's


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    reap(Path(sys.argv[1]), os.getppid(), sys.stdin)
