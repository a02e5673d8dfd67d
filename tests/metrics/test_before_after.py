"""The sheet shows the same prompts' pictures of the first and the last version, with the rewards under them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw

from digenrl.metrics.before_after import before_after, first_and_last

RED, BLUE, GREEN = (255, 0, 0), (0, 0, 255), (0, 128, 0)


def save(folder: Path, version: int, color: tuple[int, int, int], rewards: list[float | None]) -> list[dict[str, Any]]:
    rows = []
    for number, reward in enumerate(rewards):
        file = f"v{version}-{number}.png"
        Image.new("RGB", (8, 8), color).save(folder / file)
        prompt = f"prompt {number}"
        rows.append({"file": file, "prompt": prompt, "policy_version": version, "held_out": True, "reward": reward})
    return rows


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Texts and their colours, in the order of drawing; they are drawn all the same."""
    texts: list[tuple[str, Any]] = []
    text = ImageDraw.ImageDraw.text

    def record(self: Any, xy: Any, words: str, **options: Any) -> None:
        texts.append((words, options["fill"]))
        text(self, xy, words, **options)

    monkeypatch.setattr(ImageDraw.ImageDraw, "text", record)
    return texts


def has(sheet: Image.Image, color: tuple[int, int, int]) -> bool:
    return bool((np.asarray(sheet) == color).all(axis=-1).any())


def test_first_and_last_versions_are_shown_and_those_between_are_not(tmp_path: Path, written: list[tuple[str, Any]]) -> None:
    rows = [*save(tmp_path, 0, RED, [0.25]), *save(tmp_path, 10, GREEN, [0.5]), *save(tmp_path, 20, BLUE, [0.75])]
    sheet = before_after(first_and_last(rows, tmp_path), title="run")
    assert has(sheet, RED) and has(sheet, BLUE) and not has(sheet, GREEN)
    texts = [words for words, _ in written]
    assert {"0.25", "0.75", "prompt 0"} <= set(texts) and "0.50" not in texts
    assert "version 0" in texts[0] and "version 20" in texts[0]


def test_a_score_that_rose_has_another_colour_than_one_that_fell(tmp_path: Path, written: list[tuple[str, Any]]) -> None:
    rows = [*save(tmp_path, 0, RED, [0.2, 0.9, None]), *save(tmp_path, 5, BLUE, [0.4, 0.1, 0.3])]
    before_after(first_and_last(rows, tmp_path), title="run")
    colours = dict(written)
    assert colours["0.40"] == colours["0.30"] != colours["0.10"]
    assert "invalid" in colours


def test_pictures_of_training_are_no_part_of_it(tmp_path: Path) -> None:
    rows = [{**row, "held_out": False} for row in save(tmp_path, 0, RED, [0.5])]
    assert first_and_last([*rows, *save(tmp_path, 3, BLUE, [0.5])], tmp_path).keys() == {3}


def test_a_version_whose_pictures_are_gone_is_left_out(tmp_path: Path) -> None:
    rows = [*save(tmp_path, 0, RED, [0.5]), *save(tmp_path, 3, BLUE, [0.5]), *save(tmp_path, 6, BLUE, [0.5])]
    (tmp_path / "v6-0.png").unlink()
    assert first_and_last(rows, tmp_path).keys() == {0, 3}


def test_of_a_video_the_picture_beside_it_is_shown(tmp_path: Path) -> None:
    rows = [{**row, "file": row["file"].replace(".png", ".mp4")} for row in save(tmp_path, 0, RED, [0.5])]
    assert [shown.path.name for shown in first_and_last(rows, tmp_path)[0]] == ["v0-0.png"]


@pytest.mark.parametrize("count", [1, 5, 40])
def test_at_most_sixteen_pairs_are_shown(tmp_path: Path, written: list[tuple[str, Any]], count: int) -> None:
    rows = [*save(tmp_path, 0, RED, [0.5] * count), *save(tmp_path, 3, BLUE, [1.0] * count)]
    before_after(first_and_last(rows, tmp_path), title="run")
    assert sum(words == "1.00" for words, _ in written) == min(count, 16)


def test_what_changed_comes_first_and_all_that_was_saved_is_counted(tmp_path: Path, written: list[tuple[str, Any]]) -> None:
    before: list[float | None] = [1.0] * 17 + [0.5, 0.5, None]
    rows = [*save(tmp_path, 0, RED, before), *save(tmp_path, 3, BLUE, [1.0] * 17 + [0.75, 0.25, None])]
    before_after(first_and_last(rows, tmp_path), title="run")
    texts = [words for words, _ in written]
    assert "of 20: 1 better, 1 worse, 18 as before; those that changed come first" in texts
    assert [words for words in texts if words.startswith("prompt")][:3] == ["prompt 17", "prompt 18", "prompt 0"]
