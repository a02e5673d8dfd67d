from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from digenrl.errors import ConfigError, RunFailed
from digenrl.ids import WorkerId
from digenrl.scheduling.commands import Command, Score
from digenrl.scheduling.events import Event
from digenrl.scheduling.scheduler import Scheduler
from digenrl.scheduling.settings import SchedulerSettings
from digenrl.simulation.costs import SimulationCosts
from digenrl.simulation.executor import Disturbance, Incident
from digenrl.simulation.run import SimulationResult, simulate

COSTS = SimulationCosts(generate=(2.0,), update=1.0, tag=2.0, optimizer=0.5, sync=0.5)


def settings(costs: SimulationCosts = COSTS, **changes: Any) -> SchedulerSettings:
    defaults: dict[str, Any] = {
        "steps": 4,
        "micro_batches": 3,
        "generators": tuple(WorkerId(f"generator-{i}") for i in range(len(costs.generate))),
        "trainer": WorkerId("trainer"),
        "scoring": "inline" if costs.score is None else "generator",
    }
    return SchedulerSettings(**{**defaults, **changes})


class Record:
    def __init__(self) -> None:
        self.entries: list[tuple[tuple[Event, ...], tuple[Command, ...]]] = []

    def record(self, events: Sequence[Event], commands: Sequence[Command]) -> None:
        self.entries.append((tuple(events), tuple(commands)))


def test_step_times_go_from_version_to_version_and_match_a_schedule_drawn_by_hand() -> None:
    # Generated at 2, 4, 6; updated until 3, 5, 7; optimizer until 7.5; sync until 8; then the same again.
    result = simulate(settings(), COSTS, samples_per_step=16)
    assert result.step_times_s == (7.5, 8.0, 8.0, 8.0)
    assert result.step_time_s == 8.0
    assert result.makespan_s == 31.5
    assert result.samples_per_second == 2.0
    assert result.trainer.by_task == pytest.approx({"update": 3 / 8, "optimizer": 0.5 / 8, "sync": 0.5 / 8})
    assert (result.trainer.busy, result.trainer.bubble) == pytest.approx((0.5, 0.5))
    assert (result.generators.busy, result.generators.bubble) == pytest.approx((6.5 / 8, 1.5 / 8))


def test_the_steady_mean_leaves_out_the_first_and_the_last_step() -> None:
    result = simulate(settings(max_stale_fraction=1.0, steps=6), COSTS)
    times = result.step_times_s
    assert times[0] != times[1]
    assert result.step_time_s == pytest.approx(sum(times[1:-1]) / 4)


def test_a_greedy_makespan_is_the_one_that_enumeration_found() -> None:
    # Oracle instance 0: 712 ticks with three micro-batches by the trainer.
    costs = SimulationCosts(generate=(100.0,), score=(4.0,), update=14.0, tag=100.0, switch_in=50.0, switch_out=50.0)
    result = simulate(settings(costs, micro_batches=8, steps=1, tag="greedy"), costs)
    assert (result.makespan_s, result.tags) == (712.0, (3,))
    assert {"tag", "switch", "update"} <= set(result.trainer.by_task)


def test_stale_micro_batches_are_counted_in_the_step_that_they_belong_to() -> None:
    result = simulate(settings(max_stale_fraction=0.34), COSTS)
    assert result.stale == (0, 1, 1, 1)
    assert result.generators.by_task["stale"] > 0
    assert simulate(settings(), COSTS).stale == (0, 0, 0, 0)


def test_one_pool_that_works_in_turn_never_idles_and_counts_no_tag() -> None:
    pool = WorkerId("pool")
    result = simulate(settings(generators=(pool,), trainer=pool), COSTS)
    assert result.step_time_s == pytest.approx(3 * 3.0 + 1.0)
    assert result.trainer.bubble == pytest.approx(0.0)
    assert result.tags == (0, 0, 0, 0)


def test_everything_reaches_the_recorder_and_replays_to_the_same_commands() -> None:
    record, noisy = Record(), Disturbance(jitter=0.3, seed=5)
    result = simulate(settings(tag="bts_plus", max_stale_fraction=0.34), COSTS, noisy, record)
    assert sum(len(events) for events, _ in record.entries) == result.events
    scheduler = Scheduler(settings(tag="bts_plus", max_stale_fraction=0.34))
    for events, commands in record.entries:
        assert tuple(scheduler.handle(*events)) == commands


