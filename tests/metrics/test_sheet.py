"""Contact sheets: which pictures are shown, and that each stands over its own prompt and score."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from digenrl.metrics.sheet import _SIDE, chosen_rows, contact_sheet, font, wrapped


def flat(*colors: tuple[int, int, int], height: int = 8, width: int = 8) -> np.ndarray:
    """One picture of a single colour for each colour."""
    return np.stack([np.full((height, width, 3), color, dtype=np.uint8) for color in colors])


def squares_of(sheet: Image.Image, color: tuple[int, int, int]) -> int:
    """Pixels of exactly this colour."""
    return int((np.asarray(sheet) == color).all(-1).sum())


def test_every_picture_is_shown_once_in_the_order_of_the_prompts() -> None:
    colors = [(250, 0, 0), (0, 250, 0), (0, 0, 250)]
    sheet = contact_sheet(flat(*colors), ["a", "b", "c"], ["1", "2", "3"], title="t")
    assert [squares_of(sheet, color) for color in colors] == [_SIDE * _SIDE] * 3
    pixels = np.asarray(sheet)
    firsts = [tuple(np.argwhere((pixels == color).all(-1))[0]) for color in colors]
    assert firsts == sorted(firsts)


def test_pictures_keep_their_shape() -> None:
    sheet = contact_sheet(flat((250, 0, 0), height=20, width=40), ["a"], ["1"], title="t")
    assert squares_of(sheet, (250, 0, 0)) == _SIDE * _SIDE // 2


@pytest.mark.parametrize("changed", ["prompt", "score", "title"])
def test_prompt_score_and_title_are_all_drawn(changed: str) -> None:
    texts = {"prompt": "an owl", "score": "0.500", "title": "a run"}

    def sheet(prompt: str, score: str, title: str) -> Image.Image:
        return contact_sheet(flat((9, 9, 9)), [prompt], [score], title=title)

    assert sheet(**texts).tobytes() != sheet(**{**texts, changed: ""}).tobytes()


@pytest.mark.parametrize("count", [1, 64, 65, 100, 2212])
def test_at_most_64_pictures_are_shown_evenly_spread_from_the_first_to_the_last(count: int) -> None:
    rows = chosen_rows(count)
    assert len(rows) == min(count, 64) == len(set(rows))
    assert (rows[0], rows[-1]) == (0, count - 1)
    steps = np.diff(rows)
    assert len(rows) == 1 or steps.max() - steps.min() <= 1


@pytest.mark.parametrize(
    "text",
    ["", "short", "a very long prompt about an owl that flies at night over the sea", "x" * 400, "画" * 300, "a\tb\nc"],
)
def test_a_prompt_is_at_most_two_lines_that_fit_under_its_picture(text: str) -> None:
    lines = wrapped(text, _SIDE, font(12))
    assert len(lines) <= 2
    assert all(font(12).getlength(line) <= _SIDE for line in lines)
    shown = " ".join(lines).rstrip("…").replace(" ", "")
    assert "".join(text.split()).startswith(shown)
    assert bool(shown) == bool(text)


def test_a_prompt_that_is_cut_ends_in_an_ellipsis_and_one_that_fits_does_not() -> None:
    assert wrapped("a red circle", _SIDE, font(12)) == ["a red circle"]
    assert wrapped("word " * 50, _SIDE, font(12))[-1].endswith("…")
