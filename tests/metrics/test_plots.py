"""The reward curve is a picture of the numbers in metrics.jsonl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.axes
import numpy as np
import pytest
from PIL import Image

from digenrl.metrics.plots import plot_reward

Row = dict[str, Any]


def train_rows(*rewards: float | None) -> list[Row]:
    return [{"kind": "train", "step": step, "reward_mean": reward} for step, reward in enumerate(rewards)]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[tuple[float, float]]]:
    """Points of each line that is drawn, by label; matplotlib draws them all the same."""
    lines: dict[str, list[tuple[float, float]]] = {}
    plot = matplotlib.axes.Axes.plot

    def record(self: Any, x: Any, y: Any, *arguments: Any, label: str, **options: Any) -> Any:
        lines[label] = [(float(a), float(b)) for a, b in zip(x, y, strict=True)]
        return plot(self, x, y, *arguments, label=label, **options)

    monkeypatch.setattr(matplotlib.axes.Axes, "plot", record)
    return lines


def test_training_is_drawn_at_the_version_it_leads_to_and_held_out_at_its_own(tmp_path: Path, drawn: Any) -> None:
    rows = [{"kind": "eval", "step": 0, "reward": 0.25}, *train_rows(0.5, 0.75), {"kind": "eval", "step": 2, "reward": 1.0}]
    plot_reward(rows, tmp_path / "reward.png", title="run")
    assert drawn["training, per step"] == [(1.0, 0.5), (2.0, 0.75)]
    assert [points for label, points in drawn.items() if label.startswith("held out")] == [[(0.0, 0.25), (2.0, 1.0)]]


def test_the_mean_stands_at_the_last_step_of_its_window(tmp_path: Path, drawn: Any) -> None:
    plot_reward(train_rows(0.0, 1.0, 2.0, 3.0), tmp_path / "reward.png", title="run", window=3)
    assert np.allclose(drawn["training, mean of 3"], [(3.0, 1.0), (4.0, 2.0)])


def test_steps_without_a_reward_are_left_out(tmp_path: Path, drawn: Any) -> None:
    plot_reward(train_rows(0.5, None, 0.75), tmp_path / "reward.png", title="run")
    assert drawn["training, per step"] == [(1.0, 0.5), (3.0, 0.75)]


def test_held_out_categories_are_drawn_beside_it(tmp_path: Path, drawn: Any) -> None:
    rows = [
        {"kind": "eval", "step": 0, "reward": 0.5, "category/color/reward": 0.25, "category/color/shapes/strict": 0.0},
        {"kind": "eval", "step": 4, "reward": 0.75, "category/color/reward": 0.5, "category/single/reward": 1.0},
    ]
    plot_reward([*train_rows(0.5), *rows], tmp_path / "reward.png", title="run")
    assert (drawn["color"], drawn["single"]) == ([(0.0, 0.25), (4.0, 0.5)], [(4.0, 1.0)])
    with Image.open(tmp_path / "reward.png") as picture:
        assert picture.width > 840


@pytest.mark.parametrize("rows", [[], train_rows(None), train_rows(0.5)], ids=["no rows", "no reward", "one step"])
def test_a_run_that_stopped_early_still_has_a_picture(tmp_path: Path, rows: list[Row]) -> None:
    plot_reward(rows, tmp_path / "reward.png", title="a run_with $signs")
    picture = np.asarray(Image.open(tmp_path / "reward.png").convert("RGB"))
    assert picture.shape == (480, 840, 3) and picture.std() > 0
