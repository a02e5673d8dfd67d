"""`digenrl train` in a process of its own, and everything that it may leave behind.

A process is the run's when it was seen below the driver, or when it has a file of the run's private cluster open: processes of
Ray overwrite their command line and environment, and lose their parent when the driver is killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import psutil

from tests.runtime.ray.conftest import QUICKSTART, SMALL

ROOT = QUICKSTART.parents[1]
_SHARED_MEMORY = Path("/dev/shm")
_LOOK_EVERY_S = 0.2
_MOST_S = 120.0


class Driver:
    """One run; a context manager that ends whatever of it is still there."""

    def __init__(self, log: Path, *arguments: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        # A token of its own, as a user's run has it.
        environment = {name: value for name, value in environment.items() if not name.startswith("RAY_AUTH_")}
        self._shared_memory = set(_SHARED_MEMORY.iterdir()) if _SHARED_MEMORY.is_dir() else set()
        self._log = log
        with log.open("w", encoding="utf-8") as output, self._errors.open("w", encoding="utf-8") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "digenrl.cli.main", "train", *arguments],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
            )
        self.began = time.monotonic()
        self._seen: set[psutil.Process] = set()
        self._folders: set[Path] = set()
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._watcher.join(10)
        self.process.kill()
        self.process.wait(10)
        for process in self.processes():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue

    @property
    def stdout(self) -> str:
        """What it has said so far."""
        return self._log.read_text(encoding="utf-8")

    @property
    def stderr(self) -> str:
        """What it has said of errors."""
        return self._errors.read_text(encoding="utf-8")

    @property
    def exit_code(self) -> int:
        """As a shell has it. Of a driver that has ended."""
        code = self.process.poll()
        assert code is not None, "it goes on"
        return 128 - code if code < 0 else code

    def wait_until(self, happens: Callable[[], bool], timeout_s: float = _MOST_S) -> None:
        """Wait for something that the run does; it fails when the driver ends before."""
        deadline = time.monotonic() + timeout_s
        while not happens():
            assert self.process.poll() is None, f"the run ended with {self.exit_code}:\n{self.stdout}\n{self.stderr}"
            assert time.monotonic() < deadline, f"not within {timeout_s} s:\n{self.stdout}\n{self.stderr}"
            time.sleep(0.01)

    def wait_for(self, words: str) -> None:
        """Wait until these stand in its output."""
        self.wait_until(lambda: words in self.stdout)

    def signal(self, signum: signal.Signals) -> None:
        """Send the driver a signal, once its present children are known."""
        self.look()
        self.process.send_signal(signum)

    def wait_for_end(self, timeout_s: float) -> float:
        """Wait until the driver has ended; seconds that it took."""
        began = time.monotonic()
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it has not ended within {timeout_s} s:\n{self.stdout}\n{self.stderr}") from None
        return time.monotonic() - began

    def wait_for_nothing_left(self, timeout_s: float) -> float:
        """Wait until no process, folder or shared memory of the run is left; seconds that it took."""
        began = time.monotonic()
        while left := self.leftovers():
            assert time.monotonic() - began < timeout_s, f"left after {timeout_s} s: {left}"
            time.sleep(0.1)
        return time.monotonic() - began

    def leftovers(self) -> list[str]:
        """What there is of the run at this moment, apart from the run folder and the driver itself."""
        new = set(_SHARED_MEMORY.iterdir()) - self._shared_memory if _SHARED_MEMORY.is_dir() else set()
        return [
            *(_described(process) for process in self.processes()),
            *(str(folder) for folder in self._folders if folder.exists()),
            *(str(path) for path in new),
        ]

    def processes(self) -> list[psutil.Process]:
        """Living processes of the run, apart from the driver."""
        holders = {process for process in psutil.process_iter() if self._holds_a_file(process)}
        return [process for process in self._seen | holders if _lives(process) and process.pid != self.process.pid]

    def look(self) -> None:
        """Take note of the processes that there are below the driver."""
        try:
            found = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return
        for process in found:
            self._seen.add(process)
            command = _command(process)
            if "digenrl.runtime.ray.reaper" in command:
                self._folders.add(Path(command[-1]))

    @property
    def _errors(self) -> Path:
        return self._log.with_suffix(".err")

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_EVERY_S):
            self.look()

    def _holds_a_file(self, process: psutil.Process) -> bool:
        try:
            return any(folder in Path(file.path).parents for file in process.open_files() for folder in self._folders)
        except psutil.Error:
            return False


def arguments(run: Path, *changes: str) -> list[str]:
    """The small recipe on a private cluster, to be trained in ``run``, or to be gone on with there."""
    from tests.runtime.ray.conftest import DISAGGREGATED

    return [str(QUICKSTART), *SMALL, *DISAGGREGATED, f"run.output_dir={run}", *changes, "--resume", "auto"]


def workers(run: Path) -> dict[str, int]:
    """Process ids of the workers of a run, by name; none before they are loaded."""
    file = run / "workers.json"
    return {name: entry["pid"] for name, entry in json.loads(file.read_text(encoding="utf-8")).items()} if file.exists() else {}


def summary(run: Path) -> dict[str, Any]:
    """Of a run that has ended."""
    found: dict[str, Any] = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    return found


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _command(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def _described(process: psutil.Process) -> str:
    return f"{process.pid} {' '.join(_command(process))[:80]}"
