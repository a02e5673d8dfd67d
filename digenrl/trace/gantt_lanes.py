"""One lane of the Gantt chart: the bars of a worker, its gaps, and what happened to it.

Colours are told apart by people who are colour-blind and, with the hatching of TAG, stale work and bubbles, in grey print.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from digenrl.trace.svg import element, escape, number, text, text_width
from digenrl.trace.timeline import Gap, Instant, Kind, Mark, Span, describe

FILL: dict[Kind, str] = {
    Kind.ENCODE: "#cbb994",
    Kind.GENERATE: "#a6cfea",
    Kind.TAG: "#f5a962",
    Kind.STALE_GENERATE: "#d3e6f4",
    Kind.SCORE: "#3f9e7f",
    Kind.UPDATE: "#3c4f94",
    Kind.SWITCH: "#8b8b8b",
    Kind.OPTIMIZER: "#1c1c1c",
    Kind.SYNC: "#f0d44c",
    Kind.SAVE: "#8c564b",
    Kind.EVALUATE: "#b985b5",
}
_DARK = {Kind.UPDATE, Kind.OPTIMIZER, Kind.SCORE, Kind.SWITCH}
STALE, STALE_ON_DARK, TAG, BUBBLE, LOST = "digenrl-stale", "digenrl-stale-dark", "digenrl-tag", "digenrl-bubble", "digenrl-lost"
_RED = "#b3261e"
_Attributes = Mapping[str, str | float]


def definitions() -> str:
    """The hatchings."""
    return element(
        "defs",
        _hatch(STALE, "#4a86b4", distance=5, width=1.3, angle=45)
        + _hatch(STALE_ON_DARK, "#ffffff", distance=5, width=1.1, angle=45)
        + _hatch(TAG, "#cf7526", distance=4, width=1, angle=90)
        + _hatch(BUBBLE, _RED, distance=5, width=0.9, angle=-45)
        + element(
            "pattern",
            element("circle", cx=2.5, cy=2.5, r=0.8, fill="#8d939c"),
            id=LOST,
            width=5,
            height=5,
            patternUnits="userSpaceOnUse",
        ),
    )


def hatching(kind: Kind, *, stale: bool) -> str | None:
    """The pattern that lies over a bar."""
    if kind is Kind.TAG:
        return TAG
    return (STALE_ON_DARK if kind in _DARK else STALE) if stale else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Which part of the run is drawn where."""

    start_us: int
    end_us: int
    left: float
    right: float

    def x(self, at_us: int) -> float:
        """Where an instant stands; the border for one outside."""
        inside = min(max(at_us, self.start_us), self.end_us)
        return self.left + (inside - self.start_us) / (self.end_us - self.start_us) * (self.right - self.left)

    def shows(self, start_us: int, end_us: int) -> bool:
        """Whether any part of an interval is drawn."""
        return start_us < self.end_us and end_us > self.start_us

    def holds(self, at_us: int) -> bool:
        """Whether an instant is drawn."""
        return self.start_us <= at_us <= self.end_us


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """Place of one worker."""

    y: float
    height: float
    label: float
    """Size of the text inside bars; 0 where there is no room for any."""

    @property
    def baseline(self) -> float:
        """Of text inside bars."""
        return self.y + self.height / 2 + self.label * 0.36


def bars(spans: Sequence[Span], lane: Lane, scale: Scale, *, titles: bool) -> Iterator[str]:
    """The work of one worker. What is narrower than a pixel is drawn together with its neighbours, as the longest of them."""
    narrow: list[Span] = []
    for span in spans:
        if not span.duration_us or not scale.shows(span.start_us, span.end_us):
            continue
        left, right = scale.x(span.start_us), scale.x(span.end_us)
        if narrow and (right - left >= 1 or left - scale.x(narrow[0].start_us) >= 1):
            yield _together(narrow, lane, scale)
            narrow = []
        if right - left >= 1:
            yield _bar(span, left, right, lane, titled=titles)
        else:
            narrow.append(span)
    if narrow:
        yield _together(narrow, lane, scale)


