"""How well the workers of a run were used: what they did with their time, how long they waited, how long steps took.

Every worker's time is split without rest into kinds of work, waiting (a step is unfinished and it has no command), ``done``
(no step is left) and ``lost``; shares are of the time in which it was there. The waiting of the trainer is the bubble.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from digenrl.ids import WorkerId
from digenrl.scheduling.commands import Accumulate
from digenrl.trace.timeline import Gap, Kind, Span, Spans

_TIMES = {"simulation": "virtual time", "emulation": "emulated work"}
"""What the times of a trace are of, by its source."""
MOST_ROWS = 40
"""Workers or steps that ``lines`` shows one by one; JSON has them all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The time of one worker, or of all workers of a pool together."""

    name: str
    workers: tuple[WorkerId, ...]
    busy_us: tuple[tuple[Kind, int], ...]
    """Kinds that occurred, in the order of Kind."""
    waiting_us: int
    done_us: int
    lost_us: int

    @property
    def present_us(self) -> int:
        """All of its time except what was lost."""
        return sum(time for _, time in self.busy_us) + self.waiting_us + self.done_us

    @property
    def busy_fraction(self) -> float:
        """Share of its time with a command."""
        return _share(sum(time for _, time in self.busy_us), self.present_us)

    @property
    def bubble_fraction(self) -> float:
        """Share of its time without a command while a step is unfinished."""
        return _share(self.waiting_us, self.present_us)

    def fraction(self, kind: Kind) -> float:
        """Share of its time in one kind of work."""
        return _share(dict(self.busy_us).get(kind, 0), self.present_us)

    def to_plain(self) -> dict[str, object]:
        """For JSON."""
        return {
            "workers": len(self.workers),
            "busy_fraction": self.busy_fraction,
            "bubble_fraction": self.bubble_fraction,
            "done_fraction": _share(self.done_us, self.present_us),
            "lost_s": self.lost_us / 1e6,
            "busy": {kind.name.lower(): self.fraction(kind) for kind, _ in self.busy_us},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StepUse:
    """One completed step, from one version to the next; the evaluation of the version that it starts from counts in."""

    step: int
    start_us: int
    end_us: int
    bubble_us: int
    micro_batches: int
    """Micro-batches that were accumulated."""
    stale: int
    """Of those, the ones whose trajectory was one version old."""
    tags: int
    """Micro-batches of the step that the trainer generated."""

    @property
    def seconds(self) -> float:
        """Step time."""
        return (self.end_us - self.start_us) / 1e6

    @property
    def bubble_fraction(self) -> float:
        """Share of the step in which the trainer waited."""
        return _share(self.bubble_us, self.end_us - self.start_us)

    @property
    def stale_fraction(self) -> float:
        """Share of its micro-batches that were stale."""
        return _share(self.stale, self.micro_batches)

    def to_plain(self) -> dict[str, object]:
        """For JSON."""
        return {
            "step": self.step,
            "timing_s/step": self.seconds,
            "bubble_fraction/trainer": self.bubble_fraction,
            "stale_fraction": self.stale_fraction,
            "micro_batches": self.micro_batches,
            "tags": self.tags,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Utilization:
    """A whole run."""

    source: str
    duration_us: int
    pools: tuple[Load, ...]
    """In one pool that works in turn, that pool and, once more by itself, its trainer."""
    workers: tuple[Load, ...]
    steps: tuple[StepUse, ...]
    """Completed ones."""

    @property
    def stale_fraction(self) -> float:
        """Share of all accumulated micro-batches of completed steps that were stale."""
        return _share(sum(step.stale for step in self.steps), sum(step.micro_batches for step in self.steps))

    @property
    def step_s(self) -> float | None:
        """Mean step time; None when no step was completed."""
        return sum(step.seconds for step in self.steps) / len(self.steps) if self.steps else None

    def summary(self) -> str:
        """The run in one line."""
        seconds = f"{self.duration_us / 1e6:.3f} s of {_TIMES.get(self.source, 'time')}"
        if self.step_s is None:
            return f"no completed step in {seconds}"
        count = len(self.steps)
        bubbles = ", ".join(f"{pool.name} {_percent(pool.bubble_fraction)}" for pool in self.pools)
        return (
            f"{count} step{'s' if count > 1 else ''} in {seconds}: {self.step_s:.3f} s a step; waiting: {bubbles}; "
            f"{sum(step.tags for step in self.steps)} TAG; stale {_percent(self.stale_fraction)}"
        )

    def lines(self) -> list[str]:
        """For people: the summary, a table of pools and workers, a table of steps."""
        kinds = [kind for kind in Kind if any(load.fraction(kind) for load in self.workers)]
        head = ["", "busy", "waiting", *kinds, "lost"]
        rows = [_row(load, load.name, kinds) for load in self.pools]
        rows += [_row(load, f"  {load.name}", kinds) for load in self.workers[:MOST_ROWS]]
        found = [self.summary(), "", *_table([head, *rows])]
        if len(self.workers) > MOST_ROWS:
            found.append(f"  ... and {len(self.workers) - MOST_ROWS} more workers")
        if self.steps:
            rows = [
                [
                    f"step {step.step}",
                    f"{step.seconds:.3f} s",
                    _percent(step.bubble_fraction),
                    f"{step.stale} of {step.micro_batches}",
                    str(step.tags),
                ]
                for step in self.steps[:MOST_ROWS]
            ]
            found += ["", *_table([["", "time", "trainer waits", "stale", "TAG"], *rows])]
        if len(self.steps) > MOST_ROWS:
            found.append(f"... and {len(self.steps) - MOST_ROWS} more steps")
        return found

    def to_plain(self) -> dict[str, object]:
        """For JSON; fractions from 0 to 1, times in seconds."""
        return {
            "source": self.source,
            "duration_s": self.duration_us / 1e6,
            "timing_s/step": self.step_s,
            **{f"bubble_fraction/{pool.name}": pool.bubble_fraction for pool in self.pools},
            "stale_fraction": self.stale_fraction,
            "tags": sum(step.tags for step in self.steps),
            "pools": {pool.name: pool.to_plain() for pool in self.pools},
            "workers": {worker.name: worker.to_plain() for worker in self.workers},
            "steps": [step.to_plain() for step in self.steps],
        }


def utilization(timeline: Spans) -> Utilization:
    """What became of every worker's time."""
    spans: dict[WorkerId, list[Span]] = {worker: [] for worker in timeline.settings.workers}
    gaps: dict[WorkerId, list[Gap]] = {worker: [] for worker in timeline.settings.workers}
    for span in timeline.spans:
        spans[span.worker].append(span)
    for gap in timeline.gaps:
        gaps[gap.worker].append(gap)
    workers = {name: _load(name, [name], spans[name], gaps[name]) for name in timeline.settings.workers}
    pools = [(pool.name, pool.workers) for pool in timeline.pools]
    if timeline.settings.one_pool:
        pools.append(("trainer", (timeline.settings.trainer,)))
    return Utilization(
        source=timeline.source,
        duration_us=timeline.duration_us,
        pools=tuple(
            _load(name, members, [s for m in members for s in spans[m]], [g for m in members for g in gaps[m]])
            for name, members in pools
        ),
        workers=tuple(workers.values()),
        steps=tuple(_steps(timeline)),
    )


