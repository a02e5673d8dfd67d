"""Progress for people: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class RunConsole:
    """Shows the progress of one run; a context manager."""

    def __init__(self, steps: int, console: Console | None = None) -> None:
        self._console = console or Console()
        self._steps = steps
        self.first_step = 0
        """First step that this process trains, for the time that is left."""
        self._began = time.monotonic()
        self._warned: set[str] = set()
        self._progress: Progress | None = None
        if self._console.is_terminal:
            self._progress = Progress(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("reward {task.fields[reward]}  {task.fields[rate]}"),
                TimeElapsedColumn(),
                TextColumn("ETA"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._progress.add_task("train", total=steps, reward="-", rate="")

    def say(self, text: str) -> None:
        """One line."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def warn(self, kind: str, text: str) -> None:
        """A warning, shown once per kind."""
        if kind not in self._warned:
            self._warned.add(kind)
            self._console.print(f"warning: {text}", style="yellow", highlight=False, markup=False, soft_wrap=True)

    def stepped(self, step: int, metrics: dict[str, float]) -> None:
        """One RL step is done."""
        reward, rate = f"{metrics['reward_mean']:.3f}", f"{metrics['samples_per_second']:.1f} samples/s"
        if self._progress is not None:
            self._progress.update(self._task, completed=step + 1, reward=reward, rate=rate)
            return
        elapsed = time.monotonic() - self._began
        left = elapsed / (step + 1 - self.first_step) * (self._steps - step - 1)
        self.say(
            f"step {step + 1:>4}/{self._steps}  reward {reward}  grad norm {metrics.get('grad_norm', float('nan')):.2e}  "
            f"{rate}  {elapsed:.0f} s, {left:.0f} s left"
        )

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._progress is not None:
            self._progress.stop()
