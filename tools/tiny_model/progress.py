"""How far a training is, how fast, how long it still takes, and whether it shall stop."""

from __future__ import annotations

import signal
import time
from types import FrameType

_SECONDS_BETWEEN_LINES = 15.0
_SMOOTHING = 0.98


class Deadline:
    """Passed after so many seconds, or when the process is asked to end (SIGTERM, Ctrl-C)."""

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds
        self._asked = False
        signal.signal(signal.SIGTERM, self._ask)
        signal.signal(signal.SIGINT, self._ask)

    def passed(self) -> bool:
        """Whether to stop now."""
        return self._asked or (self._end is not None and time.monotonic() > self._end)

    def _ask(self, signum: int, frame: FrameType | None) -> None:
        self._asked = True


class Progress:
    """Prints a line every few seconds."""

    def __init__(self, name: str, *, total_images: int, done_images: int = 0) -> None:
        self._name = name
        self._total = total_images
        self._start = self._told = time.monotonic()
        self._first = self._last = done_images
        self._loss: float | None = None

    def tell(self, images: int, loss: float) -> None:
        """images: how many of all have been trained on; loss: that of the last batch."""
        self._loss = loss if self._loss is None else _SMOOTHING * self._loss + (1 - _SMOOTHING) * loss
        now = time.monotonic()
        if now - self._told < _SECONDS_BETWEEN_LINES and images < self._total:
            return
        rate = (images - self._last) / max(now - self._told, 1e-9)
        overall = (images - self._first) / max(now - self._start, 1e-9)
        left_min = (self._total - images) / max(overall, 1e-9) / 60
        print(
            f"{self._name}: {images:,} of {self._total:,} images, loss {self._loss:.4f}, {rate:.0f} img/s, "
            f"{left_min:.1f} min left",
            flush=True,
        )
        self._told, self._last = now, images
