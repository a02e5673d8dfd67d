"""What ``digenrl train quickstart`` gains and how long it takes, over some seeds, each in a folder of its own.

For each seed: strict verdict and reward of all 400 held-out prompts before and after, by category too, and seconds from the
command's start to its end. The machine should have nothing else to do.

    python benchmarks/quickstart.py [--seeds 0 1 2] [--json] [--keep FOLDER] [KEY=VALUE ...]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

DEADLINE_S = 1800.0
MEASURES = ("strict", "reward")


def run(seed: int, folder: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """One training in ``folder``. Raises SystemExit with the command's last words where it fails."""
    command = [sys.executable, "-m", "digenrl.cli.main", "train", "quickstart", f"run.seed={seed}", f"run.output_dir={folder}"]
    began = time.monotonic()
    done = subprocess.run(
        [*command, *overrides], cwd=folder.parent, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    seconds = time.monotonic() - began
    if done.returncode:
        raise SystemExit(f"seed {seed}: exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    found = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["eval"]
    return {
        "seed": seed,
        "seconds": round(seconds, 1),
        "num_images": found["num_images"],
        **{measure: change(found, measure) for measure in MEASURES},
        "categories": {
            name: {measure: change(means, measure) for measure in MEASURES} for name, means in found["categories"].items()
        },
    }


def change(means: dict[str, float], measure: str) -> dict[str, float]:
    """Before, after and the difference."""
    before, after = means[f"{measure}_before"], means[f"{measure}_after"]
    return {"before": round(before, 4), "after": round(after, 4), "gain": round(after - before, 4)}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest."""
    return {"median": round(statistics.median(values), 4), "min": min(values), "max": max(values)}


def summarise(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians and spread over the seeds."""
    return {
        "seconds": spread([each["seconds"] for each in runs]),
        **{f"{measure}_gain": spread([each[measure]["gain"] for each in runs]) for measure in MEASURES},
        **{f"{measure}_after": spread([each[measure]["after"] for each in runs]) for measure in MEASURES},
        "category_strict_gain": {
            name: spread([each["categories"][name]["strict"]["gain"] for each in runs]) for name in runs[0]["categories"]
        },
    }


def lines(result: dict[str, Any]) -> list[str]:
    """The result for people."""
    told = []
    for each in result["runs"]:
        parts = ", ".join(f"{measure} {each[measure]['before']:.3f} -> {each[measure]['after']:.3f}" for measure in MEASURES)
        kinds = ", ".join(
            f"{name} {means['strict']['before']:.2f} -> {means['strict']['after']:.2f}"
            for name, means in each["categories"].items()
        )
        told.append(f"seed {each['seed']}: {parts}, {each['num_images']} images, {each['seconds']:.0f} s")
        told.append(f"  strict by category: {kinds}")
    gains = ", ".join(
        f"{measure} {its['median']:+.3f} ({its['min']:+.3f} to {its['max']:+.3f})"
        for measure in MEASURES
        for its in [result["summary"][f"{measure}_gain"]]
    )
    return [*told, f"medians: {gains}, {result['summary']['seconds']['median']:.0f} s"]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="changes to the recipe, before other options")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the run folders here")
    arguments = parser.parse_intermixed_args(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with ExitStack() as stack:
        folder = arguments.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        runs = [run(seed, folder.resolve() / f"seed-{seed}", arguments.overrides) for seed in arguments.seeds]
    result = {"overrides": arguments.overrides, "runs": runs, "summary": summarise(runs)}
    print(json.dumps(result, indent=2) if arguments.json else "\n".join(lines(result)))


if __name__ == "__main__":
    main()
