"""`digenrl train` in a process of its own, and everything that a run may leave behind.

A process is a run's when it was seen below the driver, or when it has a file of the run's private cluster open: processes of
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

from tests.runtime.ray.conftest import DISAGGREGATED, QUICKSTART, SMALL

ROOT = QUICKSTART.parents[1]
_SHARED_MEMORY = Path("/dev/shm")
_LOOK_EVERY_S = 0.2
_MOST_S = 240.0


class Remains:
    """What there is of a run beside its driver: processes, the folder of its private cluster, shared memory."""

    def __init__(self, driver: int) -> None:
        self._driver = driver
        self._shared_memory = _shared_memory()
        self._strangers = {driver, *(process.pid for process in _children(driver))}
        self._seen: set[psutil.Process] = set()
        self.folders: set[Path] = set()

    def look(self) -> None:
        """Take note of the processes that there are below the driver now."""
        for process in _children(self._driver):
            if process.pid in self._strangers:
                continue
            self._seen.add(process)
            command = _command(process)
            if "digenrl.runtime.ray.reaper" in command:
                self.folders.add(Path(command[-1]))

    def processes(self) -> list[psutil.Process]:
        """Those that live."""
        holders = {process for process in psutil.process_iter() if self._holds_a_file(process)}
        return [process for process in self._seen | holders if process.pid not in self._strangers and _lives(process)]

    def wait_until_gone(self, timeout_s: float) -> float:
        """Wait until nothing is left; seconds that it took."""
        began = time.monotonic()
        while left := self._left():
            assert time.monotonic() - began < timeout_s, f"left after {timeout_s} s: {left}"
            time.sleep(0.1)
        return time.monotonic() - began

    def _left(self) -> list[str]:
        processes = [f"{process.pid} {' '.join(_command(process))[:80]}" for process in self.processes()]
        files = [*(folder for folder in self.folders if folder.exists()), *(_shared_memory() - self._shared_memory)]
        return [*processes, *map(str, files)]

    def _holds_a_file(self, process: psutil.Process) -> bool:
        try:
            return any(folder in Path(file.path).parents for file in process.open_files() for folder in self.folders)
        except psutil.Error:
            return False


class Driver:
    """One run; a context manager that ends whatever of it is still there."""

    def __init__(self, log: Path, *arguments: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        # A token of its own, as a user's run has it.
        environment = {name: value for name, value in environment.items() if not name.startswith("RAY_AUTH_")}
        self._out, self._err = log.with_suffix(".out"), log.with_suffix(".err")
        with self._out.open("w", encoding="utf-8") as out, self._err.open("w", encoding="utf-8") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "digenrl.cli.main", "train", *arguments],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )
        self.began = time.monotonic()
        self.remains = Remains(self.process.pid)
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
        for process in self.remains.processes():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue

    @property
    def stdout(self) -> str:
        """What it has said so far."""
        return self._out.read_text(encoding="utf-8")

    @property
    def stderr(self) -> str:
        """What it has said of errors."""
        return self._err.read_text(encoding="utf-8")

    @property
    def exit_code(self) -> int:
        """As a shell has it, of a driver that has ended."""
        code = self.process.poll()
        assert code is not None, "it goes on"
        return 128 - code if code < 0 else code

    def wait_until(self, happens: Callable[[], bool]) -> None:
        """Wait for something that the run does; fails when the driver ends before."""
        deadline = time.monotonic() + _MOST_S
        while not happens():
            assert self.process.poll() is None, f"the run ended with {self.exit_code}:\n{self.stdout}\n{self.stderr}"
            assert time.monotonic() < deadline, f"not within {_MOST_S} s:\n{self.stdout}\n{self.stderr}"
            time.sleep(0.01)

    def wait_for(self, words: str) -> None:
        """Wait until these stand in its output."""
        self.wait_until(lambda: words in self.stdout)

    def signal(self, signum: signal.Signals) -> None:
        """Send the driver a signal, once its present children are known."""
        self.remains.look()
        self.process.send_signal(signum)

    def wait_for_end(self, timeout_s: float) -> float:
        """Wait until the driver has ended; seconds that it took."""
        began = time.monotonic()
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it has not ended within {timeout_s} s:\n{self.stdout}\n{self.stderr}") from None
        return time.monotonic() - began

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_EVERY_S):
            self.remains.look()


def arguments(run: Path, *changes: str) -> list[str]:
    """The small recipe on a private cluster, to be trained in ``run``, or to be gone on with where it was begun there."""
    return [str(QUICKSTART), *SMALL, *DISAGGREGATED, f"run.output_dir={run}", *changes, "--resume", "auto"]


def workers(run: Path) -> dict[str, int]:
    """Process ids of the workers of a run, by name; none before they are loaded."""
    file = run / "workers.json"
    return {name: entry["pid"] for name, entry in json.loads(file.read_text(encoding="utf-8")).items()} if file.exists() else {}


def steps_done(run: Path) -> int:
    """Steps in the metrics of a run."""
    metrics = run / "metrics.jsonl"
    return metrics.read_text(encoding="utf-8").count("\n") if metrics.exists() else 0


def summary(run: Path) -> dict[str, Any]:
    """Of a run that has ended."""
    found: dict[str, Any] = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    return found


def _children(pid: int) -> list[psutil.Process]:
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def _shared_memory() -> set[Path]:
    return set(_SHARED_MEMORY.iterdir()) if _SHARED_MEMORY.is_dir() else set()


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
