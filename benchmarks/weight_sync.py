"""How long weights take from the trainer to the generators: by Ray's object store and by broadcast, at some sizes and receivers.

Real worker processes with real networks (randomly initialised, all weights trained, float32), on this machine alone: there is no
network between them, so what is measured is copying, hashing and Ray. ``publish`` blocks the trainer; with a broadcast it ends
before the bytes have left. ``load`` is what generators wait for once the version is published, the slowest of them counts.
Every load is checked against the published digest. The first of each is left out: connections are made then.

    python benchmarks/weight_sync.py [--mib 16 64 256] [--receivers 1 4] [--repeats 5] [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from digenrl.config.loader import load_recipe

QUICKSTART = Path(__file__).parents[1] / "recipes" / "quickstart.yaml"
WIDTH = 256
MIB_PER_BLOCK = 9.3
"""Of a transformer block of that width, about."""
ANSWER_TIMEOUT_S = 120.0


def build(folder: Path, mib: float) -> Path:
    """A model of about this many MiB of trained weights."""
    from digenrl.testing.tiny_pipelines import build_sd3

    blocks, width = max(1, round(mib / MIB_PER_BLOCK)), WIDTH if mib >= MIB_PER_BLOCK else 32
    heads = {"attention_head_dim": width // 4, "num_attention_heads": 4, "caption_projection_dim": width}
    return build_sd3(folder, with_t5=False, num_layers=blocks, **heads)


def measure(mib: float, receivers: int, repeats: int) -> dict[str, Any]:
    """Both transports between one trainer and so many generators."""
    from digenrl.runtime.ray.distribution import BroadcastDistribution, ObjectStoreDistribution
    from digenrl.runtime.ray.system import RaySystem

    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        changes = [
            f"model.path={build(Path(folder) / 'model', mib)}",
            "eval=null",
            "cluster.placement=disaggregated",
            f"cluster.generators.0={{replicas: {receivers}, resources: {{cpus: 0.1}}}}",
            "cluster.trainer.resources.cpus=0.1",
        ]
        system = RaySystem(load_recipe(QUICKSTART, changes), None, stack)
        trainer = [process for process in system.pool.all() if "train" in process.rank.roles]
        transports = {
            "object_store": ObjectStoreDistribution(system.pool, trainer),
            "broadcast": BroadcastDistribution(system.pool, trainer, system.inbox),
        }
        report: dict[str, Any] = {}
        version = 0
        for name, weights in transports.items():
            times = [_once(system, weights, version + number) for number in range(repeats + 1)][1:]
            version += repeats + 1
            report[name] = {key: _spread([each[key] for each in times]) for key in ("publish_s", "load_s", "delivered_s")}
            report[name]["bytes"] = times[0]["bytes"]
            report[name]["delivered_mib_per_s"] = receivers * times[0]["bytes"] / 2**20 / report[name]["delivered_s"]["median"]
        return report


def _once(system: Any, weights: Any, version: int) -> dict[str, float]:
    """Publish the trainer's version, load it everywhere, and count the version on."""
    import ray

    generators = [process for process in system.pool.all() if "train" not in process.rank.roles]
    (trainer,) = (process for process in system.pool.all() if "train" in process.rank.roles)
    began = time.perf_counter()
    manifest = ray.get(weights.publish(version, "publish"), timeout=ANSWER_TIMEOUT_S)
    published = time.perf_counter()
    digests = ray.get([weights.load(process, version) for process in generators], timeout=ANSWER_TIMEOUT_S)
    loaded = time.perf_counter()
    assert manifest.version == version and set(digests) == {manifest.digest}, "what is loaded is what was published"
    _hear_of_broadcast(system)
    ray.get(
        system.pool.call(trainer, "optimizer_step")[0], timeout=ANSWER_TIMEOUT_S
    )  # without gradients: a version with the same weights
    return {
        "publish_s": published - began,
        "load_s": loaded - published,
        "delivered_s": loaded - began,
        "bytes": float(manifest.num_bytes),
    }


def _hear_of_broadcast(system: Any) -> None:
    """Answers of senders and receivers, which the driver's loop takes in a run: a version after that may be broadcast, too."""
    with contextlib.suppress(queue.Empty):
        while True:
            handler, future = system.inbox.items.get(timeout=0.5)
            handler(future)


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", nargs="+", type=float, default=[16, 64, 256], help="about so many MiB of weights")
    parser.add_argument("--receivers", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(argv)
    from digenrl.runtime.ray.environment import prepare

    prepare(private=True)
    from digenrl.runtime.ray.session import RaySession

    load, rows = os.getloadavg()[0], []
    with contextlib.redirect_stdout(sys.stderr), RaySession(None):
        for mib in asked.mib:
            for receivers in asked.receivers:
                rows.append({"mib": mib, "receivers": receivers, **measure(mib, receivers, asked.repeats)})
    machine = {"cores": len(os.sched_getaffinity(0)), "load_before": load, "load_after": os.getloadavg()[0]}
    report = {"repeats": asked.repeats, "machine": machine, "rows": rows}
    print(json.dumps(report, indent=2) if asked.json else "\n".join(table(report)))
    return 0


def table(report: dict[str, Any]) -> list[str]:
    """For people."""
    lines = [
        f"{'MiB':>8}{'receivers':>11}  {'transport':<14}{'publish ms':>12}{'load ms':>10}{'delivered ms (range)':>26}{'MiB/s':>8}"
    ]
    for row in report["rows"]:
        for name in ("object_store", "broadcast"):
            found = row[name]
            publish, load, whole = (found[key] for key in ("publish_s", "load_s", "delivered_s"))
            span = f"{1e3 * whole['median']:.0f} ({1e3 * whole['min']:.0f}-{1e3 * whole['max']:.0f})"
            lines.append(
                f"{found['bytes'] / 2**20:>8.1f}{row['receivers']:>11}  {name:<14}{1e3 * publish['median']:>12.0f}"
                f"{1e3 * load['median']:>10.0f}{span:>26}{found['delivered_mib_per_s']:>8.0f}"
            )
    busy = report["machine"]
    return [*lines, f"{busy['cores']} cores, load {busy['load_before']:.1f} before and {busy['load_after']:.1f} after"]


if __name__ == "__main__":
    sys.exit(main())
