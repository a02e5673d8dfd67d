"""The Gantt chart of a run, as SVG for a paper: a lane per worker, pool by pool, steps and versions across all of them.

No text lies over another one, and everything lies inside the picture, from 1 to 64 workers and for any number of commands.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from digenrl.errors import ConfigError
from digenrl.ids import WorkerId
from digenrl.trace.gantt_lanes import Lane, Scale, bars, definitions, gaps, labels, marks, plate
from digenrl.trace.gantt_legend import entries, legend
from digenrl.trace.record import MADE
from digenrl.trace.svg import FONT, Axis, element, shorten, text, text_width
from digenrl.trace.timeline import Gap, Instant, Span, Spans
from digenrl.trace.utilization import Utilization, utilization

MOST_LANES = 64
_TITLED_BARS = 4000
"""Bars of one chart that carry a text for the mouse; more would only make the file heavy."""
_GREY = "#5b6068"
_MARGIN = 18.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A worker's lane or, with ``worker`` None, the heading of a pool."""

    name: str
    y: float
    height: float
    worker: WorkerId | None = None


def svg_gantt(timeline: Spans, *, window: tuple[int, int] | None = None, width: int = 1200) -> str:
    """The chart of a run, or of ``window`` (microseconds) of it. Raises ConfigError for a window that shows nothing."""
    start, end = window or (timeline.start_us, max(timeline.end_us, timeline.start_us + 1))
    if start >= end:
        raise ConfigError(f"The window from {start} to {end} us is empty.", fix="Give the earlier instant first.")
    rows, bottom = _rows(timeline)
    names = [text_width(row.name, 11) for row in rows if row.worker is not None]
    left = _MARGIN + min(max([*names, 50]), 150) + 10
    scale = Scale(start_us=start, end_us=end, left=left, right=width - _MARGIN - 48)
    explained, low = legend(entries(timeline, scale), x=_MARGIN, y=bottom + 52, room=width - 2 * _MARGIN)
    height = round(low + _MARGIN)
    drawn, written = _lanes(timeline, scale, rows)
    body = [
        element("rect", width=width, height=height, fill="#fff"),
        *_heading(timeline, scale, width),
        *_axis(timeline, scale, rows, bottom),
        *drawn,
        *_versions(timeline, scale, rows[0].y, bottom),
        *_steps(timeline, scale, rows[0].y),
        *written,
        *explained,
    ]
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="{FONT}">',
            definitions(),
            *body,
            "</svg>\n",
        )
    )


def _rows(timeline: Spans) -> tuple[list[_Row], float]:
    """Headings and lanes from top to bottom, and where the last one ends."""
    pools = timeline.pools_of_at_most(MOST_LANES)
    count = sum(len(pool.workers) for pool in pools)
    height, space = (26, 5) if count <= 10 else (18, 4) if count <= 24 else (12, 2)
    rows: list[_Row] = []
    y = 84.0
    for pool, whole in zip(pools, timeline.pools, strict=True):
        left_out = "" if pool == whole else f", the first {len(pool.workers)} of {len(whole.workers)}"
        rows.append(_Row(name=pool.name + left_out, y=y, height=18))
        y += 20
        for worker in pool.workers:
            rows.append(_Row(name=worker, y=y, height=height, worker=worker))
            y += height + space
        y += 5
    return rows, y - 5


def _heading(timeline: Spans, scale: Scale, width: int) -> Iterator[str]:
    settings, use = timeline.settings, utilization(timeline)
    made = f", {MADE[timeline.source]}" if timeline.source in MADE else ""
    number = settings.steps - settings.first_version
    steps, batches = ("s" if each != 1 else "" for each in (number, settings.micro_batches))
    count = f"{number} step{steps} of {settings.micro_batches} micro-batch{'e' if batches else ''}{batches}"
    whole = scale.start_us <= timeline.start_us and scale.end_us >= timeline.end_us
    part = "" if whole else f", {scale.start_us / 1e6:g} to {scale.end_us / 1e6:g} s"
    resumed = f", from step {settings.first_version}" if settings.first_version else ""
    title = f"Schedule of {count}{resumed}{made}{part}"
    room = width - 2 * _MARGIN
    yield text(_MARGIN, 30, shorten(title, 18, room), size=18, fill="#111", font_weight="bold")
    yield text(_MARGIN, 50, shorten(_facts(timeline, use), 12, room), size=12, fill=_GREY)


def _facts(timeline: Spans, use: Utilization) -> str:
    settings = timeline.settings
    nouns = {"generators": "generator", "scorers": "scorer", "trainer": "trainer", "colocated": "worker"}
    sizes = [(len(pool.workers), nouns[pool.name]) for pool in timeline.pools]
    pools = " + ".join(f"{count} {noun}{'s' if count > 1 else ''}" for count, noun in sizes)
    facts = [f"{pools}, generation and training in turn" if settings.one_pool else pools]
    if not settings.one_pool:
        facts.append(f"TAG {settings.tag}" + (f" ({settings.tag_static})" if settings.tag == "static" else ""))
    if settings.stale_quota:
        facts.append(f"stale at most {settings.stale_quota} of {settings.micro_batches}")
    if use.step_s is not None:
        facts.append(f"{use.step_s:.4g} s a step")
        facts.append(f"trainer waits {100 * use.pools[-1].bubble_fraction:.1f} %")
    return "   ·   ".join(facts)