def run(seed: int = 0, *, steps: int = 30, **disturbance: Any) -> SimulationResult:
    return simulate(settings(steps=steps, tag="greedy"), COSTS, Disturbance(seed=seed, **disturbance))


def test_the_seed_decides_about_every_duration() -> None:
    assert run(1, jitter=0.2, straggler_share=0.1) == run(1, jitter=0.2, straggler_share=0.1)
    assert run(1, jitter=0.2).step_times_s != run(2, jitter=0.2).step_times_s
    assert run(1).step_times_s == run(2).step_times_s


def test_noise_scatters_step_times_around_the_undisturbed_one() -> None:
    calm, noisy = run(steps=200), run(steps=200, jitter=0.1)
    assert noisy.step_time_s == pytest.approx(calm.step_time_s, rel=0.1)
    assert max(noisy.step_times_s) > 1.05 * min(noisy.step_times_s[1:])


def test_stragglers_cost_time_in_proportion_to_their_factor() -> None:
    calm, slow, slower = run(), run(straggler_share=0.1), run(straggler_share=0.1, straggler_factor=20.0)
    assert calm.step_time_s < slow.step_time_s < slower.step_time_s


FOUR = SimulationCosts(generate=(8.0,) * 4, update=0.5, tag=2.0)


def incidents(*items: tuple[float, str, bool]) -> Disturbance:
    return Disturbance(incidents=tuple(Incident(at_s=at, worker=WorkerId(name), joins=joins) for at, name, joins in items))


def test_a_lost_generator_slows_the_run_and_one_that_comes_back_less_so() -> None:
    def makespan(*items: tuple[float, str, bool]) -> float:
        return simulate(settings(FOUR, micro_batches=16, tag="greedy"), FOUR, incidents(*items)).makespan_s

    lost, back = (10.0, "generator-1", False), (25.0, "generator-1", True)
    assert makespan() < makespan(lost, back) < makespan(lost)


def test_time_of_a_lost_worker_is_neither_busy_nor_a_bubble() -> None:
    one_gone = simulate(settings(FOUR, micro_batches=16), FOUR, incidents((0.0, "generator-3", False)))
    three = dataclasses.replace(FOUR, generate=(8.0,) * 3)
    assert one_gone.generators.bubble == pytest.approx(simulate(settings(three, micro_batches=16), three).generators.bubble)


def test_losing_the_trainer_ends_the_run_and_an_unknown_worker_is_a_mistake() -> None:
    with pytest.raises(RunFailed, match="trainer"):
        simulate(settings(), COSTS, incidents((1.0, "trainer", False)))
    with pytest.raises(ConfigError, match=r"disturbance.incidents.0.worker.*'generator-9'"):
        simulate(settings(), COSTS, incidents((1.0, "generator-9", False)))


@pytest.mark.parametrize(
    ("costs", "changes", "named"),
    [
        (dataclasses.replace(COSTS, generate=(1.0, 2.0)), {}, "costs.generate has 2"),
        (dataclasses.replace(COSTS, score=(0.1,)), {}, "costs.score has 1"),
        (COSTS, {"scoring": "generator"}, "costs.score has no"),
        (dataclasses.replace(COSTS, tag=None), {"tag": "greedy"}, "costs.tag is missing"),
        (COSTS, {"steps": 0}, "schedule.steps"),
    ],
)
def test_costs_that_do_not_fit_the_settings_are_refused_by_name(costs: SimulationCosts, changes: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        simulate(settings(**changes), costs)


def test_scorers_of_their_own_take_scoring_off_the_generators() -> None:
    costs = dataclasses.replace(COSTS, score=(1.0,))
    record = Record()
    pooled = settings(costs, scoring="pool", scorers=(WorkerId("scorer-0"),))
    assert simulate(pooled, costs, None, record).step_time_s < simulate(settings(costs), costs).step_time_s
    assert {c.worker for _, commands in record.entries for c in commands if isinstance(c, Score)} == {"scorer-0"}
