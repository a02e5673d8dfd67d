"""The report of a finished run adds up, foretells what the simulator foretells, and never fails."""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from digenrl.cli import report
from digenrl.cli.report import report_lines
from digenrl.driver import drive
from digenrl.errors import RunFailed
from digenrl.ids import WorkerId
from digenrl.scheduling.scheduler import Scheduler
from digenrl.scheduling.settings import SchedulerSettings
from digenrl.simulation.costs import SimulationCosts
from digenrl.simulation.executor import Disturbance, Incident, SimulatedExecutor
from digenrl.trace.record import TraceWriter, read_trace
from digenrl.trace.spans import spans
from digenrl.trace.utilization import utilization

G0, G1, TRAINER = (WorkerId(name) for name in ("g0", "g1", "trainer"))
TWO = SimulationCosts(
    generate=(1.0, 1.3),
    score=(0.05, 0.05),
    update=0.3,
    tag=1.0,
    switch_in=0.05,
    switch_out=0.05,
    optimizer=0.1,
    sync=0.1,
    evaluate=0.5,
    save=0.25,
)
IN_TURN = SimulationCosts(generate=(1.0,), score=(0.2,), update=0.3, optimizer=0.1, sync=0.1, evaluate=0.4)


def run(
    folder: Path,
    costs: SimulationCosts = TWO,
    disturbance: Disturbance | None = None,
    *,
    name: str = "trace.jsonl",
    **changes: Any,
) -> Path:
    """A run folder with the trace of a simulated run; the folder."""
    plain: dict[str, Any] = {"steps": 5, "micro_batches": 6, "generators": (G0, G1)[: len(costs.generate)], "trainer": TRAINER}
    settings = SchedulerSettings(**{**plain, **changes})
    with TraceWriter(folder / name, settings) as writer, contextlib.suppress(RunFailed):
        drive(Scheduler(settings), SimulatedExecutor(settings, costs, disturbance), writer, command_timeout_s=1)
    return folder


def log(folder: Path, *rates: float | None) -> None:
    rows = [{"kind": "train", "step": step, "samples_per_second": rate} for step, rate in enumerate(rates)]
    text = "".join(json.dumps(row) + "\n" for row in [{"kind": "eval", "step": 0, "reward": 0.5}, *rows])
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")


def phases(line: str) -> dict[str, float]:
    """``  name: generate 1.2, waiting 3`` as numbers."""
    parts = line.split(": ", 1)[1].split(", ")
    return {part.rsplit(" ", 1)[0]: float(part.rsplit(" ", 1)[1]) for part in parts}


def test_a_run_of_several_workers_is_told_in_a_few_lines(tmp_path: Path) -> None:
    folder = run(tmp_path, tag="bts_plus", max_stale_fraction=0.25, evaluate_at=(0, 5), save_at=(3, 5))
    log(folder, 10.0, 12.0, None, 14.0, 12.0)
    first, head, generators, trainer, bubbles, prediction = report_lines(folder)
    assert re.fullmatch(r"5 steps in \S+ s: \S+ s a step, 12 samples/s; then 0\.85 s of sync, save, evaluate", first)
    assert head.startswith("step time by phase")
    assert generators.startswith("  generators (2): generate ") and "stale generate" in generators
    assert trainer.startswith("  trainer: update ") and "evaluate 0.1" in trainer and "save 0.05" in trainer
    assert bubbles.startswith("bubble share: generators ") and " TAG" in bubbles
    assert prediction.startswith("predicted against actual makespan: the run ")


def test_the_phases_of_a_worker_add_up_to_the_step(tmp_path: Path) -> None:
    away = Disturbance(jitter=0.2, incidents=(Incident(at_s=2.5, worker=G1), Incident(at_s=5.0, worker=G1, joins=True)))
    first, _, *pools, _, _ = report_lines(run(tmp_path, TWO, away, tag="greedy", evaluate_at=(0, 5)))
    found = re.search(r"(\S+) s a step", first)
    assert found is not None
    for line in pools:
        # Each of at most ten parts is rounded to four digits, as the step is.
        assert sum(phases(line).values()) == pytest.approx(float(found[1]), rel=2e-3)
    assert phases(pools[0])["lost"] == pytest.approx(2.5 / 2 / 5, abs=1e-3)