def _axis(timeline: Spans, scale: Scale, rows: list[_Row], bottom: float) -> Iterator[str]:
    axis = Axis.over(scale.start_us, scale.end_us, most=max(int((scale.right - scale.left) / 75), 1))
    top = rows[0].y
    for at, label in axis.ticks():
        x = scale.x(at)
        yield element("path", d=f"M{x:.2f} {top}V{bottom + 4}", stroke="#e3e6ea", fill="none")
        yield text(x, bottom + 17, label, fill=_GREY, text_anchor="middle")
    yield element("path", d=f"M{scale.left:.2f} {bottom}H{scale.right:.2f}", stroke="#9aa0a8", fill="none")
    what = "virtual time" if timeline.source == "simulation" else "time since the run began"
    middle = (scale.left + scale.right) / 2
    yield text(middle, bottom + 34, f"{what} [{axis.unit}]", fill=_GREY, text_anchor="middle")


def _lanes(timeline: Spans, scale: Scale, rows: list[_Row]) -> tuple[list[str], list[str]]:
    """Everything in the lanes and beside them, and the text that goes on top of it."""
    spans: dict[WorkerId, list[Span]] = defaultdict(list)
    waits: dict[WorkerId, list[Gap]] = defaultdict(list)
    events: dict[WorkerId, list[Instant]] = defaultdict(list)
    for span in timeline.spans:
        spans[span.worker].append(span)
    for gap in timeline.gaps:
        waits[gap.worker].append(gap)
    for instant in timeline.instants:
        if instant.worker is not None:
            events[instant.worker].append(instant)
    titles = sum(scale.shows(span.start_us, span.end_us) for span in timeline.spans) <= _TITLED_BARS
    drawn: list[str] = []
    written: list[str] = [text(scale.right + 12, rows[0].y + 13, "busy", size=11, fill=_GREY)]
    for row in rows:
        if row.worker is None:
            room = text_width(row.name, 11)
            written.append(plate(_MARGIN + room / 2, row.y + 13, room, 11, "#fff"))
            written.append(text(_MARGIN, row.y + 13, row.name, size=11, fill="#111", font_weight="bold"))
            continue
        lane = Lane(y=row.y, height=row.height, label=10 if row.height >= 18 else 8)
        box: dict[str, float] = {"x": scale.left, "y": row.y, "width": scale.right - scale.left, "height": row.height}
        drawn.append(element("rect", **box, fill="#f3f4f6"))
        content = (*gaps(waits[row.worker], lane, scale), *bars(spans[row.worker], lane, scale, titles=titles))
        drawn.append(element("g", "\n".join(content), class_="lane"))
        written += _beside(row, _busy(spans[row.worker], scale), scale)
        written += [*labels(spans[row.worker], lane, scale), *marks(events[row.worker], lane, scale)]
    return drawn, written


def _beside(row: _Row, busy: float, scale: Scale) -> Iterator[str]:
    """Name and load of a worker, to the left and to the right of its lane."""
    size = min(11, row.height - 1)
    y = row.y + row.height / 2 + size * 0.36
    name = shorten(row.name, size, scale.left - _MARGIN - 8)
    yield text(scale.left - 8, y, name, size=size, fill="#333", text_anchor="end")
    yield text(scale.right + 12, y, f"{100 * busy:.0f} %", size=size, fill=_GREY)


def _busy(spans: list[Span], scale: Scale) -> float:
    """Share of the drawn time in which a worker had a command."""
    inside = (min(span.end_us, scale.end_us) - max(span.start_us, scale.start_us) for span in spans)
    return sum(time for time in inside if time > 0) / (scale.end_us - scale.start_us)


def _versions(timeline: Spans, scale: Scale, top: float, bottom: float) -> Iterator[str]:
    """A line where each version begins, and a sign on as many of them as there is room for."""
    shown = [i for i in timeline.published if i.policy_version is not None and scale.holds(i.at_us)]
    distance = (scale.right - scale.left) / max(len(shown), 1)
    widest = max((text_width(f"v{i.policy_version}", 10) for i in shown), default=0) + 14
    every = next(n for power in range(12) for n in (10**power, 2 * 10**power, 5 * 10**power) if n * distance >= widest)
    free = 0.0
    for instant in shown:
        x, name = scale.x(instant.at_us), f"v{instant.policy_version}"
        half = text_width(name, 10) / 2 + 4
        named = (instant.policy_version or 0) % every == 0 and x - half >= free
        if named or distance >= 8:
            yield element(
                "path",
                d=f"M{x:.2f} {top - 2}V{bottom + 4}",
                stroke="#111",
                stroke_width=1.1 if named else 0.5,
                stroke_dasharray="4 3",
                class_="version",
            )
        if named:
            free = x + half + 2
            yield element("rect", x=x - half, y=top - 17.5, width=2 * half, height=15, rx=3, fill="#111")
            yield text(x, top - 6.5, name, size=10, fill="#fff", text_anchor="middle", font_weight="bold")


def _steps(timeline: Spans, scale: Scale, top: float) -> Iterator[str]:
    """Names and times of the steps between the versions, where they fit."""
    begin, ends = timeline.start_us, [version.at_us for version in timeline.published]
    for place, step in enumerate(range(timeline.settings.first_version, timeline.settings.steps)):
        finished = place < len(ends)
        end = ends[place] if finished else timeline.end_us
        seconds = f" · {(end - begin) / 1e6:.4g} s" if finished else ", unfinished"
        room = scale.x(end) - scale.x(begin) - 34
        name = next((name for name in (f"step {step}{seconds}", f"step {step}") if text_width(name, 10.5) <= room), None)
        if name is not None and scale.shows(begin, end):
            middle = (scale.x(begin) + scale.x(end)) / 2
            yield text(middle, top - 6.5, name, size=10.5, fill=_GREY, text_anchor="middle")
        if not finished:
            return
        begin = end
