"""Draw what a run made of a few held-out prompts over its training, from the same noise each time: the README's strip.

python tools/docs/draw_strip.py RUN [--prompts 7 13 23] [--output docs/images/quickstart_strip.png]

RUN: a run folder with several evaluations, such as of ``digenrl train quickstart eval.freq=10``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from digenrl.metrics.sheet import FAINT, INK, PAPER, font, resized, wrapped

OUTPUT = Path(__file__).resolve().parents[2] / "docs" / "images" / "quickstart_strip.png"
_SIDE = 96
_GAP = 12
_LINE = 16
_LABEL = 150


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw pictures of held-out prompts over a run's training.")
    parser.add_argument("run", type=Path)
    parser.add_argument("--prompts", type=int, nargs="+", default=[7, 13, 23], help="places among the saved held-out prompts")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    lines = (arguments.run / "samples" / "index.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row.get("held_out")]
    strip(rows, arguments.run, arguments.prompts).save(arguments.output, optimize=True)


def strip(rows: Sequence[dict[str, Any]], run: Path, prompts: Sequence[int]) -> Image.Image:
    """One row of pictures for each prompt, one column for each evaluated version, with rewards."""
    versions: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        versions.setdefault(row["policy_version"], []).append(row)
    cell = (_SIDE + _GAP, _SIDE + _LINE + _GAP)
    sheet = Image.new("RGB", (_LABEL + len(versions) * cell[0] + _GAP, 2 * _GAP + _LINE + len(prompts) * cell[1]), PAPER)
    pen = ImageDraw.Draw(sheet)
    for line, number in enumerate(prompts):
        top = _GAP + _LINE + 6 + line * cell[1]
        for place, text in enumerate(wrapped(rows[number]["prompt"], _LABEL - _GAP, font(13))):
            pen.text((_GAP, top + _SIDE // 2 - _LINE + place * _LINE), text, fill=INK, font=font(13))
        for column, (version, shown) in enumerate(sorted(versions.items())):
            left = _LABEL + column * cell[0]
            if line == 0:
                pen.text((left, _GAP), f"step {version}", fill=INK, font=font(12, bold=True))
            with Image.open(run / shown[number]["file"]) as picture:
                sheet.paste(resized(picture.convert("RGB"), (_SIDE, _SIDE)), (left, top))
            pen.rectangle((left - 1, top - 1, left + _SIDE, top + _SIDE), outline="#c0c0c0")
            pen.text((left, top + _SIDE + 3), f"{shown[number]['reward']:.2f}", fill=FAINT, font=font(12))
    return sheet


if __name__ == "__main__":
    main()
