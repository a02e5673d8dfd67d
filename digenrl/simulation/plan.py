"""The plan for N devices: the ranked table of a sweep, and why its first row is the first, in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from digenrl.simulation.memory import memory_table
from digenrl.simulation.modes import Mode, Options, StageModel
from digenrl.simulation.source import Loaded
from digenrl.simulation.sweep import MORE_STEPS, Candidate, Row, Sweep, simulated, sweep

SHOWN, SHOWN_PER_SPLIT = 12, 2
_HEAD = f"{'':3}{'placement':<15}{'generators':<12}{'trainer':>8}{'groups':>8}{'tag':>10}{'stale':>7}"
_HEAD += f"{'step':>11}{'samples/s':>11}{'bubble':>8}{'colocated':>11}{'+TSP':>7}{'naive':>7}"
_BASELINES: tuple[Mode, ...] = ("colocated", "colocated+tsp", "naive")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A ranked table, best first."""

    label: str
    devices: int
    samples_per_step: int | None
    sweep: Sweep
    reason: str
    """Why the first row is the first."""
    memory: tuple[str, ...] = ()
    """What a recipe's devices hold, as a table; of a model that is known."""

    def lines(self) -> list[str]:
        """The table for a terminal: at most two rows of a pool split, then the baselines."""
        found = self.sweep
        shown: list[Row] = []
        per_split: dict[tuple[int, int, int] | str, int] = {}
        for row in found.rows:
            split = _split(row.candidate)
            per_split[split] = per_split.get(split, 0) + 1
            if per_split[split] <= SHOWN_PER_SPLIT and len(shown) < SHOWN:
                shown.append(row)
        rest = [found.baselines[mode] for mode in _BASELINES if mode in found.baselines]
        rest = [row for row in rest if all(row.candidate.mode != other.candidate.mode for other in shown)]
        return [
            self.label,
            f"{self.devices} device{'s' if self.devices > 1 else ''}: {found.candidates} ways that fit into memory, "
            f"{found.simulated} simulated; speed-ups over colocated, colocated with TSP, and naive",
            _HEAD,
            *(f"{rank:<3}{self._line(row)}" for rank, row in enumerate(shown, start=1)),
            *(f"{'':3}{self._line(row)}" for row in rest),
            f"first: {self.reason}",
            *self.memory,
        ]

    def to_plain(self) -> dict[str, Any]:
        """As JSON has it: every row of the sweep."""
        found = self.sweep
        return {
            "label": self.label,
            "devices": self.devices,
            "candidates": found.candidates,
            "simulated": found.simulated,
            "reason": self.reason,
            "rows": [self._plain(row) for row in found.rows],
            "baselines": {mode: self._plain(row) for mode, row in found.baselines.items()},
        }

    def speedup(self, row: Row, mode: Mode) -> float | None:
        """How many times faster a row is than a baseline; None where that one does not fit into memory."""
        baseline = self.sweep.baselines.get(mode)
        return None if baseline is None else baseline.step_time_s / row.step_time_s

    def _samples_per_second(self, row: Row) -> float | None:
        return None if self.samples_per_step is None else self.samples_per_step / row.step_time_s

    def _plain(self, row: Row) -> dict[str, Any]:
        candidate, layout = row.candidate, row.candidate.layout
        return {
            "placement": _placement(candidate),
            "replicas": 0 if candidate.colocated else layout.replicas,
            "ranks": layout.devices if candidate.colocated else layout.ranks,
            "trainer_ranks": layout.devices if candidate.colocated else layout.trainer_ranks,
            "groups_per_micro_batch": layout.groups_per_micro_batch,
            "micro_batches": row.micro_batches,
            "tag": candidate.tag,
            "max_stale_fraction": candidate.max_stale_fraction,
            "step_time_s": row.step_time_s,
            "bound_s": row.bound_s,
            "samples_per_second": self._samples_per_second(row),
            "bubble": row.bubble,
            "tags_per_step": row.tags,
            "speedup_over_colocated": self.speedup(row, "colocated"),
            "speedup_over_colocated_tsp": self.speedup(row, "colocated+tsp"),
            "speedup_over_naive": self.speedup(row, "naive"),
        }

    def _line(self, row: Row) -> str:
        plain = self._plain(row)
        colocated = row.candidate.colocated
        generators = "all" if colocated else f"{plain['replicas']} x {plain['ranks']}"
        trainer = "all" if colocated else str(plain["trainer_ranks"])
        policy, stale = ("-", "-") if row.candidate.mode else (plain["tag"], f"{plain['max_stale_fraction']:.2f}")
        groups = "all" if row.micro_batches == 1 or colocated else str(plain["groups_per_micro_batch"])
        rate = "-" if plain["samples_per_second"] is None else f"{plain['samples_per_second']:.3g}"
        gains = "".join(
            f"{'-' if gain is None else f'{gain:.2f}x':>{width}}"
            for mode, width in zip(_BASELINES, (11, 7, 7), strict=True)
            for gain in [self.speedup(row, mode)]
        )
        return (
            f"{plain['placement']:<15}{generators:<12}{trainer:>8}{groups:>8}{policy:>10}{stale:>7}"
            f"{_seconds(row.step_time_s):>11}{rate:>11}{_percent(row.bubble):>8}{gains}"
        )


