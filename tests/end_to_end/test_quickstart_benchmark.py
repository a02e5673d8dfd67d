"""The quickstart's benchmark runs the command that a visitor runs, and sums up what its summaries say."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "quickstart.py"
SMALL = (
    "train.steps=1",
    "rollout.prompts_per_step=2",
    "rollout.num_generations=2",
    "rollout.num_inference_steps=3",
    "schedule.groups_per_micro_batch=1",
    "algorithm.sde_window_size=1",
    "algorithm.sde_window_range=[0,2]",
    "data.stratify_by=null",
    "eval.num_inference_steps=1",
    "cluster.placement=inline",
)


def of_seed(seed: int, gain: float) -> dict[str, Any]:
    change = {"before": 0.5, "after": 0.5 + gain, "gain": gain}
    measures = {"strict": change, "reward": change}
    return {"seed": seed, "seconds": 10.0 * seed, "num_images": 400, **measures, "categories": {"color": measures}}


def test_the_summary_has_medians_and_the_spread_over_seeds() -> None:
    tool = runpy.run_path(str(SCRIPT))
    runs = [of_seed(0, 0.25), of_seed(1, 0.125), of_seed(2, 0.5)]
    summary = tool["summarise"](runs)
    assert summary["strict_gain"] == {"median": 0.25, "min": 0.125, "max": 0.5}
    assert summary["category_strict_gain"] == {"color": {"median": 0.25, "min": 0.125, "max": 0.5}}
    assert summary["seconds"] == {"median": 10.0, "min": 0.0, "max": 20.0}
    told = tool["lines"]({"runs": runs, "summary": summary})
    assert told[-1] == "medians: strict +0.250 (+0.125 to +0.500), reward +0.250 (+0.125 to +0.500), 10 s"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_benchmark_tells_before_and_after_of_400_images_and_each_category(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *SMALL, "--seeds", "3", "--json", "--keep", str(tmp_path / "runs")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (run,) = json.loads(done.stdout)["runs"]
    assert (run["seed"], run["num_images"]) == (3, 400)
    assert set(run["categories"]) == {"single", "color", "counting", "two_objects", "position"}
    strict = [means["strict"]["before"] for means in run["categories"].values()]
    assert run["strict"]["before"] == pytest.approx(sum(strict) / 5, abs=1e-3)
    assert (tmp_path / "runs" / "seed-3" / "before_after.png").exists()
