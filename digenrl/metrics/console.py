"""Progress for people: on a terminal a live bar, or a live table in runs of several workers; plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from digenrl.metrics.live import LiveState, bubble_words, live_table

LiveSource = Callable[[], LiveState]
"""Says how a run is at this moment. Called from a thread of the display."""

REFRESH_PER_SECOND = 4


class RunConsole:
    """Shows the progress of one run; a context manager."""

    def __init__(self, steps: int, console: Console | None = None) -> None:
        self._console = console or Console()
        self._steps = steps
        self.first_step = 0
        """First step that this process trains, for the time that is left."""
        self._began = time.monotonic()
        self._warned: set[str] = set()
        self._shown = False
        """Whether the bar or the table is on the screen."""
        self._live: Live | None = None
        self._source: LiveSource | None = None
        self._reward: float | None = None
        self._rate: float | None = None
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
            # A Text: the style of a print would colour the live display below it, too.
            self._console.print(Text(f"warning: {text}", style="yellow"), soft_wrap=True)

    def show(self, state: LiveState) -> None:
        """Show this state, until the next one."""
        self.follow(lambda: state)

    def follow(self, source: LiveSource) -> None:
        """From now on show what ``source`` says, asked again a few times a second.

        Nothing changes where there is no terminal, or where the run has only one worker: the bar says everything about it.
        """
        if not self._console.is_terminal or (self._live is None and len(source().workers) < 2):
            return
        self._source = source
        if self._live is None:
            self._live = Live(get_renderable=self._table, console=self._console, refresh_per_second=REFRESH_PER_SECOND)
            if self._shown and self._progress is not None:
                self._progress.live.transient = True  # leaves no bar behind that would never be full
                self._progress.stop()
                self._live.start()

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        """One RL step is done."""
        self._reward, self._rate = metrics["reward_mean"], metrics["samples_per_second"]
        reward, rate = f"{self._reward:.3f}", f"{self._rate:.1f} samples/s"
        if self._live is not None:
            return
        if self._progress is not None:
            self._progress.update(self._task, completed=step + 1, reward=reward, rate=rate)
            return
        elapsed = time.monotonic() - self._began
        left = elapsed / (step + 1 - self.first_step) * (self._steps - step - 1)
        self.say(
            f"step {step + 1:>4}/{self._steps}  reward {reward}  grad norm {metrics.get('grad_norm', float('nan')):.2e}  "
            f"{rate}  {_pools(metrics)}{elapsed:.0f} s, {left:.0f} s left"
        )

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        self._shown = True
        display = self._live or self._progress
        if display is not None:
            display.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._shown = False
        display = self._live or self._progress
        if display is not None:
            display.stop()

    def _table(self) -> RenderableType:
        assert self._source is not None, "a table is shown only of a source"
        state = self._source()
        if self._reward is not None:
            state = replace(state, reward=self._reward, samples_per_second=self._rate)
        return live_table(state)


def _pools(metrics: Mapping[str, float]) -> str:
    """How well the pools were used; nothing for a run of one worker, which has none."""
    prefix = "bubble_fraction/"
    bubbles = [(name.removeprefix(prefix), share) for name, share in metrics.items() if name.startswith(prefix)]
    if not bubbles:
        return ""
    stale = f"  stale {100 * metrics['stale_fraction']:.0f} %" if "stale_fraction" in metrics else ""
    return f"{bubble_words(bubbles)}{stale}  "
