"""Stopping on SIGTERM and Ctrl-C: the command in hand is finished or dropped, the run is saved, the process ends in time.

The first signal asks: between two commands the run stops. A command that takes longer than ``grace_s`` is dropped by an
exception, except where dropping would leave weights half-changed. A second signal ends the process at once.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

GRACE_S = 10.0
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

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self._grace_s = grace_s
        self._signum: int | None = None
        self._critical = 0
        self._previous: dict[int, Any] = {}

    def check(self) -> None:
        """Raise StopRequested if a signal has come. To be called between commands."""
        if self._signum is not None:
            self._disarm()
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
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._disarm()
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        self._previous = {}

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
        raise StopRequested(self._signum)

    def _disarm(self) -> None:
        if self._previous:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
