"""Contact sheets: pictures in a grid, each with its prompt and its score."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

MOST_PICTURES = 64
_COLUMNS = 8
_SIDE = 160
"""Width of a picture on the sheet, in pixels."""
_GAP = 14
_LINE = 16
_TITLE = 40
_PROMPT_LINES = 2
_NARROWEST = 3 * _SIDE
"""Room for a title above one picture."""
INK, FAINT, PAPER = "#202020", "#707070", "#ffffff"


def contact_sheet(images: NDArray[np.uint8], prompts: Sequence[str], scores: Sequence[str], *, title: str) -> Image.Image:
    """A sheet of at most 64 pictures, evenly spread where there are more.

    images: [N, H, W, 3], all of one size; prompts and scores: N texts, shown under each picture.
    """
    assert len(images) == len(prompts) == len(scores) > 0, "every picture has a prompt and a score"
    chosen = chosen_rows(len(images))
    if len(chosen) < len(images):
        title = f"{title} ({len(chosen)} shown)"
    columns = min(_COLUMNS, math.ceil(math.sqrt(len(chosen))))
    rows = math.ceil(len(chosen) / columns)
    height = max(1, round(_SIDE * images.shape[1] / images.shape[2]))
    cell = (_SIDE + _GAP, height + (_PROMPT_LINES + 1) * _LINE + _GAP + 6)
    sheet = Image.new("RGB", (max(_NARROWEST, columns * cell[0] + _GAP), _TITLE + rows * cell[1] + _GAP), PAPER)
    pen = ImageDraw.Draw(sheet)
    pen.text((_GAP, 12), shortened(title, sheet.width - 2 * _GAP, font(16, bold=True)), fill=INK, font=font(16, bold=True))
    for place, index in enumerate(chosen):
        left, top = _GAP + place % columns * cell[0], _TITLE + place // columns * cell[1]
        sheet.paste(resized(Image.fromarray(images[index]), (_SIDE, height)), (left, top))
        pen.rectangle((left - 1, top - 1, left + _SIDE, top + height), outline="#c0c0c0")
        lines = wrapped(prompts[index], _SIDE, font(12))
        for number, line in enumerate(lines):
            pen.text((left, top + height + 4 + number * _LINE), line, fill=FAINT, font=font(12))
        below = top + height + 5 + len(lines) * _LINE
        pen.text((left, below), scores[index], fill=INK, font=font(12, bold=True))
    return sheet


def chosen_rows(count: int) -> list[int]:
    """Which of ``count`` pictures a sheet shows: all, or 64 evenly spread ones, the first and the last among them."""
    if count <= MOST_PICTURES:
        return list(range(count))
    return [round(place * (count - 1) / (MOST_PICTURES - 1)) for place in range(MOST_PICTURES)]


def wrapped(text: str, width: int, font: ImageFont.FreeTypeFont) -> list[str]:
    """At most two lines no wider than ``width`` pixels, the last one with an ellipsis where the text goes on."""
    lines: list[str] = []
    rest = " ".join(text.split())
    while rest and len(lines) < _PROMPT_LINES - 1:
        fits = next(count for count in range(len(rest), 0, -1) if count == 1 or font.getlength(rest[:count]) <= width)
        space = rest.rfind(" ", 0, fits + 1) if fits < len(rest) else -1
        # A word that is longer than a line, and text without spaces (Chinese), are cut where the line ends.
        cut = space if space > 0 else fits
        lines.append(rest[:cut])
        rest = rest[cut:].lstrip()
    return [*lines, shortened(rest, width, font)] if rest else lines


def shortened(text: str, width: int, font: ImageFont.FreeTypeFont) -> str:
    """The text, or its beginning and an ellipsis, no wider than ``width`` pixels."""
    if font.getlength(text) <= width:
        return text
    fits = next((count for count in range(len(text), 0, -1) if font.getlength(f"{text[:count]}…") <= width), 0)
    return f"{text[:fits].rstrip()}…"


def resized(picture: Image.Image, size: tuple[int, int]) -> Image.Image:
    """The picture at ``size`` (width, height): a small one keeps its pixels as squares, a large one is averaged."""
    return picture.resize(size, Image.Resampling.NEAREST if picture.width < size[0] else Image.Resampling.LANCZOS)


@cache
def font(size: int, *, bold: bool = False) -> ImageFont.FreeTypeFont:
    """DejaVu Sans, which comes with matplotlib on every machine; it has no Chinese, Japanese or Korean."""
    import matplotlib as mpl

    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    return ImageFont.truetype(str(Path(mpl.get_data_path()) / "fonts" / "ttf" / name), size)
