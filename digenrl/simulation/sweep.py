"""All ways to use N devices: bounds for every one of them, simulations of the promising ones.

Swept: placement (colocated, with and without TSP; two pools), pool split, ranks per replica, groups per micro-batch, TAG
policy, staleness. For two pools the steady-state bound C* says what no schedule can beat:

    C* = min over n of max(((B - n) + B min(s / g)) / R + w,  n g_T + B t + [n > 0] (c_in + c_out) + o + w),   R = sum 1 / g

with n the micro-batches that the trainer generates in a step (0 without TAG). Without stale work every step stands alone and
the bound of one step (scheduling/bounds.py) holds too. Candidates are simulated in order of an estimate between the two,
those whose bound cannot reach the table are left out, and a budget of simulated micro-batches ends the sweep, so that the
same input always gives the same table. The best ones are simulated once more over more steps.
Step times within 0.5 % count as equal, and then the simpler setting stands first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from digenrl.errors import ConfigError
from digenrl.scheduling.bounds import Pool, lower_bound, trainer_time
from digenrl.scheduling.settings import TagPolicy
from digenrl.scheduling.step_model import start_of_step
from digenrl.simulation.costs import TICKS, SimulationCosts
from digenrl.simulation.modes import Layout, Mode, Options, Schedule, StageModel, pipelined, schedule_of
from digenrl.simulation.run import SimulationResult, simulate

ROWS = 24
"""Candidates that are simulated over more steps."""
TIE = 0.005
FIRST_STEPS, MORE_STEPS = 5, 14
BUDGET = 12_000
"""Simulated micro-batches of the first round, those of many replicas counting more: what bounds the time, without a clock."""
POLICIES: tuple[TagPolicy, ...] = ("never", "greedy", "bts_plus")
_MOST_SPLITS, _MOST_REPLICAS, _MOST_MICRO_BATCHES, _MOST_DEVICES = 32, 64, 64, 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to use the devices."""

    layout: Layout
    tag: TagPolicy = "never"
    max_stale_fraction: float = 0.0
    mode: Mode | None = None
    """A baseline or a colocated pool; None for two pools with TSP and the policy above."""

    @property
    def colocated(self) -> bool:
        """Whether one pool does everything in turn."""
        return self.mode in ("colocated", "colocated+tsp")

    @property
    def simplicity(self) -> tuple[float, ...]:
        """Smaller is simpler: one pool, no stale work, no TAG, few replicas, one group a micro-batch, an even split."""
        layout = self.layout
        uneven = abs(layout.trainer_ranks - layout.replicas * layout.ranks)
        policy = POLICIES.index(self.tag)
        return (not self.colocated, self.max_stale_fraction, policy, layout.replicas, layout.groups_per_micro_batch, uneven)

    def schedule(self, model: StageModel, options: Options) -> Schedule:
        """Its settings and costs."""
        if self.mode is not None:
            return schedule_of(self.mode, model, self.layout, options)
        stale = self.max_stale_fraction
        return pipelined(model, self.layout, options, tsp=True, tag=self.tag, max_stale_fraction=stale)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A candidate and what it was simulated to do."""

    candidate: Candidate
    result: SimulationResult
    bound_s: float | None
    """C*; None for baselines and colocated pools."""
    tags: float
    """Micro-batches that the trainer generates in a step, on average."""
    micro_batches: int

    @property
    def step_time_s(self) -> float:
        """Of the steady state. Not below C*, as the mean of a few steps may be while stale work is still piling up or used up."""
        return max(self.result.step_time_s, self.bound_s or 0.0)

    @property
    def bubble(self) -> float:
        """Idle share of all devices."""
        layout, result = self.candidate.layout, self.result
        if self.candidate.colocated:
            return result.trainer.bubble
        generators = layout.replicas * layout.ranks * result.generators.bubble
        return (generators + layout.trainer_ranks * result.trainer.bubble) / layout.devices


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What came of it."""

    rows: tuple[Row, ...]
    """Best first."""
    baselines: dict[Mode, Row]
    candidates: int
    """Ways that fit into memory."""
    simulated: int


class _Way(NamedTuple):
    estimate: float
    simplicity: tuple[float, ...]
    bound: float
    weight: int
    candidate: Candidate


def sweep(model: StageModel, layout: Layout, devices: int, options: Options) -> Sweep:
    """Simulate what is worth it on so many devices. Raises ConfigError where nothing fits."""
    if not 1 <= devices <= _MOST_DEVICES:
        raise ConfigError(f"--devices ({devices}) must be from 1 to {_MOST_DEVICES}.", fix="Give the number of GPUs.")
    first, more = replace(options, steps=FIRST_STEPS), replace(options, steps=MORE_STEPS)
    baselines = {mode: simulated(candidate, model, first) for mode, candidate in _baselines(model, layout, devices)}
    layouts = list(_layouts(model, layout, devices))
    ways = sorted((way for each in layouts for way in _ways(model, each, first)), key=lambda way: way[:2])
    pools = [row for row in baselines.values() if row.candidate.colocated]
    found = _promising(ways, model, first, pools)
    if not pools and not found:
        raise ConfigError(
            f"Nothing fits on {devices} devices: the memory of one does not hold its part of the model.",
            why=f"One colocated pool and {len(layouts)} layouts with two pools were looked at.",
            fix="Use more devices, or train adapters (LoRA) instead of all weights.",
        )
    best = sorted(found, key=lambda row: row.step_time_s)[:ROWS]
    return Sweep(
        rows=_ranked([*pools, *(simulated(row.candidate, model, more, row.bound_s) for row in best)]),
        baselines=baselines,
        candidates=len(ways) + len(pools),
        simulated=len(found) + len(pools),
    )


