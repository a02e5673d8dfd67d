"""What a finished run did with its time, and how well the simulator would have foretold it.

A step lasts from one version to the next; what comes after the last version (its evaluation, its checkpoint) is told by
itself. The prediction is a simulation under the run's own scheduler settings, in which every command takes the mean of what
it took in the run. Invariant: whatever is wrong with the record becomes a line, never an error: the run has succeeded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from digenrl.errors import DigenError
from digenrl.metrics.log import read_metrics
from digenrl.scheduling.commands import OptimizerStep
from digenrl.scheduling.events import Event, Finished
from digenrl.scheduling.settings import SchedulerSettings
from digenrl.simulation.measured import costs_of_trace
from digenrl.simulation.run import simulate
from digenrl.trace.record import Trace, read_trace
from digenrl.trace.spans import spans
from digenrl.trace.utilization import Load, Utilization, utilization

MOST_BYTES = 100_000_000
"""Of a trace that is read: about 20 s."""
MOST_SIMULATED = 10_000
"""Micro-batches of a prediction: a few seconds. Of a longer run, the first steps are foretold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """The completed steps of one process."""

    trace: Trace
    """Until the last version."""
    use: Utilization
    after_s: float
    """From the last version to the end."""
    after: tuple[str, ...]
    """Kinds of work done then."""

    @property
    def seconds(self) -> tuple[float, ...]:
        """Of each step."""
        return tuple(step.seconds for step in self.use.steps)


def report_lines(run_folder: Path) -> Iterator[str]:
    """The report of the newest process that wrote into a run's folder; one or a few lines where there is too little data."""
    try:
        run = _read(run_folder)
        if isinstance(run, str):
            yield f"report: {run}"
            return
        if run.trace.source == "emulation":
            yield "emulated: workers slept for a preset's durations; no picture was made, nothing was learned"
        yield from _phases(run, _samples_per_second(run_folder, run))
        if len(run.trace.settings.workers) > 1:
            yield _prediction(run)
    except (DigenError, OSError) as error:
        yield f"report: {error.what if isinstance(error, DigenError) else error}"
    except Exception as error:  # a fault of the report itself must not turn a run that succeeded into one that failed
        yield f"report: {type(error).__name__}: {error}"


def _read(run_folder: Path) -> _Run | str:
    """The newest record, cut after its last version; or why there is nothing to report."""
    found = [*run_folder.glob("trace.jsonl"), *run_folder.glob("trace-from-*.jsonl")]
    if not found:
        return f"there is no trace in {run_folder}."
    path = max(found, key=lambda path: (path.stat().st_mtime_ns, path.name))
    if (size := path.stat().st_size) > MOST_BYTES:
        return f"{path} has {size / 1e6:.0f} MB, which takes a while to read; see `digenrl trace {path} --utilization`."
    whole = read_trace(path)
    ends = [number for number, entry in enumerate(whole.entries) if any(_ends_step(e, whole.settings) for e in entry.events)]
    if not ends:
        return f"no step was completed in {path}."
    trace = replace(whole, entries=whole.entries[: ends[-1] + 1])
    timeline, complete = spans(trace), spans(whole)
    after = {str(span.kind): None for span in complete.spans if span.start_us >= timeline.end_us and span.duration_us}
    return _Run(
        trace=trace,
        use=utilization(timeline),
        after_s=(complete.end_us - timeline.end_us) / 1e6,
        after=tuple(after),
    )


def _ends_step(event: Event, settings: SchedulerSettings) -> bool:
    command = event.command if isinstance(event, Finished) else None
    return isinstance(command, OptimizerStep) and command.update + 1 == settings.updates_per_rollout


