"""What a person sees of a run of several workers while it goes on: a table of workers and queues.

Invariant: at most ``MOST_ROWS`` rows of workers and ``MOST_COLUMNS`` columns, whatever the number of workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import Group, RenderableType
from rich.constrain import Constrain
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

MOST_ROWS = 14
"""Of workers; where there are more, the ones of one pool that do the same share a row."""
MOST_COLUMNS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """One worker at this moment."""

    name: str
    pool: str
    state: str
    """What it does, in words: ``generating 3.2 under version 3``, ``waiting``, ``lost, restarting``."""
    shared_state: str
    """The same without what no other worker can be at: ``generating under version 3``."""
    for_s: float
    """Since when."""
    busy_fraction: float
    """Share of its time with a command, over the step before and this one so far."""
    trouble: bool = False
    """Lost, or at its command for much longer than such commands take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueView:
    """Micro-batches of the step in training, and what has been generated early for the next."""

    pending: int = 0
    scoring: int = 0
    """SQ: generated, not yet being scored."""
    update: int = 0
    """UQ: scored, not yet being accumulated."""
    accumulated: int = 0
    total: int = 0
    stale_used: int = 0
    """Micro-batches of the next step that are generated with the present weights."""
    stale_quota: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveState:
    """A run at one moment."""

    step: int
    """Step in training, which is also the number of completed ones and the policy version."""
    steps: int
    workers: tuple[WorkerView, ...]
    """Pool by pool."""
    queues: QueueView
    elapsed_s: float
    """Since the first event of this process."""
    left_s: float | None = None
    """Until the last step is done; None before the first one is."""
    bubbles: tuple[tuple[str, float], ...] = ()
    """Pool and share of the last step in which its workers waited."""
    stale_fraction: float | None = None
    """Of the last step; as ``tag_fraction``, None where there was none."""
    tag_fraction: float | None = None
    reward: float | None = None
    """Mean of the last step."""
    samples_per_second: float | None = None


def live_table(state: LiveState) -> RenderableType:
    """The whole display; made to be drawn again and again in one place."""
    lines = [Text(line) for line in (_queues(state), _last_step(state)) if line]
    return Group(_progress(state), *lines, _workers(state.workers))


def bubble_words(bubbles: Sequence[tuple[str, float]]) -> str:
    """``bubble generators 3 %, trainer 12 %``; nothing for no pools."""
    return f"bubble {', '.join(f'{pool} {100 * share:.0f} %' for pool, share in bubbles)}" if bubbles else ""


def _progress(state: LiveState) -> Table:
    parts = [f"{state.step}/{state.steps} steps"]
    parts += [f"reward {state.reward:.3f}"] if state.reward is not None else []
    parts += [f"{state.samples_per_second:.1f} samples/s"] if state.samples_per_second is not None else []
    parts.append(f"elapsed {_duration(state.elapsed_s)}")
    parts += [f"ETA {_duration(state.left_s)}"] if state.left_s is not None else []
    grid = Table.grid(padding=(0, 2))
    grid.add_column()
    grid.add_column(no_wrap=True, overflow="ellipsis")
    grid.add_row(ProgressBar(total=max(state.steps, 1), completed=state.step, width=24), Text("  ".join(parts)))
    return grid


def _queues(state: LiveState) -> str:
    queues = state.queues
    if state.step >= state.steps:
        return "all steps are done"
    parts = [
        f"step {state.step}: {queues.pending} pending",
        f"SQ {queues.scoring}",
        f"UQ {queues.update}",
        f"{queues.accumulated} of {queues.total} accumulated",
    ]
    early = f"; stale for step {state.step + 1}: {queues.stale_used} of {queues.stale_quota}" if queues.stale_quota else ""
    return ", ".join(parts) + early


def _last_step(state: LiveState) -> str:
    parts = [bubble_words(state.bubbles)]
    for share, word in ((state.stale_fraction, "stale"), (state.tag_fraction, "by the trainer (TAG)")):
        parts.append("" if share is None else f"{100 * share:.0f} % {word}")
    found = "; ".join(part for part in parts if part)
    return f"step {state.step - 1}: {found}" if found else ""


def _workers(workers: Sequence[WorkerView]) -> Constrain:
    rows = [_Row.of([worker]) for worker in workers] if len(workers) <= MOST_ROWS else list(_shared(workers))
    shown = rows if len(rows) <= MOST_ROWS else rows[: MOST_ROWS - 1]
    # Widths follow the screen and not the words, so that columns stay where they are from one picture to the next.
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", expand=True)
    table.add_column("worker", no_wrap=True, overflow="ellipsis", ratio=2)
    table.add_column("state", no_wrap=True, overflow="ellipsis", ratio=3)
    table.add_column("for", no_wrap=True, justify="right", width=8)
    table.add_column("busy", no_wrap=True, justify="right", width=5)
    for row in shown:
        cells = (row.name, row.state, _duration(row.for_s), f"{100 * row.busy_fraction:.0f} %")
        table.add_row(*(Text(cell) for cell in cells), style=row.style)
    left_out = len(workers) - sum(row.count for row in shown)
    if left_out:
        table.add_row(Text(f"... and {left_out} more"))
    return Constrain(table, MOST_COLUMNS)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    name: str
    state: str
    for_s: float
    busy_fraction: float
    style: str
    count: int

    @classmethod
    def of(cls, workers: Sequence[WorkerView]) -> _Row:
        """One row of workers that do the same; the time is the longest."""
        first, count = workers[0], len(workers)
        return cls(
            name=first.name if count == 1 else f"{first.name} and {count - 1} more",
            state=first.state if count == 1 else first.shared_state,
            for_s=max(worker.for_s for worker in workers),
            busy_fraction=sum(worker.busy_fraction for worker in workers) / count,
            style="red" if first.trouble else "dim" if first.state == "waiting" else "",
            count=count,
        )


def _shared(workers: Sequence[WorkerView]) -> Iterator[_Row]:
    """Workers of one pool that do the same in one row, those in trouble first: they are what a person looks for."""
    first_of_pool: dict[str, int] = {}
    for place, worker in enumerate(workers):
        first_of_pool.setdefault(worker.pool, place)

    def kind(worker: WorkerView) -> tuple[bool, int, str]:
        return not worker.trouble, first_of_pool[worker.pool], worker.shared_state

    for _, same in groupby(sorted(workers, key=kind), key=kind):
        yield _Row.of(list(same))


def _duration(seconds: float) -> str:
    """``12 s``, and from two minutes on ``0:12:30``."""
    whole = max(0, round(seconds))
    return f"{whole} s" if whole < 120 else f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
