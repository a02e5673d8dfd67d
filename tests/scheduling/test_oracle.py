"""The scheduler itself, driven on the virtual clock, against schedules computed by an independent simulator.

golden/schedules.json is ours: optima by enumeration and the makespans of fixed policies, in integer ticks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from digenrl.driver import drive
from digenrl.ids import WorkerId
from digenrl.scheduling.commands import Accumulate, Command, Generate, OptimizerStep, Score, SwitchMode
from digenrl.scheduling.events import Event, Finished
from digenrl.scheduling.scheduler import Scheduler
from digenrl.scheduling.settings import SchedulerSettings
from digenrl.simulation.costs import SimulationCosts
from digenrl.simulation.executor import SimulatedExecutor

ORACLE = json.loads((Path(__file__).parents[1] / "golden" / "schedules.json").read_text(encoding="utf-8"))
SMALL = pytest.mark.parametrize("instance", ORACLE["small"], ids=lambda instance: str(instance["id"]))
BUFFERED = pytest.mark.parametrize("instance", [i for i in ORACLE["tcss"] if i["sync"] == "buffered"], ids=lambda i: str(i["id"]))
TICK = 1e-6


class Played:
    """One simulated run of an oracle instance."""

    def __init__(self, instance: dict[str, Any], tag: str, **changes: Any) -> None:
        score = instance["s"]
        costs = SimulationCosts(
            generate=tuple(value * TICK for value in instance["g"]),
            score=None if score is None else tuple(value * TICK for value in score),
            update=instance["t"] * TICK,
            tag=instance["gT"] * TICK,
            switch_in=instance.get("c_in", instance.get("cin")) * TICK,
            switch_out=instance.get("c_out", instance.get("cout")) * TICK,
            optimizer=instance.get("o", 0) * TICK,
            sync=instance.get("w", 0) * TICK,
        )
        setup: dict[str, Any] = {
            "steps": instance.get("S", 1),
            "micro_batches": instance["B"],
            "generators": tuple(WorkerId(f"G{i}") for i in range(len(instance["g"]))),
            "trainer": WorkerId("T"),
            "scoring": "inline" if score is None else "generator",
            "tag": tag,
            "costs": costs.step_costs(),
            "max_stale_fraction": instance.get("stale", 0.0),
        }
        settings = SchedulerSettings(**{**setup, **changes})
        self.log: list[tuple[list[Event], list[Command]]] = []
        drive(Scheduler(settings), SimulatedExecutor(settings, costs), self, command_timeout_s=1)

    def record(self, events: Any, commands: Any) -> None:
        self.log.append((list(events), list(commands)))

    def ends(self, kind: type) -> list[int]:
        return [e.at_us for events, _ in self.log for e in events if isinstance(e, Finished) and isinstance(e.command, kind)]

    @property
    def makespan(self) -> int:
        return self.ends(Accumulate)[-1]

    def spans(self) -> set[tuple[str, str, int, int]]:
        """(worker, task, start, end), a switch of mode counted to the task that it is for."""
        names = {Generate: "GEN", Score: "SCORE", Accumulate: "UPD"}
        begun: dict[int, int] = {}
        switched: dict[str, int] = {}
        found = set()
        for events, commands in self.log:
            for event in events:
                command = getattr(event, "command", None)
                if isinstance(command, SwitchMode):
                    switched[command.worker] = begun[id(command)]
                elif type(command) in names:
                    name = "TAG" if command.worker == "T" and isinstance(command, Generate) else names[type(command)]
                    found.add((command.worker, name, begun[id(command)], event.at_us))
            for command in commands:
                worker = getattr(command, "worker", "")
                is_switch = isinstance(command, SwitchMode)
                begun[id(command)] = events[-1].at_us if is_switch else switched.pop(worker, events[-1].at_us)
        return found


@SMALL
@pytest.mark.parametrize(("tag", "key"), [("never", "no_tag"), ("greedy", "greedy"), ("bts", "bts_optimum")])
def test_fixed_policies_end_when_the_oracle_says(instance: dict[str, Any], tag: str, key: str) -> None:
    assert Played(instance, tag).makespan == instance[key]


@SMALL
def test_static_tag_ends_when_the_oracle_says_for_every_number(instance: dict[str, Any]) -> None:
    ends = [Played(instance, "static", tag_static=n).makespan for n in range(instance["B"] + 1)]
    assert ends == instance["static_by_n"]


@pytest.mark.parametrize("instance", [i for i in ORACLE["small"] if "greedy_trace" in i], ids=lambda i: str(i["id"]))
def test_greedy_does_every_task_when_the_oracle_does(instance: dict[str, Any]) -> None:
    assert Played(instance, "greedy").spans() == {tuple(span) for span in instance["greedy_trace"]}


@BUFFERED
@pytest.mark.parametrize(("tag", "key"), [("never", "no_tag"), ("greedy", "greedy")])
def test_optimizer_steps_end_when_the_oracle_says_over_three_steps(instance: dict[str, Any], tag: str, key: str) -> None:
    assert Played(instance, tag).ends(OptimizerStep) == instance[key]


def test_bts_plus_is_within_the_bar_on_all_single_steps() -> None:
    ratios = [Played(i, "bts_plus").makespan / i["trainer_unrestricted_optimum"] for i in ORACLE["small"]]
    ratios += [Played(i, "bts_plus").makespan / i["extended_value"] for i in ORACLE["large"]]
    assert sum(ratios) / len(ratios) <= 1.003


def test_bts_plus_is_within_the_bar_over_three_steps_with_stale_generation() -> None:
    buffered = [i for i in ORACLE["tcss"] if i["sync"] == "buffered"]
    ratios = [Played(i, "bts_plus").ends(OptimizerStep)[-1] / i["horizon_optimum"] for i in buffered]
    assert sum(ratios) / len(ratios) <= 1.01


@SMALL
def test_no_policy_ends_before_the_lower_bound(instance: dict[str, Any]) -> None:
    for tag in ("never", "greedy", "bts", "bts_plus"):
        assert Played(instance, tag).makespan >= instance["lower_bound"]


def test_updating_by_index_costs_next_to_nothing_on_the_oracle() -> None:
    pairs = [
        (Played(i, "bts_plus", update_order="index").makespan, Played(i, "bts_plus").makespan)
        for i in (*ORACLE["small"], *ORACLE["large"])
        if 0.8 <= i["gT"] / i["g"][0] <= 1.2
    ]
    assert sum(index / arrival for index, arrival in pairs) / len(pairs) <= 1.02
