"""Write the shapes prompts that ship with the package: ``python tools/tiny_model/make_prompts.py [--output FOLDER]``.

train.jsonl: every caption that is not held out, once. heldout.jsonl: 400 lines, the categories in turn, captions
repeated where a category holds out fewer than 80. The order comes from a hash of the caption, not from a random
generator, so that it is the same with every version of every library.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterable
from itertools import cycle, islice
from pathlib import Path

from digenrl.rewards.shapes.scene import CATEGORIES, Scene, all_scenes, caption, is_held_out

HELD_OUT_PER_CATEGORY = 80
SHIPPED = Path(__file__).resolve().parents[2] / "digenrl" / "assets" / "shapes"


def main() -> None:
    parser = argparse.ArgumentParser(description="Write train.jsonl and heldout.jsonl of the shapes world.")
    parser.add_argument("--output", type=Path, default=SHIPPED, help="folder to write to (default: the shipped one)")
    write_prompts(parser.parse_args().output)


def write_prompts(folder: Path) -> None:
    """Write both files into an existing folder."""
    _write(folder / "train.jsonl", train_scenes())
    _write(folder / "heldout.jsonl", held_out_scenes())


def train_scenes() -> list[Scene]:
    """Every scene that RL may train on, once, shuffled."""
    return _shuffled(scene for category in CATEGORIES for scene in all_scenes(category) if not is_held_out(scene))


def held_out_scenes() -> list[Scene]:
    """80 held-out scenes of each category; line i is of category i modulo 5, so that any prefix is balanced."""
    columns = []
    for category in CATEGORIES:
        distinct = _shuffled(scene for scene in all_scenes(category) if is_held_out(scene))
        columns.append(islice(cycle(distinct), HELD_OUT_PER_CATEGORY))
    return [scene for row in zip(*columns, strict=True) for scene in row]


def _shuffled(scenes: Iterable[Scene]) -> list[Scene]:
    return sorted(scenes, key=lambda scene: hashlib.sha256(caption(scene).encode()).digest())


def _write(path: Path, scenes: list[Scene]) -> None:
    lines = (json.dumps({"prompt": caption(scene), **scene.to_metadata()}) + "\n" for scene in scenes)
    path.write_text("".join(lines), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
