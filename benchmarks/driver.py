"""What the driver costs: CPU seconds of its process and bytes through it, per micro-batch, with 4, 16 and 64 generator replicas.

The workers are emulated (they sleep for a preset's durations), so all of the CPU time is the driver's own: scheduler, executor,
ledger, journal, trace and Ray's threads. Each replica has the preset's devices, the trainer as many as all replicas together, a
step two micro-batches for each replica, with TAG and stale generation. CPU time is user and system time of all threads of
the driver's process, from the end of the first step to the end of the last. Bytes are those of the pickled arguments and answers;
trajectories and weights go from worker to worker, and references to them through the driver. The bar: with 64 replicas less
than half a core.

    python benchmarks/driver.py [--workers 4 16 64] [--emulate PRESET] [--generation-s S] [--steps N] [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import psutil

from digenrl.cli.emulation import emulation_of
from digenrl.config.loader import load_recipe
from digenrl.config.schema import Recipe
from digenrl.driver import Recorder, drive
from digenrl.errors import ConfigError
from digenrl.scheduling.commands import Accumulate, Command, OptimizerStep
from digenrl.scheduling.events import Event, Finished
from digenrl.simulation.presets import preset

QUICKSTART = Path(__file__).parents[1] / "recipes" / "quickstart.yaml"
CORE_BAR, BAR_AT = 0.5, 64


def recipe_of(name: str, replicas: int, *, steps: int, generation_s: float) -> Recipe:
    """The preset with so many replicas."""
    found = preset(name)
    work, layout = found.model.workload, found.layout
    groups, ranks = layout.groups_per_micro_batch, layout.ranks
    scale = generation_s / found.model.generate(groups, ranks, "generators")
    changes = [
        f"train.steps={steps}",
        "train.save_freq=0",
        "eval=null",
        "log.sample_freq=0",
        "log.tensorboard=false",
        "data.stratify_by=null",
        f"rollout.prompts_per_step={2 * replicas * groups}",
        f"rollout.num_generations={work.num_generations}",
        f"schedule.groups_per_micro_batch={groups}",
        "schedule.max_stale_fraction=0.25",
        "cluster.placement=disaggregated",
        f"cluster.generators.0={{replicas: {replicas}, ranks: {ranks}}}",
        f"cluster.trainer.ranks={replicas * ranks}",
        f"cluster.emulate={{preset: {name}, time_scale: {scale!r}}}",
    ]
    return load_recipe(QUICKSTART, changes)


@dataclass
class Spent:
    """What the driver had spent at the end of a step."""

    wall_s: float
    cpu_s: float
    micro_batches: int
    commands: int
    sent: int
    received: int


@dataclass
class Meter:
    """A recorder that looks at the driver's process at the end of every step, and hands everything on."""

    inner: Recorder
    sent: list[tuple[Any, ...]] = field(default_factory=list)
    """Arguments of all calls."""
    received: list[Any] = field(default_factory=list)
    """Futures of all answers."""
    ends: list[Spent] = field(default_factory=list)
    micro_batches: int = 0
    commands: int = 0

    def record(self, events: Sequence[Event], commands: Sequence[Command]) -> None:
        self.inner.record(events, commands)
        self.commands += len(commands)
        for event in events:
            if isinstance(event, Finished) and isinstance(event.command, Accumulate):
                self.micro_batches += 1
            elif isinstance(event, Finished) and isinstance(event.command, OptimizerStep):
                self.ends.append(self._now())

    def _now(self) -> Spent:
        times = psutil.Process().cpu_times()
        cpu = times.user + times.system
        counts = {"micro_batches": self.micro_batches, "commands": self.commands}
        return Spent(time.monotonic(), cpu, **counts, sent=len(self.sent), received=len(self.received))


