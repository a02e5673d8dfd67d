"""``before_after.png``: what a run made of the same prompts from the same noise, first and last, with the scores.

Prompts are the first held-out ones, whose pictures every evaluation saves: nobody chose them. Where there are more than the sheet
has room for, those whose score changed, for better or worse, come first, and the sheet says how many of all did.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from digenrl.metrics.sheet import FAINT, INK, PAPER, font, resized, shortened, wrapped

_SIDE = 128
"""Width of a picture, in pixels."""
_ARROW = 26
_GAP = 22
_LINE = 17
_TITLE = 62
_COLUMNS = 4
_MOST_PAIRS = 16
_BETTER, _WORSE = "#1a7f37", "#b42318"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One held-out picture of one version."""

    path: Path
    prompt: str
    reward: float | None
    """None where it is not finite."""


def first_and_last(rows: Sequence[Mapping[str, Any]], folder: Path) -> dict[int, list[Shown]]:
    """Held-out pictures of the first and the last evaluated version, by version; less than two where there are not so many.

    rows: lines of samples/index.jsonl; folder: the run's. Of a video, the picture beside it is taken.
    """
    versions: dict[int, list[Shown]] = {}
    for row in rows:
        if row.get("held_out"):
            path = (folder / row["file"]).with_suffix(".png")
            shown = Shown(path=path, prompt=row["prompt"], reward=row["reward"])
            versions.setdefault(row["policy_version"], []).append(shown)
    whole = sorted(version for version, shown in versions.items() if all(each.path.exists() for each in shown))
    return {version: versions[version] for version in sorted({*whole[:1], *whole[-1:]})}


def before_after(versions: Mapping[int, Sequence[Shown]], *, title: str) -> Image.Image:
    """A sheet of at most 16 pairs. versions: two of them, with pictures of the same prompts in the same order."""
    (first, before), (last, after) = sorted(versions.items())
    saved = list(zip(before, after, strict=False))
    pairs = sorted(saved, key=lambda pair: _rise(*pair) == 0)[:_MOST_PAIRS]
    with Image.open(pairs[0][0].path) as picture:
        height = max(1, round(_SIDE * picture.height / picture.width))
    columns = min(_COLUMNS, len(pairs))
    rows = -(-len(pairs) // columns)
    cell = (2 * _SIDE + _ARROW + _GAP, height + 3 * _LINE + _GAP)
    sheet = Image.new("RGB", (max(2, columns) * cell[0] + _GAP, _TITLE + rows * cell[1]), PAPER)
    pen = ImageDraw.Draw(sheet)
    heading = f"{title}: version {first} → version {last}, same prompts, same noise"
    bold = font(15, bold=True)
    rises = [_rise(*pair) for pair in saved]
    better, worse = sum(rise > 0 for rise in rises), sum(rise < 0 for rise in rises)
    counts = f"of {len(saved)}: {better} better, {worse} worse, {len(saved) - better - worse} as before"
    if len(saved) > len(pairs):
        counts += "; those that changed come first"
    room = sheet.width - 2 * _GAP
    pen.text((_GAP, 12), shortened(heading, room, bold), fill=INK, font=bold)
    pen.text((_GAP, 35), shortened(counts, room, font(13)), fill=INK, font=font(13))
    for place, (old, new) in enumerate(pairs):
        left, top = _GAP + place % columns * cell[0], _TITLE + place // columns * cell[1]
        right = left + _SIDE + _ARROW
        for x, shown in ((left, old), (right, new)):
            with Image.open(shown.path) as picture:
                sheet.paste(resized(picture.convert("RGB"), (_SIDE, height)), (x, top))
            pen.rectangle((x - 1, top - 1, x + _SIDE, top + height), outline="#c0c0c0")
        pen.text((left + _SIDE + 6, top + height // 2 - 9), "→", fill=FAINT, font=font(15))
        pen.text((left, top + height + 4), _score(old), fill=FAINT, font=font(12, bold=True))
        pen.text((right, top + height + 4), _score(new), fill=_colour(old, new), font=font(12, bold=True))
        for number, line in enumerate(wrapped(new.prompt, 2 * _SIDE + _ARROW, font(12))):
            pen.text((left, top + height + 4 + (number + 1) * _LINE), line, fill=INK, font=font(12))
    return sheet


def _score(shown: Shown) -> str:
    return "invalid" if shown.reward is None else f"{shown.reward:.2f}"


def _rise(old: Shown, new: Shown) -> float:
    """How much better a score is than before; infinitely, where it was not finite."""
    if old.reward == new.reward:
        return 0.0
    before, after = (float("-inf") if each.reward is None else each.reward for each in (old, new))
    return after - before


def _colour(old: Shown, new: Shown) -> str:
    rise = _rise(old, new)
    return FAINT if rise == 0 else _BETTER if rise > 0 else _WORSE