def plan(source: Loaded, devices: int | None = None) -> Plan:
    """The best ways to use so many devices (the source's own number when None). Raises ConfigError where nothing fits."""
    devices = source.layout.devices if devices is None else devices
    settings = source.settings
    options = Options(
        max_stale_fraction=settings.max_stale_fraction or Options().max_stale_fraction,
        update_order=settings.update_order,
        update_after=settings.update_after,
    )
    found = sweep(source.model, source.layout, devices, options)
    return Plan(
        label=source.label,
        devices=devices,
        samples_per_step=source.samples_per_step,
        sweep=found,
        reason=_reason(found, source.model, options),
        memory=tuple(memory_table(source.recipe)) if source.recipe is not None else (),
    )


def _reason(found: Sweep, model: StageModel, options: Options) -> str:
    best = found.rows[0]
    pools = [row for row in found.rows if row.candidate.colocated]
    splits = [row for row in found.rows if not row.candidate.colocated]
    if best.candidate.colocated:
        return _why_colocated(best, splits[0] if splits else None)
    against = f", {_gain(pools[0], best)} faster than {_placement(pools[0].candidate)}" if pools else ""
    parts = [f"two pools ({_describe(best.candidate)}) take {_seconds(best.step_time_s)}{against}"]
    if not pools:
        parts.append("one pool does not fit into the devices' memory")
    elif model.mixed:
        parts.append("a colocated pool goes at the pace of the slower devices")
    parts.extend(_contributions(best, model, options))
    idle = f"both pools idle {_percent(best.bubble)} of the time"
    if best.bound_s:
        idle += f", {_percent(best.step_time_s / best.bound_s - 1)} above what any schedule of this split can reach"
    return "; ".join([*parts, idle]) + "."


def _why_colocated(best: Row, split: Row | None) -> str:
    name = _placement(best.candidate)
    if split is None:
        return f"{name} is the only way that fits."
    overhead = split.result.trainer.by_task
    paid = sum(overhead.get(task, 0.0) for task in ("switch", "sync", "optimizer"))
    return (
        f"{name} wins: {_seconds(best.step_time_s)}, and the best of two pools ({_describe(split.candidate)}) takes "
        f"{_seconds(split.step_time_s)}, {_gain(best, split, of_second=True)} more; one pool is never idle where work is shared "
        f"out evenly, while with two the trainer spends {_percent(paid)} of its time on switching, sync and the optimizer step, "
        f"and all devices idle {_percent(split.bubble)}. Two pools pay where generation does not scale to all devices, "
        "devices differ, or memory does not hold both roles."
    )


def _contributions(best: Row, model: StageModel, options: Options) -> list[str]:
    """What the winner's own settings are worth: it is simulated without each."""
    layout, stale = best.candidate.layout, best.candidate.max_stale_fraction
    more, parts = Options(steps=MORE_STEPS, update_order=options.update_order, update_after=options.update_after), []
    if best.candidate.tag != "never":
        without = simulated(Candidate(layout=layout, max_stale_fraction=stale), model, more)
        parts.append(
            f"the trainer generates {best.tags:.1f} of {best.micro_batches} micro-batches a step (TAG: {_gain(without, best)})"
        )
    elif stale:
        parts.append("the split matches the work of the two pools, so the trainer need not generate")
    if stale:
        without = simulated(Candidate(layout=layout, tag=best.candidate.tag), model, more)
        parts.append(f"generators work ahead with weights one version old (TCSS: {_gain(without, best)})")
    return parts


def _describe(candidate: Candidate) -> str:
    layout = candidate.layout
    groups = f"{layout.groups_per_micro_batch} group{'s' if layout.groups_per_micro_batch > 1 else ''} a micro-batch"
    generators = f"{layout.replicas} x {layout.ranks} generators, {layout.trainer_ranks} trainer ranks, {groups}"
    return f"{generators}, tag {candidate.tag}, stale {candidate.max_stale_fraction:g}"


def _placement(candidate: Candidate) -> str:
    return candidate.mode or "two pools"


def _split(candidate: Candidate) -> tuple[int, int, int] | str:
    layout = candidate.layout
    return candidate.mode or (layout.replicas, layout.ranks, layout.trainer_ranks)


def _gain(slow: Row, fast: Row, *, of_second: bool = False) -> str:
    ratio = fast.step_time_s / slow.step_time_s if of_second else slow.step_time_s / fast.step_time_s
    return _percent(ratio - 1)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _seconds(value: float) -> str:
    return f"{value:.4g} s" if value < 1000 else f"{value:.0f} s"