def simulated(candidate: Candidate, model: StageModel, options: Options, bound: float | None = None) -> Row:
    """One candidate on the virtual clock."""
    schedule = candidate.schedule(model, options)
    result = simulate(schedule.settings, schedule.costs)
    middle = result.tags[1:-1] or result.tags
    tags = sum(middle) / len(middle)
    return Row(candidate=candidate, result=result, bound_s=bound, tags=tags, micro_batches=schedule.settings.micro_batches)


def steady_bound(costs: SimulationCosts, micro_batches: int, *, tag: bool) -> float:
    """C* of the module's docstring, seconds."""
    rate = sum(1 / seconds for seconds in costs.generate)
    size = micro_batches - 1 + costs.last_share
    shares = [s / g for s, g in zip(costs.score, costs.generate, strict=True)] if costs.score is not None else [0.0]
    pool = size * (1 + min(shares)) / rate + costs.sync
    trainer = size * costs.update + costs.optimizer + costs.sync
    best = max(pool, trainer)
    if not tag or costs.tag is None:
        return best
    trainer += costs.switch_in + costs.switch_out
    tags = min(size, max(0.0, (pool - trainer) / (costs.tag + 1 / rate)))
    return min(best, max(pool - tags / rate, trainer + tags * costs.tag))


def _promising(ways: list[_Way], model: StageModel, options: Options, rows: list[Row]) -> list[Row]:
    found: list[Row] = []
    times = sorted(row.step_time_s for row in rows)
    spent = 0
    for way in ways:
        if len(times) > ROWS and way.bound > times[ROWS]:
            continue
        if spent and spent + way.weight > BUDGET:
            continue
        spent += way.weight
        found.append(simulated(way.candidate, model, options, way.bound))
        times = sorted([*times, found[-1].step_time_s])
    return found


def _ranked(rows: list[Row]) -> tuple[Row, ...]:
    """By step time; among those within a tie of the fastest that is left, the simplest one comes first."""
    left, ranked = sorted(rows, key=lambda row: row.step_time_s), []
    while left:
        tied = [row for row in left if row.step_time_s <= left[0].step_time_s * (1 + TIE)]
        best = min(tied, key=lambda row: (row.candidate.simplicity, row.step_time_s))
        ranked.append(best)
        left.remove(best)
    return tuple(ranked)


def _baselines(model: StageModel, layout: Layout, devices: int) -> Iterator[tuple[Mode, Candidate]]:
    """Colocated pools where there is memory for them, and the naive split in half."""
    half = devices // 2
    groups = min(layout.groups_per_micro_batch, model.groups)
    even = Layout(replicas=1, ranks=devices - half, trainer_ranks=half, groups_per_micro_batch=groups)
    if model.fits("all", devices):
        yield "colocated", Candidate(layout=even, mode="colocated")
        yield "colocated+tsp", Candidate(layout=even, mode="colocated+tsp")
    if half:
        yield "naive", Candidate(layout=even, mode="naive")


def _layouts(model: StageModel, layout: Layout, devices: int) -> Iterator[Layout]:
    """All ways to share the devices out. Two kinds of device are split by kind, in the source's own proportion."""
    step = math.ceil(devices / _MOST_SPLITS)
    splits: Iterable[int] = range(step, devices, step)
    if model.mixed and devices > 1:
        splits = [min(max(1, round(devices * layout.trainer_ranks / layout.devices)), devices - 1)]
    sizes = {*_divisors(model.groups, model.groups), min(layout.groups_per_micro_batch, model.groups)}
    sizes = {groups for groups in sizes if math.ceil(model.groups / groups) <= _MOST_MICRO_BATCHES}
    for trainer in splits:
        generators = devices - trainer
        for replicas in _divisors(generators, _MOST_REPLICAS):
            for groups in sorted(sizes):
                ranks = generators // replicas
                yield Layout(replicas=replicas, ranks=ranks, trainer_ranks=trainer, groups_per_micro_batch=groups)


def _ways(model: StageModel, layout: Layout, options: Options) -> Iterator[_Way]:
    """The policies of a layout, those that fit into memory, with bounds and an estimate of where they should come out:
    C* with stale work for every replica at the end of a step, the bound of a lone step without any, and in between.
    """
    schedule = Candidate(layout=layout).schedule(model, options)
    costs, size = schedule.costs, schedule.settings.micro_batches
    if not model.fits("generators", layout.ranks):
        return
    weight = options.steps * size * (1 + layout.replicas // 8)
    quota = int(options.max_stale_fraction * size + 1e-9)
    for tag in (False, True):
        if not model.fits("trainer", layout.trainer_ranks, tag=tag):
            continue
        steady = steady_bound(costs, size, tag=tag)
        alone = max(steady, _bound_of_step(costs, size, tag=tag) + costs.optimizer + costs.sync)
        between = steady + (alone - steady) * max(0.0, 1 - quota / layout.replicas)
        for policy in POLICIES[1:] if tag else POLICIES[:1]:
            way = Candidate(layout=layout, tag=policy)
            yield _Way(alone, way.simplicity, alone, weight, way)
            if quota:
                way = replace(way, max_stale_fraction=options.max_stale_fraction)
                yield _Way(between, way.simplicity, steady, weight, way)


def _bound_of_step(costs: SimulationCosts, micro_batches: int, *, tag: bool) -> float:
    known, full = costs.step_costs(), micro_batches if costs.last_share == 1 else micro_batches - 1
    position = start_of_step(known, max(1, full))
    if tag:
        return lower_bound(position, known) / TICKS
    pool = Pool(position, known)
    return max(pool.time(0), trainer_time(position, known, 0, pool.first_ready)) / TICKS


def _divisors(number: int, most: int) -> list[int]:
    return [d for d in range(1, min(number, most) + 1) if number % d == 0]