def test_phases_are_those_computed_by_hand(tmp_path: Path) -> None:
    # g0: generates 0 to 2 s, idle to 2.4 s. Trainer: bubble 1 s, update 0.3, bubble 0.7, update 0.3, optimizer 0.1.
    costs = SimulationCosts(generate=(1.0,), update=0.3, optimizer=0.1)
    lines = list(report_lines(run(tmp_path, costs, steps=3, micro_batches=2, scoring="inline")))
    assert lines == [
        "3 steps in 7.2 s: 2.4 s a step",
        "step time by phase, in seconds, mean of the workers of a pool:",
        "  generators: generate 2, waiting 0.4",
        "  trainer: update 0.6, optimizer 0.1, waiting 1.7",
        "bubble share: generators 16.7 %, trainer 70.8 %; 0.0 % of the micro-batches stale",
        "predicted against actual makespan: the run 7.2 s against 7.2 s (1.00), a steady step 2.4 s against 2.4 s (1.00)",
    ]


def test_bubble_shares_are_those_of_the_trace_until_the_last_version(tmp_path: Path) -> None:
    folder = run(tmp_path, tag="greedy")
    use = utilization(spans(read_trace(folder / "trace.jsonl")))
    shares = ", ".join(f"{pool.name} {100 * pool.bubble_fraction:.1f} %" for pool in use.pools)
    assert f"bubble share: {shares}; " in "\n".join(report_lines(folder))


@pytest.mark.parametrize("tag", ["never", "greedy", "bts_plus"])
def test_a_run_that_goes_as_the_simulator_does_is_foretold_exactly(tmp_path: Path, tag: str) -> None:
    *_, line = report_lines(run(tmp_path, tag=tag, max_stale_fraction=0.25, evaluate_at=(0, 2, 5), save_at=(3,)))
    assert line.count("(1.00)") == 2


def test_what_the_means_do_not_know_shows_in_the_ratio(tmp_path: Path) -> None:
    away = Disturbance(incidents=(Incident(at_s=2.5, worker=G1),))  # for good, and the prediction has both all the time
    *_, line = report_lines(run(tmp_path, TWO, away))
    ratios = [float(ratio) for ratio in re.findall(r"\((\S+)\)", line)]
    assert len(ratios) == 2 and all(0.4 < ratio < 0.8 for ratio in ratios)


def test_one_worker_has_phases_and_nothing_to_foretell(tmp_path: Path) -> None:
    lines = list(report_lines(run(tmp_path, IN_TURN, trainer=G0, evaluate_at=(0, 5))))
    assert [line.split(":")[0] for line in lines[1:]] == [
        "step time by phase, in seconds, mean of the workers of a pool",
        "  worker",
    ]
    assert "waiting" not in lines[2]


def test_workers_in_turn_are_one_pool(tmp_path: Path) -> None:
    lines = list(report_lines(run(tmp_path, trainer=G0, update_after="step")))
    assert lines[2].startswith("  colocated (2): ") and lines[3].startswith("bubble share: colocated ")
    assert lines[-1].startswith("predicted against actual makespan: ")


@pytest.mark.parametrize("steps", [1, 2])
def test_a_short_run_has_no_steady_state(tmp_path: Path, steps: int) -> None:
    *_, line = report_lines(run(tmp_path, steps=steps))
    assert line.endswith("(1.00); too few steps for a steady state")


def test_of_a_run_that_stopped_early_the_completed_steps_are_told(tmp_path: Path) -> None:
    lost = Disturbance(incidents=(Incident(at_s=16.0, worker=TRAINER),))
    lines = list(report_lines(run(tmp_path, TWO, lost, max_stale_fraction=0.25)))
    assert re.match(r"[234] steps in ", lines[0])
    assert "(1.00)" in lines[-1]