def _load(name: str, workers: Sequence[WorkerId], spans: Sequence[Span], gaps: Sequence[Gap]) -> Load:
    busy = dict.fromkeys(Kind, 0)
    for span in spans:
        busy[span.kind] += span.duration_us
    lost = dict.fromkeys(("bubble", "idle", "done", "lost"), 0)
    for gap in gaps:
        lost[gap.why] += gap.duration_us
    return Load(
        name=name,
        workers=tuple(workers),
        busy_us=tuple((kind, time) for kind, time in busy.items() if time),
        waiting_us=lost["bubble"] + lost["idle"],
        done_us=lost["done"],
        lost_us=lost["lost"],
    )


def _steps(timeline: Spans) -> Iterator[StepUse]:
    """One row per published version."""
    used: dict[int, list[Span]] = {}
    for span in timeline.spans:
        if span.micro_batch is not None and span.ended == "finished":
            used.setdefault(span.micro_batch.step, []).append(span)
    ends = [version.at_us for version in timeline.published]
    waited = [0] * (len(ends) + 1)
    for gap in timeline.bubbles:
        # A bubble never crosses a version: the trainer itself makes the version.
        waited[bisect_right(ends, gap.start_us)] += gap.duration_us
    start = timeline.start_us
    for step, end in enumerate(ends, start=timeline.settings.first_version):
        accumulated = [span for span in used.get(step, ()) if isinstance(span.command, Accumulate)]
        yield StepUse(
            step=step,
            start_us=start,
            end_us=end,
            bubble_us=waited[step - timeline.settings.first_version],
            micro_batches=len(accumulated),
            stale=sum(span.stale for span in accumulated),
            tags=sum(span.tag for span in used.get(step, ())),
        )
        start = end


def _row(load: Load, name: str, kinds: Sequence[Kind]) -> list[str]:
    lost = f"{load.lost_us / 1e6:.3f} s" if load.lost_us else ""
    shares = [_percent(load.fraction(kind)) if load.fraction(kind) else "" for kind in kinds]
    return [name, _percent(load.busy_fraction), _percent(load.bubble_fraction), *shares, lost]


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as needed, the first one to the left; columns without content are left out."""
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    padded = [
        [cell.ljust(width) if index == 0 else cell.rjust(width) for cell in column]
        for index, (column, width) in enumerate(zip(columns, widths, strict=True))
    ]
    return ["  ".join(cells).rstrip() for cells in zip(*padded, strict=True)]


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
