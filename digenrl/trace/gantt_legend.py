"""The legend of the Gantt chart: an entry for all that is drawn, and for nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from digenrl.trace.gantt_lanes import BUBBLE, FILL, LOST, SYMBOLS, Scale, hatching, symbol
from digenrl.trace.svg import element, text, text_width
from digenrl.trace.timeline import Kind, Mark, Spans

NAMES: dict[Kind, str] = {
    Kind.ENCODE: "prompt encoding",
    Kind.GENERATE: "generation",
    Kind.TAG: "TAG: generation by the trainer",
    Kind.STALE_GENERATE: "stale generation, for the next step",
    Kind.SCORE: "scoring",
    Kind.UPDATE: "update",
    Kind.SWITCH: "mode switch",
    Kind.OPTIMIZER: "optimizer step",
    Kind.SYNC: "weight sync",
    Kind.SAVE: "checkpoint",
    Kind.EVALUATE: "evaluation",
}

Entry = tuple[Kind | Mark | str, str]
"""What is explained (a kind, a mark, a hatching, or a kind ``of stale``), and its name."""
_OF_STALE = "of stale"


def entries(timeline: Spans, scale: Scale) -> list[Entry]:
    """What the drawn part of a timeline shows."""
    drawn = [span for span in timeline.spans if span.duration_us and scale.shows(span.start_us, span.end_us)]
    kinds = {span.kind for span in drawn}
    gaps = {gap.why for gap in timeline.gaps if scale.shows(gap.start_us, gap.end_us)}
    marks = {instant.mark for instant in timeline.instants if instant.worker and scale.holds(instant.at_us)}
    found: list[Entry] = [(kind, name) for kind, name in NAMES.items() if kind in kinds]
    if any(span.stale and span.kind is not Kind.STALE_GENERATE for span in drawn):
        found.append((_OF_STALE, "scoring or update of stale trajectories"))
    if "bubble" in gaps:
        found.append((BUBBLE, "bubble: the trainer waits"))
    if "lost" in gaps:
        found.append((LOST, "worker away"))
    return [*found, *((mark, name) for mark, name in SYMBOLS.items() if mark in marks)]


def legend(found: Sequence[Entry], *, x: float, y: float, room: float) -> tuple[list[str], float]:
    """The entries in as many rows as ``room`` pixels need, and where the last row ends."""
    parts: list[str] = []
    cursor = x
    for what, name in found:
        size = 21 + text_width(name, 11) + 14
        if cursor > x and cursor + size > x + room:
            cursor, y = x, y + 20
        parts += [*_swatch(what, cursor, y), text(cursor + 21, y + 9, name)]
        cursor += size
    return parts, y + 12


def _swatch(what: Kind | Mark | str, x: float, y: float) -> Iterator[str]:
    if isinstance(what, Mark):
        yield symbol(what, x + 8, y + 5)
        return
    box: dict[str, float] = {"x": x, "y": y - 1, "width": 16, "height": 12}
    if isinstance(what, Kind):
        yield element("rect", **box, fill=FILL[what])
        pattern = hatching(what, stale=what is Kind.STALE_GENERATE)
    elif what == _OF_STALE:
        half: dict[str, float] = {**box, "width": 8}
        yield element("rect", **half, fill=FILL[Kind.SCORE])
        yield element("rect", **{**half, "x": x + 8}, fill=FILL[Kind.UPDATE])
        pattern = hatching(Kind.UPDATE, stale=True)
    else:
        yield element("rect", **box, fill="#fff", stroke="#8d939c", stroke_width=0.5)
        pattern = what
    if pattern is not None:
        yield element("rect", **box, fill=f"url(#{pattern})")