def _bar(span: Span, left: float, right: float, lane: Lane, *, titled: bool) -> str:
    box: dict[str, float] = {"x": left, "y": lane.y, "width": right - left, "height": lane.height}
    whole = span.ended in ("finished", "open")
    # A white edge keeps neighbours of one kind apart.
    edge: _Attributes = {"stroke": "#fff", "stroke_width": 0.7} if right - left > 3 else {}
    fill = FILL[span.kind]
    parts = [element("rect", **box, **edge, fill=fill, fill_opacity=None if whole else 0.45)]
    if (pattern := hatching(span.kind, stale=span.stale)) is not None:
        parts.append(element("rect", **box, fill=f"url(#{pattern})"))
    if not whole:
        parts.append(element("rect", **box, fill="none", stroke=_RED, stroke_dasharray="3 2"))
    title = element("title", escape(_title(span))) if titled else ""
    return element("g", title + "".join(parts), class_=f"bar {span.kind.replace(' ', '-')}")


def labels(spans: Sequence[Span], lane: Lane, scale: Scale) -> Iterator[str]:
    """Names of micro-batches inside their bars; of a kind whose bars are mostly too short for that, none at all."""
    drawn = [span for span in spans if span.micro_batch is not None and span.duration_us]
    drawn = [span for span in drawn if scale.shows(span.start_us, span.end_us)] if lane.label else []
    fitting = {kind: [_label(span, lane, scale) for span in drawn if span.kind is kind] for kind in {s.kind for s in drawn}}
    for kind, found in sorted(fitting.items()):
        written = [label for label in found if label]
        if 2 * len(written) >= len(found):
            yield element("g", "".join(written), pointer_events="none", class_=f"label {kind.replace(' ', '-')}")


def _label(span: Span, lane: Lane, scale: Scale) -> str:
    """The longest name that fits, on a plate where the bar is hatched; empty when none fits."""
    left, right = scale.x(span.start_us), scale.x(span.end_us)
    if span.ended == "lost":
        right -= 7  # half of the mark at its end
    assert span.micro_batch is not None, "only micro-batches have names"
    index = str(span.micro_batch.index)
    for name in (f"TAG {index}", index) if span.tag else (str(span.micro_batch) if span.stale else index,):
        room = text_width(name, lane.label)
        if room + 3 > right - left:
            continue
        middle = (left + right) / 2
        fill = "#fff" if span.kind in _DARK else "#1a1a1a"
        found = text(middle, lane.baseline, name, size=lane.label, fill=fill, text_anchor="middle")
        hatched = hatching(span.kind, stale=span.stale) is not None
        return (plate(middle, lane.baseline, room, lane.label, FILL[span.kind]) if hatched else "") + found
    return ""


def plate(middle: float, baseline: float, room: float, size: float, fill: str) -> str:
    """A ground of one colour for a line of text."""
    box: dict[str, float] = {"x": middle - room / 2 - 1, "y": baseline - size * 0.92, "width": room + 2, "height": size * 1.16}
    return element("rect", **box, rx=2, fill=fill)


def _title(span: Span) -> str:
    ended = "" if span.ended == "finished" else f", {span.ended}"
    reason = f"\n{span.command.reason}" if span.command.reason else ""
    times = f"{span.start_us / 1e6:.3f} to {span.end_us / 1e6:.3f} s ({span.duration_us / 1e6:.3f} s)"
    return f"{span.kind} {describe(span.command)}, policy version {span.policy_version}{ended}\n{times}{reason}"


def _together(narrow: Sequence[Span], lane: Lane, scale: Scale) -> str:
    times: Counter[Kind] = Counter()
    for span in narrow:
        times[span.kind] += span.duration_us
    kind = times.most_common(1)[0][0]
    left, right = scale.x(narrow[0].start_us), scale.x(narrow[-1].end_us)
    box: dict[str, float] = {"x": left, "y": lane.y, "width": max(right - left, 0.5), "height": lane.height}
    return element("rect", **box, fill=FILL[kind], class_=f"bar {kind.replace(' ', '-')}")