def _samples_per_second(run_folder: Path, run: _Run) -> float | None:
    """Mean over the run's steps, as its metrics have it."""
    path, first = run_folder / "metrics.jsonl", run.trace.settings.first_version
    rows: list[dict[str, Any]] = read_metrics(path) if path.is_file() else []
    steps = [row for row in rows if row.get("kind") == "train" and row.get("step", -1) >= first]
    rates = [row["samples_per_second"] for row in steps if row.get("samples_per_second") is not None]
    return fmean(rates) if rates else None


def _phases(run: _Run, rate: float | None) -> Iterator[str]:
    steps, settings = len(run.seconds), run.trace.settings
    total = sum(run.seconds)
    speed = "" if rate is None else f", {rate:.3g} samples/s"
    after = f"; then {_seconds(run.after_s)} s of {', '.join(run.after)}" if run.after else ""
    yield f"{_count(steps, 'step')} in {_seconds(total)} s: {_seconds(total / steps)} s a step{speed}{after}"
    pools = [pool for pool in run.use.pools if pool.name != "trainer" or not settings.one_pool]
    yield "step time by phase, in seconds, mean of the workers of a pool:"
    for pool in pools:
        yield f"  {_name(pool, settings)}: {_shares(pool, steps)}"
    if len(settings.workers) > 1:
        bubbles = ", ".join(f"{pool.name} {100 * pool.bubble_fraction:.1f} %" for pool in pools)
        yield f"bubble share: {bubbles}; {_ages(run)}"


def _name(pool: Load, settings: SchedulerSettings) -> str:
    if len(settings.workers) == 1:
        return "worker"
    return f"{pool.name} ({len(pool.workers)})" if len(pool.workers) > 1 else pool.name


def _shares(pool: Load, steps: int) -> str:
    """What one worker of the pool does in one step, longest first; the parts add up to the step."""
    each = len(pool.workers) * steps * 1e6
    parts = sorted(pool.busy_us, key=lambda part: -part[1])
    rest = [("waiting", pool.waiting_us), ("lost", pool.lost_us)]
    return ", ".join(f"{name} {_seconds(us / each)}" for name, us in [*parts, *rest] if us)


def _ages(run: _Run) -> str:
    """What of the micro-batches was one version old, and what the trainer generated."""
    found = f"{100 * run.use.stale_fraction:.1f} % of the micro-batches stale"
    tags = sum(step.tags for step in run.use.steps)
    return found if run.trace.settings.tag == "never" else f"{found}, {_count(tags, 'TAG')}"


def _prediction(run: _Run) -> str:
    """Simulated against measured time, of the whole run and of a step in the steady state."""
    settings = run.trace.settings
    steps = min(len(run.seconds), max(3, MOST_SIMULATED // settings.micro_batches))
    try:
        result = simulate(_first(settings, steps), costs_of_trace(run.trace, "the trace"))
    except DigenError as error:
        return f"predicted against actual makespan: no prediction: {error.what}"
    predicted, actual = result.step_times_s[:steps], run.seconds[:steps]
    what = "the run" if steps == len(run.seconds) else f"the first {steps} steps"
    line = f"predicted against actual makespan: {what} {_compare(sum(predicted), sum(actual))}"
    if steps < 3:
        return f"{line}; too few steps for a steady state"
    return f"{line}, a steady step {_compare(fmean(predicted[1:-1]), fmean(actual[1:-1]))}"


def _first(settings: SchedulerSettings, steps: int) -> SchedulerSettings:
    """The settings of a run of so many steps, and one more where it goes on: the last step has none to work ahead for."""
    end = min(settings.steps, settings.first_version + steps + 1)
    evaluate_at = tuple(version for version in settings.evaluate_at if version <= end)
    save_at = tuple(version for version in settings.save_at if version <= end)
    return replace(settings, steps=end, evaluate_at=evaluate_at, save_at=save_at)


def _compare(predicted: float, actual: float) -> str:
    ratio = f" ({predicted / actual:.2f})" if actual else ""
    return f"{_seconds(predicted)} s against {_seconds(actual)} s{ratio}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.4g}" if seconds < 1000 else f"{seconds:.0f}"


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
