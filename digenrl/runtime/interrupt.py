"""Stopping on SIGTERM and Ctrl-C: the command in hand is finished or dropped, the run is saved, the process ends in time.

The first signal asks: between two commands the run stops. A command that takes longer than ``grace_s`` is dropped by an
exception, except where dropping would leave weights half-changed. A second signal ends the process at once, and so does a
watchdog after ``HARD_LIMIT_S``: for a reward that swallows every exception, or a call that does not return to Python (as long
as it lets other threads run). The newest complete checkpoint is then what the run goes on from.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

GRACE_S = 10.0
HARD_LIMIT_S = 27.0
_RETRY_S = 0.2


class StopRequested(BaseException):
    """A signal asked the run to stop. Not an Exception: no ``except Exception`` of a reward may swallow it."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum

    @property
    def exit_code(self) -> int:
        """As shells have it: 143 for SIGTERM, 130 for Ctrl-C."""
        return 128 + self.signum


class Interrupt:
    """Listens for SIGTERM and SIGINT while a run is on; a context manager. Does nothing outside the main thread."""

    def __init__(self, grace_s: float = GRACE_S, hard_limit_s: float = HARD_LIMIT_S) -> None:
        self._grace_s = grace_s
        self._hard_limit_s = hard_limit_s
        self._watchdog: tuple[int, int] | None = None
        self._signum: int | None = None
        self._critical = 0
        self._previous: dict[int, Any] = {}

    def check(self) -> None:
        """Raise StopRequested if a signal has come. To be called between commands."""
        if self._signum is not None:
            self.calm()
            raise StopRequested(self._signum)

    @contextmanager
    def critical(self) -> Iterator[None]:
        """What must not be dropped half-way: an optimizer step, a checkpoint."""
        self._critical += 1
        try:
            yield
        finally:
            self._critical -= 1

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = {
                signal.SIGTERM: signal.signal(signal.SIGTERM, self._ask),
                signal.SIGINT: signal.signal(signal.SIGINT, self._ask),
                signal.SIGALRM: signal.signal(signal.SIGALRM, self._drop),
            }
            self._watch()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.calm()
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        self._previous = {}
        if self._watchdog is not None:
            signal.set_wakeup_fd(-1)
            os.close(self._watchdog[1])  # the watchdog reads the end, and ends
            self._watchdog = None

    def _watch(self) -> None:
        """Start a thread that is told of signals by the system itself, also while the main thread is busy elsewhere."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self._watchdog = (reader, writer)
        threading.Thread(target=_watchdog, args=(reader, self._hard_limit_s), name="interrupt-watchdog", daemon=True).start()

    def _ask(self, signum: int, frame: FrameType | None) -> None:
        del frame
        if self._signum is not None:
            os._exit(128 + signum)
        self._signum = signum
        signal.setitimer(signal.ITIMER_REAL, self._grace_s)

    def _drop(self, signum: int, frame: FrameType | None) -> None:
        del signum, frame
        if self._critical:
            signal.setitimer(signal.ITIMER_REAL, _RETRY_S)
            return
        assert self._signum is not None, "the timer is set by a signal"
        signal.setitimer(signal.ITIMER_REAL, _RETRY_S)  # once more, for code that swallows everything
        raise StopRequested(self._signum)

    def calm(self) -> None:
        """Drop nothing more: the stop is under way."""
        if self._previous:
            signal.setitimer(signal.ITIMER_REAL, 0.0)


def _watchdog(reader: int, hard_limit_s: float) -> None:
    """Wait for a stop signal, and end the process when it is still there after the limit, or asked a second time."""
    wanted = {signal.SIGTERM, signal.SIGINT}
    deadline: float | None = None
    signum = signal.SIGTERM
    with open(reader, "rb", buffering=0) as pipe:
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([pipe], [], [], left)
            if not ready:
                os._exit(128 + signum)
            data = pipe.read(1)
            if not data:
                return
            if data[0] in wanted:
                if deadline is not None:
                    os._exit(128 + data[0])
                signum, deadline = signal.Signals(data[0]), time.monotonic() + hard_limit_s
