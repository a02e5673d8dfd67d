"""The rewards that are arithmetic on pixels, against numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from digenrl.rewards.pixels import sharpness


def image(rows: list[list[int]]) -> np.ndarray:
    return np.repeat(np.array(rows, dtype=np.uint8)[..., None], 3, axis=2)


def test_sharpness_is_the_mean_difference_of_neighbours() -> None:
    assert sharpness(image([[0, 255], [255, 0]])) == 1
    assert sharpness(image([[7, 7], [7, 7]])) == 0
    # Two neighbours in rows (51 and 0 apart) and two in columns (0 and 51 apart).
    assert sharpness(image([[0, 51], [0, 0]])) == pytest.approx(51 / 255 / 2)
    assert sharpness(image([[0, 255]])) == 1
