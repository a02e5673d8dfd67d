"""Policies of TAG against optima found by enumeration: makespan over optimum and over the lower bound, and search time.

FILE has the oracle's format (tests/golden/schedules.json): single steps in ``small`` and ``large``, several steps with stale
generation in ``tcss``, of which those with ``sync: buffered`` count. Every policy is run by the real scheduler on the virtual
clock, with known durations. ``static`` is the best n of every instance. Search time is the wall time of the slowest answer that
contains a search, best of three runs; policies that search nothing have 0.

    python benchmarks/schedules.py FILE [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from digenrl.config.text import read_text
from digenrl.errors import ConfigError
from digenrl.ids import WorkerId
from digenrl.scheduling.bounds import Pool, trainer_time
from digenrl.scheduling.commands import Accumulate, OptimizerStep
from digenrl.scheduling.events import Event, Finished, RunStarted
from digenrl.scheduling.scheduler import Scheduler
from digenrl.scheduling.settings import SchedulerSettings, TagPolicy
from digenrl.scheduling.step_model import start_of_step
from digenrl.simulation.costs import TICKS, SimulationCosts
from digenrl.simulation.executor import SimulatedExecutor

POLICIES: tuple[TagPolicy, ...] = ("never", "greedy", "static", "bts", "bts_plus")
SEARCHES = ("bts", "bts_plus")
Instance = dict[str, Any]


class Run:
    """One instance under one policy: when its last update and its optimizer steps end, and how long the searches took."""

    def __init__(self, instance: Instance, tag: TagPolicy, tag_static: int = 0) -> None:
        costs = costs_of(instance)
        settings = SchedulerSettings(
            steps=instance.get("S", 1),
            micro_batches=instance["B"],
            generators=tuple(WorkerId(f"generator-{i}") for i in range(len(costs.generate))),
            trainer=WorkerId("trainer"),
            scoring="inline" if costs.score is None else "generator",
            tag=tag,
            tag_static=tag_static,
            max_stale_fraction=instance.get("stale", 0.0),
            costs=costs.step_costs(),
        )
        self.makespan = 0
        self.horizon = 0
        self.search_ms: list[float] = []
        self._drive(settings, costs)

    def _drive(self, settings: SchedulerSettings, costs: SimulationCosts) -> None:
        """The driver's loop with a clock around the scheduler."""
        scheduler, executor = Scheduler(settings), SimulatedExecutor(settings, costs)
        events: Sequence[Event] = (RunStarted(at_us=0),)
        while events:
            began = time.perf_counter()
            commands = scheduler.handle(*events)
            self.search_ms.append(1e3 * (time.perf_counter() - began))
            for event in events:
                if isinstance(event, Finished) and isinstance(event.command, Accumulate):
                    self.makespan = event.at_us
                elif isinstance(event, Finished) and isinstance(event.command, OptimizerStep):
                    self.horizon = event.at_us
            for command in commands:
                executor.submit(command)  # type: ignore[arg-type]
            events = () if scheduler.finished else executor.next_events(1.0)


def costs_of(instance: Instance) -> SimulationCosts:
    """The instance's ticks as microseconds."""
    generate, score = instance["g"], instance["s"]
    if score is not None and not isinstance(score, list):
        score = [score] * len(generate)
    switch_in, switch_out = (instance[f"c_{way}"] if f"c_{way}" in instance else instance[f"c{way}"] for way in ("in", "out"))
    return SimulationCosts(
        generate=tuple(ticks / TICKS for ticks in generate),
        score=None if score is None else tuple(ticks / TICKS for ticks in score),
        update=instance["t"] / TICKS,
        tag=instance["gT"] / TICKS,
        switch_in=switch_in / TICKS,
        switch_out=switch_out / TICKS,
        optimizer=instance.get("o", 0) / TICKS,
        sync=instance.get("w", 0) / TICKS,
    )


def best_static(instance: Instance, value: Callable[[Run], int], *, bounded: bool) -> Run:
    """The best fixed number of TAGs. ``bounded``: numbers whose lower bound is no better than what was found are left out."""
    costs = costs_of(instance).step_costs()
    position = start_of_step(costs, instance["B"])
    pool = Pool(position, costs)
    bounds = [max(pool.time(n), trainer_time(position, costs, n, pool.first_ready)) for n in range(instance["B"] + 1)]
    best: Run | None = None
    for n in sorted(range(len(bounds)), key=lambda n: bounds[n]):
        if bounded and best is not None and bounds[n] >= value(best):
            break
        run = Run(instance, "static", n)
        best = run if best is None or value(run) < value(best) else best
    assert best is not None
    return best


