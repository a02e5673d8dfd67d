"""``digenrl train``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence

from digenrl.cli.check import inspect
from digenrl.config.loader import load_recipe


def run(path: str, overrides: Sequence[str]) -> None:
    """Train and print what came out."""
    recipe = load_recipe(path, overrides)
    inspect(recipe)  # a mistake shows in a second, before torch is imported and a run folder made
    # Before torch is imported: waiting threads must sleep, since spinning costs up to 9 times the wall time on shared cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    os.environ.setdefault("OMP_NUM_THREADS", str(recipe.run.threads_per_worker))
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    from digenrl.runtime.train import train

    for line in result_lines(train(recipe)):
        print(line)


def result_lines(summary: Mapping[str, object]) -> Iterator[str]:
    """What a run's summary.json comes to, in words."""
    result = summary["eval"]
    if isinstance(result, dict):
        for name in [key.removesuffix("_before") for key in result if key.endswith("_before")]:
            before, after = result[f"{name}_before"], result[f"{name}_after"]
            if before is not None and after is not None:
                yield f"held-out {name}: {before:.3f} -> {after:.3f} ({after - before:+.3f}), {result['num_images']} images"
    yield f"{summary['steps']} steps in {summary['seconds']} s"
