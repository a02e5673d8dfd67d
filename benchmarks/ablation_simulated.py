"""The paper's ablation in simulation: naive = 1, then GAP, TSP, TAG and TCSS one after the other, beside the paper's ranges.

On both calibrated presets, in two cells: timestep fraction 0.4 stands for the low end of each range and 0.6 for the high end
(scheduling.md, section 4). The bar: at most 7 % below the paper, or above it, in every cell. Below that the same
executions over a colocated pool, as it is (pair by pair) and with TSP, which is the fair comparison.

    python benchmarks/ablation_simulated.py [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any

from digenrl.simulation.modes import MODES, Mode, Options, schedule_of
from digenrl.simulation.presets import CELLS, Preset, presets
from digenrl.simulation.run import simulate

BAR = 0.07
LADDER: tuple[Mode, ...] = ("naive", "gap", "tsp", "tag", "tcss")
OVER: tuple[Mode, ...] = ("colocated", "colocated+tsp")


def step_times(preset: Preset, timestep_fraction: float) -> dict[Mode, float]:
    """Seconds of a steady step in every execution mode."""
    times: dict[Mode, float] = {}
    for mode in MODES:
        schedule = schedule_of(mode, preset.at(timestep_fraction), preset.layout, Options(steps=8))
        times[mode] = simulate(schedule.settings, schedule.costs).step_time_s
    return times


def cell(preset: Preset, timestep_fraction: float) -> dict[str, Any]:
    """One cell: speed-ups over naive and over colocated, the paper's numbers, and how far off the simulation is."""
    times = step_times(preset, timestep_fraction)
    end = "low" if timestep_fraction == CELLS[0] else "high"
    paper = {(each.over, each.mode): getattr(each, end) for each in preset.paper}
    rows: dict[str, Any] = {}
    for over in ("naive", *OVER):
        rows[over] = {}
        for mode in LADDER:
            gain, reported = times[over] / times[mode], paper.get((over, mode))
            error = None if reported is None else gain / reported - 1
            rows[over][mode] = {"simulated": gain, "paper": reported, "error": error}
    held = all(row["error"] is None or row["error"] >= -BAR for row in rows["naive"].values())
    return {"step_time_s": times, "speedup_over": rows, "within_bar": held}


def measure() -> dict[str, dict[str, Any]]:
    """All cells of the presets that are fitted to an ablation."""
    return {
        preset.name: {f"timestep_fraction={at}": cell(preset, at) for at in CELLS}
        for preset in presets().values()
        if preset.calibrated
    }


def table(report: dict[str, dict[str, Any]]) -> Iterator[str]:
    for name, cells in report.items():
        yield f"{name:<43}" + "".join(f"{mode:>19}" for mode in LADDER)
        for over in ("naive", *OVER):
            for at, found in cells.items():
                row = found["speedup_over"][over]
                yield f"  over {over:<15}{at:<21}" + "".join(f"{_entry(row[mode]):>19}" for mode in LADDER)
        held = all(found["within_bar"] for found in cells.values())
        yield f"  every cell over naive within {100 * BAR:.0f} % of the paper, or above it: {'yes' if held else 'NO'}"
    yield "Entries: simulated speed-up (the paper's, difference in per cent)."


def _entry(row: dict[str, float | None]) -> str:
    simulated, reported, error = row["simulated"], row["paper"], row["error"]
    beside = "" if reported is None or error is None else f" ({reported:.2f}, {100 * error:+.1f})"
    return f"{simulated:.2f}{beside}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    report = measure()
    print(json.dumps(report, indent=2) if arguments.json else "\n".join(table(report)))
    return 0 if all(found["within_bar"] for cells in report.values() for found in cells.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
