"""``digenrl simulate``: a run on the virtual clock."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from digenrl.cli.notes import note
from digenrl.driver import Recorder
from digenrl.errors import ConfigError
from digenrl.simulation.modes import Mode, Options, schedule_of
from digenrl.simulation.run import PoolShares, SimulationResult, simulate
from digenrl.simulation.source import Loaded, load_source
from digenrl.trace.record import TraceWriter

_BASELINES: tuple[Mode, ...] = ("colocated", "colocated+tsp", "naive")


def run(source: str, overrides: Sequence[str], *, steps: int | None, as_json: bool, trace: str | None) -> None:
    """Simulate and print, or raise ConfigError."""
    loaded = load_source(source, overrides, steps=steps)
    for sentence in loaded.notes:
        note(sentence)
    with _recorder(trace, loaded) as recorder:
        result = simulate(loaded.settings, loaded.costs, loaded.disturbance, recorder, samples_per_step=loaded.samples_per_step)
    speedups = _speedups(loaded, result)
    if as_json:
        plain = {
            "label": loaded.label,
            "mode": loaded.mode,
            **result.to_plain(),
            "speedup_over": speedups,
            "paper": _paper(loaded),
        }
        print(json.dumps(plain, indent=2))
        return
    print(loaded.label)
    for line in _lines(loaded, result):
        print(line)
    for mode, gain in speedups.items():
        print(f"{gain:.2f}x as fast as {mode}{_beside(loaded, mode)}")
    for assumption in loaded.preset.assumptions if loaded.preset is not None else ():
        print(f"assumes: {assumption}")


@contextmanager
def _recorder(path: str | None, loaded: Loaded) -> Iterator[Recorder | None]:
    if path is None:
        yield None
        return
    try:
        writer = TraceWriter(Path(path), loaded.settings, source="simulation")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--trace: cannot write {path!r}: {getattr(error, 'strerror', None) or error}.",
            fix="Name a file in an existing folder.",
        ) from error
    with writer:
        yield writer


def _lines(loaded: Loaded, result: SimulationResult) -> Iterator[str]:
    settings = loaded.settings
    replicas, steps = len(settings.generators), len(result.step_times_s)
    pools = "one pool" if settings.one_pool else f"{replicas} generator replica{'s' if replicas > 1 else ''} and a trainer"
    mode = f", mode {loaded.mode}" if loaded.mode is not None else ""
    yield f"{steps} steps of {settings.micro_batches} micro-batches on {pools}{mode}: {result.makespan_s:.4g} s"
    rate = "" if result.samples_per_second is None else f", {result.samples_per_second:.3g} samples a second"
    yield f"step time   {result.step_time_s:.4g} s in the steady state{rate}"
    if settings.one_pool:
        yield f"pool        {_shares(result.trainer)}"
        return
    yield f"trainer     {_shares(result.trainer)}"
    yield f"generators  {_shares(result.generators)}"
    yield f"TAG         {_per_step(result.tags)}, policy {settings.tag}"
    yield f"stale       {_per_step(result.stale)}, at most {settings.stale_quota} allowed"


def _shares(pool: PoolShares) -> str:
    parts = ", ".join(f"{task} {100 * share:.1f}" for task, share in sorted(pool.by_task.items(), key=lambda item: -item[1]))
    return f"busy {100 * pool.busy:.1f} % ({parts}), bubble {100 * pool.bubble:.1f} %"


def _per_step(counts: tuple[int, ...]) -> str:
    first = ", ".join(map(str, counts[:8]))
    return f"{sum(counts) / len(counts):.2g} micro-batches a step ({first}{', ...' if len(counts) > 8 else ''})"


def _speedups(loaded: Loaded, result: SimulationResult) -> dict[str, float]:
    """Of a preset, over the paper's baselines on the same devices; of other sources, `digenrl plan` compares."""
    if loaded.preset is None:
        return {}
    gains: dict[str, float] = {}
    for mode in _BASELINES:
        base = schedule_of(mode, loaded.model, loaded.layout, Options(steps=3))
        gains[mode] = simulate(base.settings, base.costs).step_time_s / result.step_time_s
    return gains


def _paper(loaded: Loaded) -> list[dict[str, float | str]]:
    ranges = loaded.preset.paper if loaded.preset is not None else ()
    return [{"mode": each.mode, "over": each.over, "low": each.low, "high": each.high} for each in ranges]


def _beside(loaded: Loaded, over: str) -> str:
    """The paper's range for the same comparison."""
    for each in loaded.preset.paper if loaded.preset is not None else ():
        if each.mode == loaded.mode and each.over == over:
            return f" (the paper: {each.low:.2f} to {each.high:.2f}, timestep fractions 0.4 to 0.6)"
    return ""
