"""Draw the timelines of docs/concepts with the product itself: simulate, then the Gantt chart of the trace.

python tools/docs/draw_timelines.py [FOLDER]        (docs/images by default)
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from digenrl.driver import drive
from digenrl.ids import WorkerId
from digenrl.scheduling.scheduler import Scheduler
from digenrl.scheduling.settings import SchedulerSettings
from digenrl.simulation.costs import SimulationCosts
from digenrl.simulation.executor import Disturbance, Incident, SimulatedExecutor
from digenrl.trace.gantt import svg_gantt
from digenrl.trace.record import TraceWriter, read_trace
from digenrl.trace.spans import spans

COSTS: dict[str, Any] = {
    "generate": (10.0, 10.0),
    "score": (0.5, 0.5),
    "update": 4.0,
    "tag": 10.0,
    "switch_in": 0.6,
    "switch_out": 0.6,
    "optimizer": 1.5,
    "sync": 1.0,
}
SETTINGS: dict[str, Any] = {
    "steps": 2,
    "micro_batches": 12,
    "generators": (WorkerId("generator-0"), WorkerId("generator-1")),
    "trainer": WorkerId("trainer"),
}


@dataclass(frozen=True)
class Picture:
    """One timeline: what differs from COSTS and SETTINGS."""

    costs: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    disturbance: Disturbance | None = None


# Naive: both replicas share one unit of the whole step, which takes six times as long as one micro-batch takes one replica.
NAIVE = Picture(
    costs={"generate": (60.0,), "score": (3.0,), "update": 48.0},
    settings={"micro_batches": 1, "generators": (WorkerId("generators"),)},
)
HELPED = {"tag": "bts_plus"}
PICTURES = {
    "gap_naive": NAIVE,
    "gap": Picture(),
    "tsp_without": Picture(costs={"update": 8.0}),
    "tsp": Picture(costs={"update": 3.0}),
    "tag_never": Picture(costs={"update": 2.5}),
    "tag_bts_plus": Picture(costs={"update": 2.5}, settings=HELPED),
    "tcss_off": Picture(costs={"update": 2.5}, settings={**HELPED, "steps": 3}),
    "tcss": Picture(costs={"update": 2.5}, settings={**HELPED, "steps": 3, "max_stale_fraction": 0.25}),
    "planning_failure": Picture(
        settings={**HELPED, "steps": 3, "max_stale_fraction": 0.25},
        disturbance=Disturbance(
            jitter=0.08,
            incidents=(
                Incident(at_s=23.0, worker=WorkerId("generator-1")),
                Incident(at_s=55.0, worker=WorkerId("generator-1"), joins=True),
            ),
        ),
    ),
}


def draw(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        for name, picture in PICTURES.items():
            costs = SimulationCosts(**{**COSTS, **picture.costs})
            known = None if picture.disturbance else costs.step_costs()
            settings = SchedulerSettings(**{**SETTINGS, "costs": known, **picture.settings})
            path = Path(work) / f"{name}.jsonl"
            with TraceWriter(path, settings, source="simulation") as trace:
                executor = SimulatedExecutor(settings, costs, picture.disturbance)
                drive(Scheduler(settings), executor, trace, command_timeout_s=1)
            (folder / f"{name}.svg").write_text(svg_gantt(spans(read_trace(path))), encoding="utf-8")


if __name__ == "__main__":
    draw(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images"))
