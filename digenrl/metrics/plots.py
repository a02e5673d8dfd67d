"""The reward curve of a run as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

Row = dict[str, Any]


def plot_reward(rows: Sequence[Row], path: Path, *, title: str, window: int = 10) -> None:
    """Draw training reward per step, its moving average, and the held-out points; by category beside it, where there are any.

    rows: lines of metrics.jsonl.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    evaluated = [row for row in rows if row["kind"] == "eval" and row.get("reward") is not None]
    categories = _by_category(evaluated)
    figure = Figure(figsize=(11 if categories else 7, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, squeeze=False, width_ratios=(7, 4))[0] if categories else [figure.add_subplot()]
    _draw_training(panels[0], rows, evaluated, window)
    for panel in panels:
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[0].set(xlabel="RL step", ylabel="reward", title=title.replace("$", r"\$"))
    if categories:
        for name, points in categories.items():
            versions, values = np.array(points, dtype=float).T
            panels[1].plot(versions, values, "o-", label=name)
        panels[1].set(xlabel="RL step", title="held out, by category")
        panels[1].grid(alpha=0.3)
        panels[1].legend(loc="best", fontsize="small")
    figure.savefig(path)


def _draw_training(axes: Any, rows: Sequence[Row], evaluated: Sequence[Row], window: int) -> None:
    train = [(r["step"] + 1, r["reward_mean"]) for r in rows if r["kind"] == "train" and r.get("reward_mean") is not None]
    if train:
        steps, rewards = np.array(train, dtype=float).T
        axes.plot(steps, rewards, color="#9ecae1", linewidth=1, label="training, per step")
        if len(rewards) >= window:
            smooth = np.convolve(rewards, np.ones(window) / window, mode="valid")
            axes.plot(steps[window - 1 :], smooth, color="#08519c", linewidth=2, label=f"training, mean of {window}")
    if evaluated:
        versions, values = np.array([(row["step"], row["reward"]) for row in evaluated], dtype=float).T
        axes.plot(versions, values, "o--", color="#d94801", label="held out (ODE, averaged weights)")
    axes.grid(alpha=0.3)
    if train or evaluated:
        axes.legend(loc="lower right")


def _by_category(evaluated: Sequence[Row]) -> dict[str, list[tuple[int, float]]]:
    """(version, reward) of each category, as ``category/<name>/reward`` says it."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in evaluated:
        for key, value in row.items():
            if key.startswith("category/") and key.endswith("/reward") and value is not None:
                found.setdefault(key[len("category/") : -len("/reward")], []).append((row["step"], value))
    return found
