"""The timeline of a run for a terminal: one line per worker, one character per slice of time."""

from __future__ import annotations

import unicodedata
from collections import defaultdict
from collections.abc import Sequence

from digenrl.ids import WorkerId
from digenrl.trace.svg import Axis
from digenrl.trace.timeline import Gap, Kind, Spans

LETTERS: dict[Kind, str] = {
    Kind.ENCODE: "e",
    Kind.GENERATE: "g",
    Kind.TAG: "T",
    Kind.STALE_GENERATE: "~",
    Kind.SCORE: "s",
    Kind.UPDATE: "u",
    Kind.SWITCH: "w",
    Kind.OPTIMIZER: "O",
    Kind.SYNC: "y",
    Kind.SAVE: "c",
    Kind.EVALUATE: "v",
}
_BUBBLE, _LOST, _IDLE = ".", "x", " "
_MEANING = {_BUBBLE: "bubble", _LOST: "worker lost"}
MOST_LINES = 40
"""Workers that get a line."""


def text_gantt(timeline: Spans, *, columns: int = 100) -> str:
    """The chart, ``columns`` characters wide; each shows what took most of its slice, and blank is idle."""
    shown = [worker for pool in timeline.pools_of_at_most(MOST_LINES) for worker in pool.workers]
    names = [_fit(name, 20) for name in shown]
    margin = max((_width(name) for name in names), default=0)
    slots = max(columns - margin - 3, 10)
    length = max(timeline.duration_us, 1)
    slot = -(-length // slots)
    slots = -(-length // slot)
    weights: dict[WorkerId, list[dict[str, int]]] = {worker: [defaultdict(int) for _ in range(slots)] for worker in shown}
    for span in timeline.spans:
        if span.worker in weights:
            _spread(weights[span.worker], LETTERS[span.kind], span.start_us - timeline.start_us, span.duration_us, slot)
    for gap in timeline.gaps:
        if gap.worker in weights:
            _spread(weights[gap.worker], _letter(gap), gap.start_us - timeline.start_us, gap.duration_us, slot)
    rows = [(name, _row(weights[worker])) for name, worker in zip(names, shown, strict=True)]
    lines = [f"{' ' * margin}  {_versions(timeline, slots, slot)}".rstrip()]
    lines += [f"{name}{' ' * (margin - _width(name))} |{row}|" for name, row in rows]
    left_out = len(timeline.settings.workers) - len(shown)
    lines += [f"... and {left_out} more workers"] if left_out else []
    lines.append(f"{' ' * margin}  {_axis(timeline, slots, slot)}".rstrip())
    present = {character for _, row in rows for character in row}
    meaning = {**{letter: str(kind) for kind, letter in LETTERS.items()}, **_MEANING}
    lines += _wrapped([f"{letter} {name}" for letter, name in meaning.items() if letter in present], columns)
    return "\n".join(line for line in lines if line)


def _letter(gap: Gap) -> str:
    return {"bubble": _BUBBLE, "lost": _LOST}.get(gap.why, _IDLE)


def _spread(slots: Sequence[dict[str, int]], letter: str, start_us: int, duration_us: int, slot_us: int) -> None:
    """Add an interval to the slots that it covers."""
    end_us = start_us + duration_us
    for index in range(start_us // slot_us, min(-(-end_us // slot_us), len(slots))):
        slots[index][letter] += min(end_us, (index + 1) * slot_us) - max(start_us, index * slot_us)


def _row(slots: Sequence[dict[str, int]]) -> str:
    """The letter of most time in each slot; of equal ones the first that happened."""
    return "".join(max(slot, key=lambda letter: slot[letter]) if slot else _IDLE for slot in slots)


def _versions(timeline: Spans, slots: int, slot_us: int) -> str:
    """``|v1`` where a version begins, ``v1|`` at the right border; names that would run into each other are left out."""
    row = [" "] * (slots + 1)
    free = 0
    for instant in timeline.published:
        at = min((instant.at_us - timeline.start_us) // slot_us, slots)
        name = f"|v{instant.policy_version}"
        if at + len(name) > len(row):
            name, at = name[1:] + "|", at - len(name) + 1
        if at >= free:
            row[at : at + len(name)] = name
            free = at + len(name) + 1
    return "".join(row).rstrip()


def _axis(timeline: Spans, slots: int, slot_us: int) -> str:
    """Times under the slots in which they lie."""
    end = timeline.start_us + slots * slot_us
    axis = Axis.over(timeline.start_us, end, most=max(slots // 12, 1))
    row = [" "] * (slots + 1)
    free = 0
    for at, label in axis.ticks():
        begin = (at - timeline.start_us) // slot_us
        written = f"{label} {axis.unit}" if not free else label
        if free <= begin <= len(row) - len(written):
            row[begin : begin + len(written)] = written
            free = begin + len(written) + 1
    return "".join(row).rstrip()


def _wrapped(entries: Sequence[str], columns: int) -> list[str]:
    """The entries in as few lines as hold them."""
    lines: list[str] = []
    for entry in entries:
        if lines and len(lines[-1]) + 3 + len(entry) <= columns:
            lines[-1] += f"   {entry}"
        else:
            lines.append(entry)
    return lines


def _fit(name: str, width: int) -> str:
    """A name in at most so many columns, without control characters."""
    name = "".join(character if character.isprintable() else "?" for character in name)
    while _width(name) > width:
        name = name[:-2] + "…" if name.endswith("…") else name[:-1] + "…"
    return name


def _width(name: str) -> int:
    """Columns that a terminal gives a name."""
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in name)