def test_of_a_long_run_the_first_steps_are_foretold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "MOST_SIMULATED", 24)
    *_, line = report_lines(run(tmp_path, steps=9, tag="greedy", max_stale_fraction=0.25, evaluate_at=(0, 3, 9)))
    assert "makespan: the first 4 steps " in line and line.count("(1.00)") == 2


def test_a_run_that_went_on_is_told_from_where_it_went_on(tmp_path: Path) -> None:
    run(tmp_path, name="trace.jsonl", steps=9)
    log(tmp_path, *(1.0,) * 5, *(20.0,) * 3)
    folder = run(tmp_path, name="trace-from-000005.jsonl", steps=8, first_version=5, max_stale_fraction=0.25, tag="greedy")
    os.utime(folder / "trace.jsonl", (1, 1))
    lines = list(report_lines(folder))
    assert lines[0].startswith("3 steps in ") and ", 20 samples/s" in lines[0]
    assert " 0.0 % of the micro-batches stale" not in lines[-2]
    assert lines[-1].count("(1.00)") == 2


def test_the_newest_record_counts_and_not_the_highest_number(tmp_path: Path) -> None:
    run(tmp_path, name="trace-from-000005.jsonl", steps=8, first_version=5)
    folder = run(tmp_path, name="trace.jsonl", steps=2)  # begun anew, since no checkpoint was whole
    os.utime(folder / "trace-from-000005.jsonl", (1, 1))
    assert next(report_lines(folder)).startswith("2 steps in ")


def test_a_run_without_a_completed_step_says_so(tmp_path: Path) -> None:
    assert list(report_lines(run(tmp_path, steps=0))) == [f"report: no step was completed in {tmp_path / 'trace.jsonl'}."]


def test_a_folder_without_a_trace_says_so(tmp_path: Path) -> None:
    assert list(report_lines(tmp_path)) == [f"report: there is no trace in {tmp_path}."]
    assert list(report_lines(tmp_path / "not there")) == [f"report: there is no trace in {tmp_path / 'not there'}."]


def test_a_damaged_trace_says_where(tmp_path: Path) -> None:
    path = run(tmp_path) / "trace.jsonl"
    path.write_text(path.read_text(encoding="utf-8")[:-20], encoding="utf-8")
    (line,) = report_lines(tmp_path)
    assert line.startswith(f"report: {path}:") and "is not JSON" in line


def test_a_trace_that_takes_minutes_to_read_is_left_to_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run(tmp_path)
    monkeypatch.setattr(report, "MOST_BYTES", 100)
    (line,) = report_lines(folder)
    assert "digenrl trace" in line


def test_even_a_fault_of_the_report_is_only_a_line(tmp_path: Path) -> None:
    folder = run(tmp_path)
    (folder / "metrics.jsonl").write_text('{"kind": "train", "step": 0, "samples_per_second": "fast"}\n', encoding="utf-8")
    (line,) = report_lines(folder)
    assert line.startswith("report: TypeError: ")


def test_a_run_that_cannot_be_simulated_still_has_its_phases(tmp_path: Path) -> None:
    # Its only micro-batch is smaller than the others, of which there are none: no duration of a full one is known.
    lines = list(report_lines(run(tmp_path, micro_batches=1, partial_last=True)))
    assert lines[0].startswith("5 steps in ") and lines[3].startswith("  trainer: ")
    assert lines[-1].startswith("predicted against actual makespan: no prediction: the trace: ")


def test_the_report_is_short_whatever_happened(tmp_path: Path) -> None:
    costs = SimulationCosts(generate=(1.0, 1.3), score=(0.4,), update=0.3, tag=1.0, optimizer=0.1, sync=0.1, evaluate=0.5)
    scorers = (WorkerId("judge"),)
    lines = list(report_lines(run(tmp_path, costs, tag="greedy", scoring="pool", scorers=scorers, max_stale_fraction=0.5)))
    assert [line.split(":")[0] for line in lines[2:5]] == ["  generators (2)", "  scorers", "  trainer"]
    assert len(lines) <= 12
