"""Shares and step times against cases that were computed by hand, and sums that must come out."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from digenrl.ids import WorkerId
from digenrl.simulation.costs import SimulationCosts
from digenrl.simulation.executor import Disturbance, Incident
from digenrl.trace.record import Trace
from digenrl.trace.spans import spans
from digenrl.trace.timeline import Kind
from digenrl.trace.utilization import MOST_ROWS, Load, utilization

Simulate = Callable[..., Trace]


def of(loads: tuple[Load, ...], name: str) -> Load:
    return next(load for load in loads if load.name == name)


def test_shares_without_tag_are_those_computed_by_hand(simulate: Simulate) -> None:
    # g0: generates 0 to 2 s, idle to 2.4 s. Trainer: bubble 1 s, update 0.3, bubble 0.7, update 0.3, optimizer 0.1.
    costs = SimulationCosts(generate=(1.0,), update=0.3, optimizer=0.1)
    use = utilization(spans(simulate(costs, micro_batches=2, steps=1, scoring="inline")))
    generator, trainer = of(use.workers, "g0"), of(use.workers, "trainer")
    assert generator.busy_us == ((Kind.GENERATE, 2_000_000),)
    assert (generator.waiting_us, generator.done_us, generator.lost_us) == (400_000, 0, 0)
    assert trainer.busy_us == ((Kind.UPDATE, 600_000), (Kind.OPTIMIZER, 100_000))
    assert trainer.bubble_fraction == pytest.approx(1.7 / 2.4)
    assert trainer.busy_fraction == pytest.approx(0.7 / 2.4)
    (step,) = use.steps
    assert (step.step, step.seconds, step.bubble_us, step.micro_batches, step.stale, step.tags) == (0, 2.4, 1_700_000, 2, 0, 0)
    assert use.step_s == 2.4


def test_shares_with_a_tag_are_those_computed_by_hand(simulate: Simulate) -> None:
    # Trainer: switch 0.1, TAG 1, switch 0.1, updates 0.6, optimizer 0.1; never a bubble. g0: 1 s, then idle for 0.9 s.
    costs = SimulationCosts(generate=(1.0,), update=0.3, tag=1.0, switch_in=0.1, switch_out=0.1, optimizer=0.1)
    use = utilization(spans(simulate(costs, micro_batches=2, steps=1, scoring="inline", tag="static", tag_static=1)))
    trainer = of(use.pools, "trainer")
    assert dict(trainer.busy_us) == {
        Kind.TAG: 1_000_000,
        Kind.UPDATE: 600_000,
        Kind.SWITCH: 200_000,
        Kind.OPTIMIZER: 100_000,
    }
    assert trainer.bubble_fraction == 0
    assert of(use.pools, "generators").bubble_fraction == pytest.approx(0.9 / 1.9)
    assert (use.steps[0].tags, use.steps[0].seconds) == (1, 1.9)


def test_step_times_run_from_one_version_to_the_next_and_bubbles_belong_to_their_step(simulate: Simulate) -> None:
    costs = SimulationCosts(generate=(1.0,), update=0.3, optimizer=0.1, sync=0.2)
    use = utilization(spans(simulate(costs, micro_batches=2, steps=2, scoring="inline")))
    assert [(step.seconds, step.bubble_us) for step in use.steps] == [(2.4, 1_700_000), (2.6, 1_700_000)]
    assert use.step_s == 2.5
    assert sum(step.bubble_us for step in use.steps) == of(use.workers, "trainer").waiting_us


def test_staleness_is_the_share_of_accumulated_micro_batches_that_are_one_version_old(traces: dict[str, Trace]) -> None:
    use = utilization(spans(traces["stale"]))
    assert use.steps[0].stale_fraction == 0
    assert [step.stale for step in use.steps[1:]] == [2, 2]
    assert use.steps[1].stale_fraction == 0.25
    assert use.stale_fraction == pytest.approx(4 / 24)
    assert utilization(spans(traces["greedy"])).stale_fraction == 0


def test_the_steps_of_a_resumed_run_have_their_numbers_and_all_that_was_done_in_them(traces: dict[str, Trace]) -> None:
    use = utilization(spans(traces["resumed"]))
    assert [(step.step, step.micro_batches, step.stale) for step in use.steps] == [(3, 8, 2), (4, 8, 2), (5, 8, 2)]
    assert use.stale_fraction == 0.25
    assert sum(step.tags for step in use.steps) == sum(span.tag for span in spans(traces["resumed"]).spans) > 0
    assert sum(step.bubble_us for step in use.steps) == of(use.workers, "trainer").waiting_us
    assert "step 3" in "\n".join(use.lines()) and "step 0" not in "\n".join(use.lines())


def test_the_time_of_a_lost_worker_counts_neither_as_busy_nor_as_waiting(simulate: Simulate) -> None:
    costs = SimulationCosts(generate=(1.0, 1.0), update=0.1, optimizer=0.1)
    incidents = (Incident(at_s=0.5, worker=WorkerId("g1")), Incident(at_s=2.25, worker=WorkerId("g1"), joins=True))
    use = utilization(spans(simulate(costs, Disturbance(incidents=incidents), steps=1, scoring="inline")))
    lost = of(use.workers, "g1")
    assert lost.lost_us == 1_750_000
    assert lost.present_us == use.duration_us - 1_750_000
    # What it had begun was work, even if nothing came of it.
    assert dict(lost.busy_us)[Kind.GENERATE] == 500_000 + 1_000_000


def test_kinds_waiting_done_and_lost_are_all_of_the_time_of_every_worker(any_trace: Trace) -> None:
    use = utilization(spans(any_trace))
    for load in use.workers:
        assert sum(time for _, time in load.busy_us) + load.waiting_us + load.done_us + load.lost_us == use.duration_us
    for pool in use.pools:
        assert pool.present_us + pool.lost_us == use.duration_us * len(pool.workers)


def test_json_has_the_names_of_the_metrics_and_fractions_from_0_to_1(any_trace: Trace) -> None:
    plain = json.loads(json.dumps(utilization(spans(any_trace)).to_plain()))
    assert {"timing_s/step", "bubble_fraction/trainer", "stale_fraction", "pools", "workers", "steps"} <= set(plain)
    for load in (*plain["pools"].values(), *plain["workers"].values()):
        shares = [load["busy_fraction"], load["bubble_fraction"], load["done_fraction"]]
        assert all(0 <= share <= 1 for share in (*shares, *load["busy"].values()))
        assert sum(shares) == pytest.approx(1) or not plain["duration_s"]
        assert sum(load["busy"].values()) == pytest.approx(load["busy_fraction"])


def test_scorers_are_a_pool_of_their_own_and_a_trainer_in_turn_is_shown_by_itself_too(traces: dict[str, Trace]) -> None:
    assert [pool.name for pool in utilization(spans(traces["pool"])).pools] == ["generators", "scorers", "trainer"]
    use = utilization(spans(traces["one pool"]))
    assert [pool.name for pool in use.pools] == ["colocated", "trainer"]
    assert of(use.pools, "trainer").busy_us == of(use.workers, "g0").busy_us


def test_the_lines_name_every_pool_worker_and_step_and_no_kind_that_did_not_occur(traces: dict[str, Trace]) -> None:
    lines = utilization(spans(traces["greedy"])).lines()
    table = "\n".join(lines)
    for name in ("generators", "  g0", "  g1", "trainer", "step 0", "step 1", "virtual time"):
        assert name in table
    assert "TAG" in lines[2]
    assert "stale generate" not in table
    assert "evaluate" not in table


def test_the_lines_of_a_large_run_stay_readable(simulate: Simulate) -> None:
    costs = SimulationCosts(generate=(1.0,) * 50, update=0.01, optimizer=0.1)
    lines = utilization(spans(simulate(costs, micro_batches=50, steps=MOST_ROWS + 3, scoring="inline"))).lines()
    assert "  ... and 11 more workers" in lines
    assert "... and 3 more steps" in lines
    assert len(lines) < 2 * MOST_ROWS + 12


def test_a_run_without_a_completed_step_has_no_step_time(traces: dict[str, Trace]) -> None:
    for name in ("trainer lost", "no steps"):
        use = utilization(spans(traces[name]))
        assert use.step_s is None
        assert use.lines()[0].startswith("no completed step")
