"""The reward curve of a run as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np


def plot_reward(rows: Sequence[dict[str, Any]], path: Path, *, title: str, window: int = 10) -> None:
    """Draw training reward per step, its moving average, and the held-out points. rows: lines of metrics.jsonl."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    train = [(r["step"] + 1, r["reward_mean"]) for r in rows if r["kind"] == "train" and r.get("reward_mean") is not None]
    held_out = [(r["step"], r["reward"]) for r in rows if r["kind"] == "eval" and r.get("reward") is not None]
    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if train:
        steps, rewards = np.array(train, dtype=float).T
        axes.plot(steps, rewards, color="#9ecae1", linewidth=1, label="training, per step")
        if len(rewards) >= window:
            smooth = np.convolve(rewards, np.ones(window) / window, mode="valid")
            axes.plot(steps[window - 1 :], smooth, color="#08519c", linewidth=2, label=f"training, mean of {window}")
    if held_out:
        versions, values = np.array(held_out, dtype=float).T
        axes.plot(versions, values, "o--", color="#d94801", label="held out (ODE, averaged weights)")
    axes.set(xlabel="RL step", ylabel="reward", title=title)
    axes.grid(alpha=0.3)
    if train or held_out:
        axes.legend(loc="lower right")
    figure.savefig(path)