def run_of(instance: Instance, tag: TagPolicy, value: Callable[[Run], int], *, bounded: bool = True) -> Run:
    """The instance under the policy; search times are the best of three, where they are short enough to be noisy."""
    if tag == "static":
        return best_static(instance, value, bounded=bounded)
    run = Run(instance, tag)
    if tag in SEARCHES and max(run.search_ms) < 50:
        again = [Run(instance, tag).search_ms for _ in range(2)]
        run.search_ms = [min(times) for times in zip(run.search_ms, *again, strict=True)]
    return run


def single_steps(instances: Iterable[Instance], optimum: str) -> dict[str, dict[str, float]]:
    """Figures by policy over instances of one step."""
    report: dict[str, dict[str, float]] = {}
    instances = list(instances)
    for tag in POLICIES:
        # Exact search is not run where the oracle could not enumerate either: several replicas and many micro-batches.
        chosen = [x for x in instances if tag != "bts" or x["bts_optimum"] is not None]
        runs = [run_of(x, tag, lambda run: run.makespan) for x in chosen]
        if not runs:
            continue
        ratios = [run.makespan / x[optimum] for run, x in zip(runs, chosen, strict=True)]
        report[tag] = {
            "instances": len(runs),
            "mean_over_optimum": fmean(ratios),
            "max_over_optimum": max(ratios),
            "share_at_lower_bound": fmean(run.makespan <= x["lower_bound"] for run, x in zip(runs, chosen, strict=True)),
            "search_ms_max": max(max(run.search_ms) for run in runs) if tag in SEARCHES else 0.0,
        }
        if tag == "bts":
            same = [run.makespan == x["bts_optimum"] for run, x in zip(runs, chosen, strict=True)]
            report[tag]["matches_enumeration"] = fmean(same)
    return report


def several_steps(instances: Iterable[Instance]) -> dict[str, dict[str, float]]:
    """Figures by policy over instances of several steps with stale generation."""
    chosen = [x for x in instances if x["sync"] == "buffered"]
    report: dict[str, dict[str, float]] = {}
    for tag in POLICIES if chosen else ():
        ratios = [run_of(x, tag, lambda run: run.horizon, bounded=False).horizon / x["horizon_optimum"] for x in chosen]
        report[tag] = {"instances": len(ratios), "mean_over_optimum": fmean(ratios), "max_over_optimum": max(ratios)}
    return report


def measure(path: Path) -> dict[str, dict[str, dict[str, float]]]:
    """The whole report. Raises ConfigError for a file that is not in the oracle's format."""
    try:
        oracle = json.loads(read_text(path))
        return {
            "single_step": single_steps(oracle["small"], "trainer_unrestricted_optimum"),
            "large": single_steps(oracle["large"], "extended_value"),
            "tcss": several_steps(oracle["tcss"]),
        }
    except (ValueError, KeyError, TypeError) as error:
        what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise ConfigError(
            f"{path}: this is not a file in the oracle's format: {what}.", fix="See scheduling.md, section 6."
        ) from error


def table(report: dict[str, dict[str, dict[str, float]]]) -> Iterable[str]:
    for part, policies in report.items():
        yield f"{part:<14}{'instances':>10}{'mean/opt':>10}{'max/opt':>10}{'at bound':>10}{'search ms':>11}"
        for tag, row in policies.items():
            at_bound = f"{row['share_at_lower_bound']:.1%}" if "share_at_lower_bound" in row else "-"
            search = f"{row['search_ms_max']:.2f}" if row.get("search_ms_max") else "-"
            same = f"   {row['matches_enumeration']:.1%} equal to enumeration" if "matches_enumeration" in row else ""
            yield (
                f"  {tag:<12}{row['instances']:>10}{row['mean_over_optimum']:>10.4f}{row['max_over_optimum']:>10.4f}"
                f"{at_bound:>10}{search:>11}{same}"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    try:
        report = measure(arguments.file)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(report, indent=2) if arguments.json else "\n".join(table(report)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
