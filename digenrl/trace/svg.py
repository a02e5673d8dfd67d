"""The few things that hand-written SVG needs: elements with escaped text, estimated text widths, a time axis."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from xml.sax.saxutils import escape as escape_markup
from xml.sax.saxutils import quoteattr

FONT = "Helvetica, Arial, 'Liberation Sans', 'Noto Sans', sans-serif"

_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML cannot hold, not even escaped: control characters and lone surrogates."""
_NARROW = frozenset("iljtfrI.,:;|!'()[] ")
_BROAD = frozenset("mwMW%@")


def element(tag: str, content: str = "", /, **attributes: str | float | None) -> str:
    """One element. ``content`` is markup that is already safe; ``fill_opacity=`` becomes ``fill-opacity=``; None is left out."""
    written = "".join(
        f" {name.rstrip('_').replace('_', '-')}={quoteattr(number(value) if isinstance(value, float | int) else clean(value))}"
        for name, value in attributes.items()
        if value is not None
    )
    return f"<{tag}{written}>{content}</{tag}>" if content else f"<{tag}{written}/>"


def text(x: float, y: float, content: str, *, size: float = 11, fill: str = "#222", **attributes: str | float | None) -> str:
    """A line of text; ``content`` is escaped."""
    return element("text", escape(content), x=x, y=y, font_size=size, fill=fill, **attributes)


def escape(content: str) -> str:
    """Text as markup."""
    return escape_markup(clean(content))


def clean(content: str) -> str:
    """Text without what XML cannot hold."""
    return _FORBIDDEN.sub("\ufffd", content)


def number(value: float) -> str:
    """Two decimals at most: a hundredth of a pixel."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def text_width(content: str, size: float) -> float:
    """Pixels that a line takes in any common sans serif, rather too many than too few."""
    ems = 0.0
    for character in content:
        if character in _NARROW:
            ems += 0.34
        elif character in _BROAD:
            ems += 0.92
        elif unicodedata.east_asian_width(character) in "WF":
            ems += 1.05
        else:
            ems += 0.72 if character.isupper() else 0.6
    return ems * size


def shorten(content: str, size: float, width: float) -> str:
    """The text, or its beginning and an ellipsis, so that it fits."""
    if text_width(content, size) <= width:
        return content
    while content and text_width(content + "…", size) > width:
        content = content[:-1]
    return content + "…"


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Round times between two instants."""

    unit: str
    """``ms``, ``s``, ``min`` or ``h``."""
    first_us: int
    last_us: int
    step_us: int
    unit_us: int

    @classmethod
    def over(cls, start_us: int, end_us: int, *, most: int) -> Axis:
        """At most ``most`` + 1 ticks, 1, 2 or 5 times a power of ten apart (of minutes and hours: round parts of 60)."""
        length = max(end_us - start_us, 1)
        unit, unit_us = next(
            (unit for unit in (("h", 3_600_000_000), ("min", 60_000_000), ("s", 1_000_000)) if length >= 5 * unit[1]),
            ("s", 1_000_000) if length >= 500_000 else ("ms", 1_000),
        )
        if unit == "min" and length < 20 * unit_us:
            unit, unit_us = "s", 1_000_000
        step = next(step for step in _steps() if length / step <= most)
        return cls(unit=unit, first_us=-(-start_us // step) * step, last_us=end_us, step_us=step, unit_us=unit_us)

    def ticks(self) -> Iterator[tuple[int, str]]:
        """Microseconds and label of each tick."""
        for at in range(self.first_us, self.last_us + 1, self.step_us):
            yield at, f"{at / self.unit_us:.6f}".rstrip("0").rstrip(".")


def _steps() -> Iterator[int]:
    """Distances of ticks, in microseconds, ascending without end."""
    for power in range(7):
        yield from (10**power, 2 * 10**power, 5 * 10**power)
    seconds = 1_000_000
    yield from (seconds * each for each in (10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 18000, 36000))
    hours = 20 * 3600 * seconds
    while True:
        yield from (hours, hours * 5 // 2, hours * 5)
        hours *= 10