def measure(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """One emulated run."""
    from digenrl.metrics.console import RunConsole
    from digenrl.metrics.log import MetricsLog
    from digenrl.runtime.build import Start
    from digenrl.runtime.emulated import without_pictures
    from digenrl.runtime.interrupt import Interrupt
    from digenrl.runtime.journal import Journal
    from digenrl.runtime.ray.environment import prepare
    from digenrl.runtime.run_folder import RunFolder
    from digenrl.runtime.watch import Watch
    from digenrl.trace.record import TraceWriter

    prepare(private=True)
    from digenrl.runtime.ray.emulated_system import EmulatedSystem

    emulation = emulation_of(recipe)
    assert emulation is not None, "the recipe emulates"
    recipe, load = without_pictures(recipe), os.getloadavg()[0]
    with ExitStack() as stack:
        began = time.monotonic()
        system = EmulatedSystem(recipe, emulation, None, stack)
        started_s = time.monotonic() - began
        run_folder = RunFolder.create(folder, recipe, stack)
        log = MetricsLog(run_folder.metrics, labels={"emulated": emulation.preset})
        stack.callback(log.close)
        journal = Journal(recipe, run_folder, log, RunConsole(recipe.train.steps))
        interrupt = stack.enter_context(Interrupt())
        sent, received = _spy(system)
        run = system.begin(system.settings(Start()), Start(), journal, interrupt, run_folder.checkpoints)
        writer = stack.enter_context(TraceWriter(run_folder.trace, run.scheduler.settings, source="emulation"))
        watch = Watch(run.scheduler, [writer])
        journal.pool_metrics = lambda: watch.step_metrics(run.executor.now_us())
        meter = Meter(watch, sent, received)
        drive(run.scheduler, run.executor, meter, command_timeout_s=recipe.cluster.command_timeout_s)
        memory = [psutil.Process(each.hello.pid).memory_info().rss for each in system.pool.all() if each.hello]
        run.executor.finish()
        return {**_report(meter), "start_s": started_s, "worker_mib": max(memory) / 2**20, "load_before": load}


def _spy(system: Any) -> tuple[list[tuple[Any, ...]], list[Any]]:
    """Keep what goes out and comes in; it is pickled, to be counted, when the run is over."""
    sent: list[tuple[Any, ...]] = []
    received: list[Any] = []
    call, watch = system.pool.call, system.inbox.watch

    def spying_call(process: Any, method: str, *arguments: Any, **options: Any) -> Any:
        sent.append((method, *arguments))
        return call(process, method, *arguments, **options)

    def spying_watch(future: Any, handler: Any) -> None:
        received.append(future)
        watch(future, handler)

    system.pool.call = spying_call
    # An Inbox has slots, so that another one takes its place, which shares its queue.
    system.inbox = type("SpyingInbox", (), {"items": system.inbox.items, "watch": staticmethod(spying_watch)})()
    return sent, received


def _report(meter: Meter) -> dict[str, Any]:
    first, last = meter.ends[0], meter.ends[-1]
    count = last.micro_batches - first.micro_batches
    cpu_s, wall_s = last.cpu_s - first.cpu_s, last.wall_s - first.wall_s
    pairs = list(zip(meter.ends, meter.ends[1:], strict=False))
    shares = [(after.cpu_s - before.cpu_s) / (after.wall_s - before.wall_s) for before, after in pairs]
    return {
        "micro_batches": count,
        "micro_batches_per_s": count / wall_s,
        "step_s": wall_s / len(pairs),
        "cpu_ms_per_micro_batch": 1e3 * cpu_s / count,
        "commands_per_micro_batch": (last.commands - first.commands) / count,
        "share_of_a_core": cpu_s / wall_s,
        "share_of_a_core_by_step": {"min": min(shares), "max": max(shares)},
        "bytes_sent_per_micro_batch": sum(map(_sent_bytes, meter.sent[first.sent : last.sent])) / count,
        "bytes_received_per_micro_batch": sum(map(_received_bytes, meter.received[first.received : last.received])) / count,
    }


def _sent_bytes(arguments: tuple[Any, ...]) -> int:
    from ray import ObjectRef

    return len(pickle.dumps([item.binary() if isinstance(item, ObjectRef) else item for item in arguments]))


def _received_bytes(future: Any) -> int:
    return len(pickle.dumps(future.result())) if future.done() and future.exception() is None else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", nargs="+", type=int, default=[4, 16, 64], help="generator replicas; the trainer is one more")
    parser.add_argument("--emulate", metavar="PRESET", default="hunyuanvideo-32gpu")
    parser.add_argument("--generation-s", type=float, default=2.0, help="real seconds of a micro-batch's generation")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(argv)
    rows: dict[str, Any] = {}
    try:
        for count in asked.workers:
            recipe = recipe_of(asked.emulate, count, steps=asked.steps, generation_s=asked.generation_s)
            with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
                rows[str(count)] = measure(recipe, Path(folder) / "run")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    held = all(row["share_of_a_core"] < CORE_BAR for count, row in rows.items() if int(count) <= BAR_AT)
    report = {
        "emulated": asked.emulate,
        "generation_s": asked.generation_s,
        "steps": asked.steps,
        "cores": len(os.sched_getaffinity(0)),
        "workers": rows,
        "within_bar": held,
    }
    print(json.dumps(report, indent=2) if asked.json else "\n".join(table(report)))
    return 0 if held else 1


def table(report: dict[str, Any]) -> list[str]:
    """For people."""
    lines = [f"EMULATION of {report['emulated']}, {report['generation_s']:g} s a generation, {report['cores']} cores"]
    lines.append(
        f"{'replicas':>8}{'step s':>9}{'mb/s':>8}{'ms CPU/mb':>11}{'of a core':>11}{'B sent/mb':>11}{'B back/mb':>11}{'load':>7}"
    )
    for count, row in report["workers"].items():
        lines.append(
            f"{count:>8}{row['step_s']:>9.2f}{row['micro_batches_per_s']:>8.1f}{row['cpu_ms_per_micro_batch']:>11.2f}"
            f"{row['share_of_a_core']:>11.3f}{row['bytes_sent_per_micro_batch']:>11.0f}"
            f"{row['bytes_received_per_micro_batch']:>11.0f}{row['load_before']:>7.1f}"
        )
    lines.append(f"less than {CORE_BAR:g} of a core: {'yes' if report['within_bar'] else 'NO'}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