def gaps(found: Sequence[Gap], lane: Lane, scale: Scale) -> Iterator[str]:
    """Bubbles of the trainer and times in which the worker was lost."""
    for gap in found:
        if gap.why not in ("bubble", "lost") or not scale.shows(gap.start_us, gap.end_us):
            continue
        left, right = scale.x(gap.start_us), scale.x(gap.end_us)
        lost = gap.why == "lost"
        box: dict[str, float] = {"x": left, "y": lane.y, "width": right - left, "height": lane.height}
        yield element("rect", **box, fill="#e2e4e8" if lost else "#fff")
        yield element("rect", **box, fill=f"url(#{LOST if lost else BUBBLE})", class_=gap.why)
        if not lost and right - left > 2.5:
            inner = {**box, "y": lane.y + 0.4, "height": lane.height - 0.8}
            yield element("rect", **inner, fill="none", stroke=_RED, stroke_width=0.8)
        elif lost and lane.label and right - left > 40:
            middle = (left + right) / 2
            yield plate(middle, lane.baseline, text_width("lost", lane.label), lane.label, "#e2e4e8")
            style: _Attributes = {"fill": "#444", "text_anchor": "middle", "font_style": "italic"}
            yield element("text", "lost", x=middle, y=lane.baseline, font_size=lane.label, **style)


def marks(found: Sequence[Instant], lane: Lane, scale: Scale) -> Iterator[str]:
    """What happened to the worker, each mark with a text for the mouse."""
    for instant in found:
        if instant.mark in SYMBOLS and scale.holds(instant.at_us):
            title = element("title", escape(f"{instant.text} at {instant.at_us / 1e6:.3f} s"))
            # On the upper edge, clear of the label of the bar: the command goes on.
            y = lane.y if instant.mark is Mark.WORKER_OVERDUE else lane.y + lane.height / 2
            size = min(1.0, lane.height / 16)
            yield element("g", title + symbol(instant.mark, scale.x(instant.at_us), y, size=size), class_="mark")


SYMBOLS = {
    Mark.WORKER_LOST: "worker lost",
    Mark.WORKER_JOINED: "worker joined",
    Mark.WORKER_OVERDUE: "command overdue",
    Mark.TRAJECTORY_LOST: "trajectory lost",
    Mark.CONDITIONING_LOST: "encoded prompts lost",
}


def symbol(mark: Mark, x: float, y: float, *, size: float = 1) -> str:
    """A sign of about 12 pixels around a point."""
    if mark in (Mark.WORKER_LOST, Mark.TRAJECTORY_LOST, Mark.CONDITIONING_LOST):
        inner, outer = ("#fff", _RED) if mark is Mark.WORKER_LOST else (_RED, "#fff")
        if mark is Mark.CONDITIONING_LOST:
            found = element("path", d="M-6 -6h12v12h-12z", fill=outer, stroke=inner)
        else:
            found = element("circle", r=6, fill=outer, stroke=inner)
        found += element("path", d="M-3 -3l6 6m0 -6l-6 6", fill="none", stroke=inner, stroke_width=1.8)
    else:
        joined = mark is Mark.WORKER_JOINED
        shape, fill = ("M-3 -5l8 5l-8 5z", "#fff") if joined else ("M0 -5l5 5l-5 5l-5 -5z", "#ffe08a")
        found = element("path", d=shape, fill=fill, stroke="#1a1a1a", stroke_width=1.2, stroke_linejoin="round")
    scaled = f" scale({number(size)})" if size != 1 else ""
    return element("g", found, transform=f"translate({number(x)} {number(y)}){scaled}")


def _hatch(name: str, colour: str, *, distance: float, width: float, angle: float) -> str:
    line = element("rect", width=width, height=distance, fill=colour)
    transform = f"rotate({number(angle)})"
    attributes: dict[str, str | float] = {"width": distance, "height": distance, "patternTransform": transform}
    return element("pattern", line, id=name, patternUnits="userSpaceOnUse", **attributes)
