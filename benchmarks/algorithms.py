"""What each algorithm learns on the quickstart: held-out reward along the run, over some seeds.

Every run is the quickstart's recipe in one process with another ``algorithm`` section. The reward is that of the held-out prompts
under the ODE sampler and averaged weights, at version 0, every ``--eval-freq`` steps, and at the end. Rewards of training are no
measure across algorithms: their samples are noisy in other places. Nothing is timed, so runs may go on beside one another.

    python benchmarks/algorithms.py [--algorithms flow_grpo dance_grpo] [--seeds 3] [--steps 70] [--jobs 2] [--plot FILE.png]
        [--json] [--tiny]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

QUICKSTART = Path(__file__).parents[1] / "recipes" / "quickstart.yaml"
ALGORITHMS: dict[str, tuple[str, ...]] = {
    "flow_grpo": (),
    "flow_cps": ("algorithm.dynamics=cps", "rollout.noise_level=0.8"),
    "dance_grpo": ("algorithm={type: dance_grpo}", "rollout.noise_level=0.7"),
    "mix_grpo": ("algorithm={type: mix_grpo, sde_window_size: 3, sde_window_range: [0, 4], window_stride: 1, window_steps: 4}",),
    "mix_grpo_flash": (
        "algorithm={type: mix_grpo, sde_window_size: 3, sde_window_range: [0, 4], window_stride: 1, window_steps: 4, "
        "flash_fraction: 0.4}",
    ),
}
"""Overrides of the quickstart's recipe."""
TINY = ("rollout.prompts_per_step=3", "rollout.num_generations=4", "rollout.forward_batch_size=4", "eval.num_inference_steps=2")


def curve(overrides: Sequence[str], steps: int, seed: int, eval_freq: int) -> list[tuple[int, float]]:
    """(version, held-out reward) of one run."""
    from digenrl.config.loader import load_recipe
    from digenrl.metrics.log import read_metrics
    from digenrl.runtime.train import train

    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        changes = (
            "cluster.placement=inline",
            "log.tensorboard=false",
            "log.sample_freq=0",
            "train.save_freq=0",
            f"train.steps={steps}",
            f"eval.freq={eval_freq}",
            f"run.seed={seed}",
            f"run.output_dir={run}",
        )
        with contextlib.redirect_stdout(sys.stderr):
            train(load_recipe(QUICKSTART, [*changes, *overrides]))
        rows = [row for row in read_metrics(run / "metrics.jsonl") if row["kind"] == "eval"]
    return [(int(row["step"]), float(row["reward"])) for row in rows]


def measure(
    names: Sequence[str], steps: int, seeds: Sequence[int], eval_freq: int, more: Sequence[str] = (), jobs: int = 1
) -> dict[str, Any]:
    """Curves of all runs, and how much reward each algorithm has gained. jobs: runs at a time, each in a process of its own."""
    runs = [(name, seed) for name in names for seed in seeds]
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        pending = [pool.submit(curve, [*ALGORITHMS[name], *more], steps, seed, eval_freq) for name, seed in runs]
        curves = {run: future.result() for run, future in zip(runs, pending, strict=True)}
    return {"steps": steps, "seeds": list(seeds), "algorithms": {name: _summed_up(name, seeds, curves) for name in names}}


def _summed_up(name: str, seeds: Sequence[int], curves: dict[tuple[str, int], list[tuple[int, float]]]) -> dict[str, Any]:
    its = [curves[name, seed] for seed in seeds]
    gains = [points[-1][1] - points[0][1] for points in its]
    return {
        "overrides": list(ALGORITHMS[name]),
        "curves": {str(seed): points for seed, points in zip(seeds, its, strict=True)},
        "before": statistics.fmean(points[0][1] for points in its),
        "after": statistics.fmean(points[-1][1] for points in its),
        "gain": statistics.fmean(gains),
        "gain_min": min(gains),
        "gain_max": max(gains),
    }


def plot(result: dict[str, Any], path: Path) -> None:
    """Mean over the seeds of each algorithm, and the range between the worst and the best one."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, its in result["algorithms"].items():
        versions = [version for version, _ in next(iter(its["curves"].values()))]
        columns = list(zip(*([reward for _, reward in points] for points in its["curves"].values()), strict=True))
        (line,) = axes.plot(versions, [statistics.fmean(column) for column in columns], "o-", markersize=3, label=name)
        axes.fill_between(versions, [*map(min, columns)], [*map(max, columns)], color=line.get_color(), alpha=0.15, linewidth=0)
    axes.set(xlabel="RL step", ylabel="held-out reward", title=f"the quickstart's model, {len(result['seeds'])} seeds")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", choices=sorted(ALGORITHMS), default=sorted(ALGORITHMS))
    parser.add_argument("--seeds", type=int, default=3, help="how many, from 0")
    parser.add_argument("--steps", type=int, default=70)
    parser.add_argument("--eval-freq", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--plot", type=Path, help="picture of the curves to write")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="steps of a few samples: shows that it runs, and no more")
    arguments = parser.parse_args(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    more = TINY if arguments.tiny else ()
    seeds = range(arguments.seeds)
    result = measure(arguments.algorithms, arguments.steps, seeds, arguments.eval_freq, more, arguments.jobs)
    if arguments.plot is not None:
        plot(result, arguments.plot)
    if arguments.json:
        print(json.dumps(result, indent=2))
        return
    for name, its in result["algorithms"].items():
        print(
            f"{name}: held-out reward {its['before']:.3f} to {its['after']:.3f} "
            f"(gain {its['gain']:+.3f}, from {its['gain_min']:+.3f} to {its['gain_max']:+.3f})"
        )


if __name__ == "__main__":
    main()
