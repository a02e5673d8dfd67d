"""Traces of simulated runs, made in memory."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from digenrl.driver import drive
from digenrl.errors import ProtocolError, RunFailed
from digenrl.ids import MicroBatchId, StepOutcome, WorkerId
from digenrl.scheduling.commands import Command, OptimizerStep, StopRun, WorkerCommand
from digenrl.scheduling.events import CommandFailed, ConditioningLost, Event, Finished, RunStarted, TrajectoryLost
from digenrl.scheduling.scheduler import Scheduler
from digenrl.scheduling.settings import SchedulerSettings
from digenrl.simulation.costs import SimulationCosts
from digenrl.simulation.executor import Disturbance, Incident, SimulatedExecutor
from digenrl.trace.record import Entry, Trace

Simulate = Callable[..., Trace]


class Memory:
    """A recorder that keeps what it is told."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def record(self, events: Sequence[Event], commands: Sequence[Command]) -> None:
        self.entries.append(Entry(tuple(events), tuple(commands)))


def run(costs: SimulationCosts, disturbance: Disturbance | None = None, **settings: Any) -> Trace:
    """The trace of a run to its end, or to the point at which the scheduler stopped it."""
    count = len(costs.generate)
    plain: dict[str, Any] = {
        "steps": 2,
        "micro_batches": 4,
        "generators": tuple(WorkerId(f"g{index}") for index in range(count)),
        "trainer": WorkerId("trainer"),
    }
    setup = SchedulerSettings(**{**plain, **settings})
    memory = Memory()
    with contextlib.suppress(RunFailed):
        drive(Scheduler(setup), SimulatedExecutor(setup, costs, disturbance), memory, command_timeout_s=1)
    return Trace(setup, tuple(memory.entries), source="simulation")


def lossy(seed: int) -> Trace:
    """A run whose workers refuse commands, and whose trajectories and encoded prompts get lost at any moment."""
    rng, now = random.Random(seed), 0
    setup = SchedulerSettings(
        steps=3, micro_batches=4, generators=(G0, G1), trainer=WorkerId("trainer"), tag="greedy", max_stale_fraction=0.5
    )
    scheduler, memory = Scheduler(setup), Memory()
    at: dict[WorkerId, WorkerCommand] = {}
    events: list[Event] = [RunStarted(at_us=0)]
    while True:
        try:
            commands = scheduler.handle(*events)
        except ProtocolError:
            commands = scheduler.handle(*(events := events[:1]))  # what was to be lost was not there
        memory.record(events, commands)
        for event in events:
            if isinstance(event, Finished | CommandFailed):
                del at[event.command.worker]
        at |= {command.worker: command for command in commands if not isinstance(command, StopRun)}
        if not at:
            return Trace(setup, tuple(memory.entries), source="simulation")
        now += rng.choice([1, 3_000, 20_000])
        command = at[rng.choice(sorted(at))]
        outcome = StepOutcome.APPLIED if isinstance(command, OptimizerStep) else None
        failed = CommandFailed(at_us=now, command=command, untouched=True)
        step = scheduler.state.policy_version + rng.choice([0, 0, 1])
        lost: list[Event] = [
            TrajectoryLost(at_us=now, micro_batch=MicroBatchId(step, rng.randrange(4))),
            ConditioningLost(at_us=now, step=step),
        ]
        events = [failed if rng.random() < 0.2 else Finished(at_us=now, command=command, outcome=outcome)]
        events += rng.sample(lost, rng.choice([0, 0, 0, 1]))


@pytest.fixture(scope="session")
def simulate() -> Simulate:
    """A function that simulates a run: costs, an optional disturbance, and settings that replace small defaults."""
    return run


G0, G1 = WorkerId("g0"), WorkerId("g1")
TWO = SimulationCosts(
    generate=(1.0, 1.3), score=(0.05, 0.05), update=0.3, tag=1.0, switch_in=0.05, switch_out=0.05, optimizer=0.1, sync=0.1
)
AWAY = Disturbance(
    jitter=0.1, straggler_share=0.05, incidents=(Incident(at_s=2.5, worker=G1), Incident(at_s=5.0, worker=G1, joins=True))
)


def _traces() -> dict[str, Trace]:
    inline = SimulationCosts(generate=(1.0, 1.3), update=0.3, tag=1.0, optimizer=0.1, sync=0.1, encode=0.2)
    pool = SimulationCosts(generate=(1.0, 1.3), score=(0.4,), update=0.3, tag=1.0, optimizer=0.1, sync=0.1, evaluate=0.5)
    turn = SimulationCosts(generate=(1.0, 1.0), score=(0.2, 0.2), update=0.3, optimizer=0.1, sync=0.1)
    return {
        "no TAG": run(TWO),
        "greedy": run(TWO, tag="greedy", micro_batches=6),
        "stale": run(TWO, tag="bts_plus", micro_batches=8, steps=3, max_stale_fraction=0.25),
        "resumed": run(
            TWO, tag="bts_plus", micro_batches=8, steps=6, first_version=3, stale_claims=(0, 1), max_stale_fraction=0.25
        ),
        "lost and back": run(TWO, AWAY, tag="bts_plus", micro_batches=8, steps=3, max_stale_fraction=0.25),
        "inline": run(inline, tag="bts_plus", scoring="inline", micro_batches=6),
        "pool": run(pool, tag="greedy", scoring="pool", scorers=(WorkerId("judge"),), evaluate_at=(0, 2), micro_batches=6),
        "one pool": run(turn, trainer=G0, micro_batches=6, update_after="step"),
        "two updates": run(TWO, tag="greedy", updates_per_rollout=2),
        "trainer lost": run(TWO, Disturbance(incidents=(Incident(at_s=1.5, worker=WorkerId("trainer")),))),
        "no steps": run(TWO, steps=0),
        "objects lost": lossy(7),
    }


@pytest.fixture(scope="session")
def traces() -> dict[str, Trace]:
    """Runs of every kind, by what is special about them."""
    return _traces()


@pytest.fixture(params=sorted(_traces()))
def any_trace(request: pytest.FixtureRequest, traces: dict[str, Trace]) -> Trace:
    """Each of ``traces`` in turn."""
    return traces[request.param]
