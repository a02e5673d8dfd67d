"""How fast the control plane is: searches of TAG, scheduler and simulated executor, on one core.

    python benchmarks/scheduler_speed.py [--json]

Times are the best of several runs of the same deterministic work, since everything else on the machine only adds to them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from digenrl.driver import drive
from digenrl.ids import WorkerId
from digenrl.scheduling.bts import ExactSearch
from digenrl.scheduling.commands import Command
from digenrl.scheduling.events import Event
from digenrl.scheduling.planner import Planner
from digenrl.scheduling.scheduler import Scheduler
from digenrl.scheduling.settings import SchedulerSettings, TagPolicy
from digenrl.scheduling.step_model import Model, Position, StepCosts, start_of_step
from digenrl.simulation.costs import SimulationCosts
from digenrl.simulation.executor import SimulatedExecutor

MICRO_BATCHES = 128
TICKS = 10_007
"""Generation of one micro-batch; a prime, so that times do not meet by accident."""


class Counter:
    """Counts events instead of recording them."""

    def __init__(self) -> None:
        self.events = 0

    def record(self, events: Sequence[Event], commands: Sequence[Command]) -> None:
        del commands
        self.events += len(events)


def search_ms(replicas: int, update_share: float, *, scored: bool, exact: bool) -> float:
    """One search at the first bubble of a step of 128 micro-batches."""
    generate = tuple(TICKS * replicas + 1000 * index for index in range(replicas))
    costs = StepCosts(
        generate=generate,
        score=tuple(ticks // 20 for ticks in generate) if scored else None,
        update=int(update_share * TICKS),
        tag=TICKS * replicas,
        switch_in=TICKS // 10,
        switch_out=TICKS // 10,
    )
    position = start_of_step(costs, MICRO_BATCHES)
    Model(costs).settle(position)

    def search(at: Position) -> object:
        return ExactSearch(costs).choose(at) if exact else Planner(costs, MICRO_BATCHES).plan(at)

    return 1e3 * _best(lambda: search(position), 5)


def run_steps(replicas: int, micro_batches: int, steps: int, tag: TagPolicy, *, measured: bool = False) -> dict[str, float]:
    """Seconds and events of a simulated run. ``measured``: durations are estimated as the run goes, as in a real one."""
    costs = SimulationCosts(
        generate=(1.0,) * replicas,
        score=(0.05,) * replicas,
        update=0.3 / replicas,
        tag=1.0,
        switch_in=0.05,
        switch_out=0.05,
        optimizer=0.01,
        sync=0.01,
    )
    settings = SchedulerSettings(
        steps=steps,
        micro_batches=micro_batches,
        generators=tuple(WorkerId(f"generator-{index}") for index in range(replicas)),
        trainer=WorkerId("trainer"),
        tag=tag,
        replan="step" if replicas > 64 else "bubble",
        costs=None if measured else costs.step_costs(),
    )
    counter = Counter()
    began = time.perf_counter()
    drive(Scheduler(settings), SimulatedExecutor(settings, costs), counter, command_timeout_s=1)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "events": counter.events, "events_per_second": counter.events / seconds}


def measure() -> dict[str, Any]:
    """All figures."""
    return {
        "search_ms": {
            "bts_plus, 1 replica": search_ms(1, 0.1, scored=True, exact=False),
            "bts_plus, 4 replicas": search_ms(4, 0.1, scored=True, exact=False),
            "bts, 1 replica, inline scoring": search_ms(1, 0.1, scored=False, exact=True),
            "bts, 1 replica, scored": search_ms(1, 0.1, scored=True, exact=True),
        },
        "runs": {
            "4 replicas, 64 micro-batches, greedy": run_steps(4, 64, 100, "greedy"),
            "4 replicas, 64 micro-batches, bts_plus": run_steps(4, 64, 40, "bts_plus"),
            "4 replicas, 64 micro-batches, bts_plus, measured durations": run_steps(4, 64, 40, "bts_plus", measured=True),
            "1024 replicas, 4096 micro-batches, greedy": run_steps(1024, 4096, 1, "greedy"),
            "1024 replicas, 4096 micro-batches, bts_plus planned once a step": run_steps(1024, 4096, 1, "bts_plus"),
        },
    }


def _best(action: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    found = measure()
    if as_json:
        print(json.dumps(found, indent=2))
        return
    print(f"one search at B = {MICRO_BATCHES}, t/g = 0.1")
    for name, value in found["search_ms"].items():
        print(f"  {name:32} {value:8.2f} ms")
    print("simulated runs")
    for name, run in found["runs"].items():
        print(f"  {name:62} {run['seconds']:6.2f} s  {run['events_per_second']:9,.0f} events/s")


if __name__ == "__main__":
    main()
