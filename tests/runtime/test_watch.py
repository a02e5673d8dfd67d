"""The watch says during a run what trace.utilization finds in its trace afterwards, and what every worker is at."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import pytest

from digenrl.driver import drive
from digenrl.errors import RunFailed
from digenrl.ids import MicroBatchId, StepOutcome, WorkerId
from digenrl.metrics.live import LiveState, WorkerView
from digenrl.runtime.watch import Watch
from digenrl.scheduling.commands import Command, OptimizerStep, StopRun, WorkerCommand
from digenrl.scheduling.events import CommandFailed, Event, Finished, RunStarted, TrajectoryLost, WorkerLost, WorkerOverdue
from digenrl.scheduling.scheduler import Scheduler
from digenrl.scheduling.settings import SchedulerSettings
from digenrl.simulation.costs import SimulationCosts
from digenrl.simulation.executor import Disturbance, Incident, SimulatedExecutor
from digenrl.trace.record import Entry, Trace
from digenrl.trace.spans import spans
from digenrl.trace.timeline import Spans
from digenrl.trace.utilization import utilization

G0, G1, TRAINER, JUDGE = (WorkerId(name) for name in ("g0", "g1", "trainer", "judge"))
TWO = SimulationCosts(
    generate=(1.0, 1.3), score=(0.05, 0.05), update=0.3, tag=1.0, switch_in=0.05, switch_out=0.05, optimizer=0.1, sync=0.1
)
AWAY = Disturbance(
    jitter=0.1, straggler_share=0.05, incidents=(Incident(at_s=2.5, worker=G1), Incident(at_s=5.0, worker=G1, joins=True))
)
IN_TURN = SimulationCosts(generate=(1.0,), score=(0.2,), update=0.3, optimizer=0.1, sync=0.1, evaluate=0.4, save=0.2)
WITH_SCORER = SimulationCosts(
    generate=(1.0, 1.3), score=(0.4,), update=0.3, tag=1.0, optimizer=0.1, sync=0.1, evaluate=0.5, save=0.3
)


class Memory:
    """A recorder that keeps what it is told."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def record(self, events: Sequence[Event], commands: Sequence[Command]) -> None:
        self.entries.append(Entry(tuple(events), tuple(commands)))


class Stepping:
    """A real executor, which also asks for the metrics of a step as a journal does: before its end is reported."""

    def __init__(self, inner: SimulatedExecutor, watch: Watch, first: int) -> None:
        self.inner = inner
        self.first = first
        self.watch = watch
        self.metrics: list[dict[str, float]] = []
        """Of each RL step; with two updates, as they were at the second."""

    def now_us(self) -> int:
        return self.inner.now_us()

    def submit(self, command: WorkerCommand) -> None:
        self.inner.submit(command)

    def next_events(self, timeout_s: float) -> Sequence[Event]:
        events = self.inner.next_events(timeout_s)
        for event in events:
            if isinstance(event, Finished) and isinstance(event.command, OptimizerStep):
                self.metrics[event.command.step - self.first :] = [self.watch.step_metrics(self.inner.now_us())]
        return events


@dataclass
class Watched:
    """One simulated run, and what the watch said."""

    watch: Watch
    trace: Trace
    metrics: list[dict[str, float]]
    states: list[LiveState]
    """After every instant."""
    end_us: int

    @property
    def timeline(self) -> Spans:
        return spans(self.trace)


def run(costs: SimulationCosts, disturbance: Disturbance | None = None, **changes: Any) -> Watched:
    plain: dict[str, Any] = {"steps": 3, "micro_batches": 6, "generators": (G0, G1)[: len(costs.generate)], "trainer": TRAINER}
    settings = SchedulerSettings(**{**plain, **changes})
    scheduler, memory = Scheduler(settings), Memory()
    watch = Watch(scheduler, [memory])
    executor = Stepping(SimulatedExecutor(settings, costs, disturbance), watch, settings.first_version)
    states: list[LiveState] = []

    class Looking:
        def record(self, events: Sequence[Event], commands: Sequence[Command]) -> None:
            watch.record(events, commands)
            states.append(watch.snapshot(executor.now_us()))

    with contextlib.suppress(RunFailed):
        drive(scheduler, executor, Looking(), command_timeout_s=1)
    return Watched(watch, Trace(settings, tuple(memory.entries)), executor.metrics, states, executor.now_us())


RUNS: dict[str, Callable[[], Watched]] = {
    "no TAG": lambda: run(TWO),
    "greedy": lambda: run(TWO, tag="greedy"),
    "stale": lambda: run(TWO, tag="bts_plus", micro_batches=8, max_stale_fraction=0.25),
    "lost and back": lambda: run(TWO, AWAY, tag="bts_plus", micro_batches=8, max_stale_fraction=0.25),
    "scorer": lambda: run(
        WITH_SCORER, tag="greedy", scoring="pool", scorers=(JUDGE,), evaluate_at=(0, 3), save_at=(2, 3), micro_batches=7
    ),
    "two updates": lambda: run(TWO, tag="greedy", updates_per_rollout=2),
    "one pool": lambda: run(TWO, trainer=G0, update_after="step"),
    "one worker": lambda: run(IN_TURN, trainer=G0, evaluate_at=(0, 3), save_at=(3,)),
    "trainer lost": lambda: run(TWO, Disturbance(incidents=(Incident(at_s=9.0, worker=TRAINER),))),
}


@pytest.fixture(params=sorted(RUNS))
def watched(request: pytest.FixtureRequest) -> Watched:
    return RUNS[request.param]()


def waiting_share(timeline: Spans, workers: Sequence[WorkerId], start_us: int, end_us: int) -> float:
    """The slow way: what of every gap lies in the window."""
    parts = {"waiting": 0, "lost": 0}
    for gap in timeline.gaps:
        if gap.worker in workers and gap.why != "done":
            part = "lost" if gap.why == "lost" else "waiting"
            parts[part] += max(0, min(gap.end_us, end_us) - max(gap.start_us, start_us))
    return parts["waiting"] / (len(workers) * (end_us - start_us) - parts["lost"])


def test_the_metrics_of_a_step_are_the_ones_that_its_trace_has(watched: Watched) -> None:
    timeline = watched.timeline
    use, settings = utilization(timeline), timeline.settings
    assert len(watched.metrics) == len(use.steps) > 0
    for step, metrics in zip(use.steps, watched.metrics, strict=True):
        assert metrics["stale_fraction"] == pytest.approx(step.stale_fraction)
        for pool in timeline.pools if len(settings.workers) > 1 else ():
            share = waiting_share(timeline, pool.workers, step.start_us, step.end_us)
            assert metrics[f"bubble_fraction/{pool.name}"] == pytest.approx(share)
        if not settings.one_pool:
            assert metrics["bubble_fraction/trainer"] == pytest.approx(step.bubble_fraction)
            assert metrics["tag_fraction"] == pytest.approx(step.tags / step.micro_batches)


def test_busy_time_by_kind_of_work_is_the_one_that_the_trace_has(watched: Watched) -> None:
    for load in utilization(watched.timeline).workers:
        found = {kind: us for kind, us in watched.watch.busy_us(WorkerId(load.name)).items() if us}
        assert found == dict(load.busy_us)


def test_shares_are_those_computed_by_hand() -> None:
    # g0: generates 0 to 2 s, idle to 2.4 s. Trainer: bubble 1 s, update 0.3, bubble 0.7, update 0.3, optimizer 0.1.
    found = run(SimulationCosts(generate=(1.0,), update=0.3, optimizer=0.1), micro_batches=2, steps=1, scoring="inline")
    assert found.metrics == [
        pytest.approx(
            {
                "bubble_fraction/generators": 0.4 / 2.4,
                "bubble_fraction/trainer": 1.7 / 2.4,
                "stale_fraction": 0.0,
                "tag_fraction": 0.0,
            }
        )
    ]


def test_a_worker_alone_has_no_bubble_and_nothing_is_said_of_one() -> None:
    assert [set(metrics) for metrics in RUNS["one worker"]().metrics] == [{"stale_fraction"}] * 3


def test_workers_in_turn_are_one_pool_without_a_trainer_to_tell_apart() -> None:
    assert all(set(metrics) == {"bubble_fraction/colocated", "stale_fraction"} for metrics in RUNS["one pool"]().metrics)


def test_a_pool_that_was_lost_for_the_whole_step_has_no_share() -> None:
    # All of step 1 is generated early, until 4 s; step 0 ends at 5.1 s, and the only generator is lost in between.
    costs = SimulationCosts(generate=(1.0,), update=2.0, optimizer=0.1)
    lost = Disturbance(incidents=(Incident(at_s=4.5, worker=G0),))
    first, second = run(costs, lost, steps=2, micro_batches=2, scoring="inline", max_stale_fraction=1.0).metrics
    assert first["bubble_fraction/generators"] == pytest.approx(0.5 / 4.5)
    assert "bubble_fraction/generators" not in second and second["bubble_fraction/trainer"] == 0
    assert second["stale_fraction"] == 1


def test_a_micro_batch_that_is_generated_again_counts_for_the_one_who_did_it_last() -> None:
    settings = SchedulerSettings(steps=1, micro_batches=2, generators=(G0,), trainer=TRAINER, scoring="inline", tag="static")
    clock = Manual(settings)
    for _ in range(3):
        clock.finish(G0)  # the prompts, 0.0, which the trainer begins to use, and 0.1, which waits
    clock.tell(lambda at: WorkerLost(at_us=at, worker=G0))
    clock.tell(lambda at: TrajectoryLost(at_us=at, micro_batch=MicroBatchId(0, 1)))
    while not isinstance(clock.commands[TRAINER], OptimizerStep):
        clock.finish(TRAINER)  # 0.0; then, as nobody else is left, it generates 0.1 itself
    assert clock.watch.step_metrics(clock.now_us)["tag_fraction"] == 0.5


def test_everything_is_handed_on_in_the_order_in_which_it_came() -> None:
    settings = SchedulerSettings(steps=1, micro_batches=1, generators=(G0,), trainer=TRAINER)
    first, second, watched = Memory(), Memory(), Memory()
    scheduler = Scheduler(settings)
    watch = Watch(scheduler, [first, second])

    class Both:
        def record(self, events: Sequence[Event], commands: Sequence[Command]) -> None:
            watched.record(events, commands)
            watch.record(events, commands)

    costs = SimulationCosts(generate=(1.0,), score=(0.1,), update=0.3)
    drive(scheduler, SimulatedExecutor(settings, costs), Both(), command_timeout_s=1)
    assert first.entries == second.entries == watched.entries


def test_the_queues_are_the_ones_of_the_trace() -> None:
    # Without TAG: a micro-batch that the trainer changes its mode for still waits in a trace, and has left in the schedule.
    found = run(TWO, AWAY, micro_batches=8, max_stale_fraction=0.25)
    seen = [(s.step, s.queues.pending, s.queues.scoring, s.queues.update) for s in found.states]
    expected = [(q.policy_version, q.pending, q.scoring, q.update) for q in found.timeline.queues]
    assert [queues for queues, _ in groupby(seen)] == expected
    assert {s.queues.stale_used for s in found.states} == {0, 1, 2}
    assert {s.queues.stale_quota for s in found.states if s.step < 2} == {2}
    assert {s.queues.stale_quota for s in found.states if s.step == 2} == {0}  # no step is left to work ahead for
    assert max(s.queues.accumulated for s in found.states) == found.states[0].queues.total == 8


class Manual:
    """A run whose commands end when the test says so, one second after another."""

    def __init__(self, settings: SchedulerSettings, *, start_us: int = 0) -> None:
        self.scheduler = Scheduler(settings)
        self.watch = Watch(self.scheduler)
        self.now_us = start_us
        self.commands: dict[WorkerId, WorkerCommand] = {}
        self._take(RunStarted(at_us=start_us))

    def finish(self, worker: WorkerId) -> None:
        command = self.commands.pop(worker)
        outcome = StepOutcome.APPLIED if isinstance(command, OptimizerStep) else None
        self.tell(lambda at: Finished(at_us=at, command=command, outcome=outcome))

    def fail(self, worker: WorkerId) -> None:
        command = self.commands.pop(worker)
        self.tell(lambda at: CommandFailed(at_us=at, command=command))

    def tell(self, event: Callable[[int], Event]) -> None:
        self.now_us += 1_000_000
        self._take(event(self.now_us))

    def worker(self, name: WorkerId, *, later_s: float = 0.0) -> WorkerView:
        state = self.watch.snapshot(self.now_us + int(later_s * 1e6))
        return next(worker for worker in state.workers if worker.name == name)

    def _take(self, event: Event) -> None:
        commands = self.scheduler.handle(event)
        self.watch.record([event], commands)
        for command in commands:
            assert not isinstance(command, StopRun)
            self.commands[command.worker] = command


def test_the_words_for_a_worker_say_what_it_does_and_since_when() -> None:
    clock = Manual(SchedulerSettings(steps=1, micro_batches=2, generators=(G0,), trainer=TRAINER), start_us=7_000_000)
    assert clock.worker(G0, later_s=3).state == "encoding step 0" and clock.worker(G0, later_s=3).for_s == 3
    assert clock.worker(TRAINER).state == "waiting"
    clock.finish(G0)
    found = clock.worker(G0)
    assert (found.state, found.shared_state) == ("generating 0.0 under version 0", "generating under version 0")
    clock.finish(G0)
    assert (clock.worker(G0).state, clock.worker(G0).shared_state) == ("scoring 0.0", "scoring")
    clock.finish(G0)
    assert (clock.worker(TRAINER).state, clock.worker(TRAINER).shared_state) == ("updating with 0.0", "updating")
    clock.fail(G0)
    assert clock.worker(G0).state == "generating 0.1 under version 0"
    assert clock.watch.snapshot(clock.now_us).elapsed_s == 4


def test_what_is_shown_depends_only_on_the_time_since_the_run_began() -> None:
    settings = SchedulerSettings(steps=3, micro_batches=2, generators=(G0,), trainer=TRAINER)
    early, late = Manual(settings), Manual(settings, start_us=7_000_000)
    while not early.scheduler.finished:
        assert early.watch.snapshot(early.now_us) == late.watch.snapshot(late.now_us)
        assert early.watch.step_metrics(early.now_us) == late.watch.step_metrics(late.now_us)
        for clock in (early, late):
            clock.finish(next(iter(clock.commands)))
    assert early.watch.snapshot(early.now_us) == late.watch.snapshot(late.now_us)


def test_a_clock_that_was_read_before_the_last_record_shows_no_negative_times() -> None:
    clock = Manual(SchedulerSettings(steps=1, micro_batches=1, generators=(G0,), trainer=TRAINER), start_us=7_000_000)
    clock.finish(G0)
    assert clock.watch.snapshot(7_000_000) == clock.watch.snapshot(clock.now_us)


def test_an_overdue_worker_is_in_trouble_until_it_is_done() -> None:
    clock = Manual(SchedulerSettings(steps=1, micro_batches=1, generators=(G0,), trainer=TRAINER))
    clock.tell(lambda at: WorkerOverdue(at_us=at, worker=G0))
    assert clock.worker(G0).state == "overdue: encoding step 0" and clock.worker(G0).trouble
    clock.finish(G0)
    assert clock.worker(G0).state == "generating 0.0 under version 0" and not clock.worker(G0).trouble


def test_a_lost_worker_is_in_trouble_until_it_has_joined_and_loads_the_weights_first() -> None:
    states = RUNS["lost and back"]().states
    of_g1 = [next(w for w in state.workers if w.name == G1) for state in states]
    assert [w.trouble for w in of_g1 if w.state == "lost, restarting"].count(False) == 0
    after = max(place for place, worker in enumerate(of_g1) if worker.state == "lost, restarting") + 1
    assert of_g1[after].state.startswith("loading weights of version")


def test_the_trainer_publishes_what_the_others_load_and_stale_work_is_called_so() -> None:
    words = {(w.pool, w.shared_state) for state in RUNS["stale"]().states for w in state.workers}
    assert {("trainer", "publishing version 1"), ("generators", "loading weights of version 1")} <= words
    assert {("generators", "generating under version 0, stale"), ("trainer", "switching to generating")} <= words
    assert ("trainer", "optimizing in step 0") in words


def test_at_the_end_everybody_is_done() -> None:
    last = RUNS["scorer"]().states[-1]
    assert {worker.state for worker in last.workers} == {"done"}
    assert (last.step, last.steps, last.left_s) == (3, 3, 0.0)
    assert [worker.name for worker in last.workers] == ["g0", "g1", "judge", "trainer"]


def test_the_last_step_is_told_of_as_its_metrics_were() -> None:
    found = RUNS["stale"]()
    for state in found.states:
        if state.step:
            metrics = found.metrics[state.step - 1]
            assert state.bubbles == (
                ("generators", metrics["bubble_fraction/generators"]),
                ("trainer", metrics["bubble_fraction/trainer"]),
            )
            assert (state.stale_fraction, state.tag_fraction) == (metrics["stale_fraction"], metrics["tag_fraction"])
    assert found.states[0].bubbles == () and found.states[0].stale_fraction is None


def test_staleness_and_tags_are_not_told_of_where_they_cannot_be() -> None:
    last = RUNS["no TAG"]().states[-1]
    assert last.bubbles and last.stale_fraction is None and last.tag_fraction is None


def test_the_time_left_is_that_of_steps_like_the_ones_before() -> None:
    # Without sync every step takes as long as the first: 2 generations, the last update, the optimizer.
    found = run(SimulationCosts(generate=(1.0,), update=0.3, optimizer=0.1), micro_batches=2, steps=4, scoring="inline")
    assert found.states[0].left_s is None
    ends = [state for before, state in zip(found.states, found.states[1:], strict=False) if state.step > before.step]
    assert [state.left_s for state in ends] == [pytest.approx(2.4 * left) for left in (3, 2, 1, 0)]
    in_between = [state.left_s for state in found.states if state.step == 3]
    assert in_between == sorted(in_between, reverse=True)
    assert found.watch.snapshot(found.end_us + 10**9).left_s == 0


def test_a_step_that_takes_longer_than_those_before_leaves_the_later_ones_their_time() -> None:
    found = run(SimulationCosts(generate=(1.0,), update=0.3, optimizer=0.1), micro_batches=2, steps=4, scoring="inline")
    middle = next(index for index, state in enumerate(found.states) if state.step == 2)
    settings = found.trace.settings
    scheduler = Scheduler(settings)
    watch = Watch(scheduler)
    for entry in found.trace.entries[: middle + 1]:
        scheduler.handle(*entry.events)
        watch.record(entry.events, entry.commands)
    assert watch.snapshot(10**9).left_s == pytest.approx(2.4)


def test_the_busy_share_of_a_worker_is_that_of_the_last_step_and_this_one() -> None:
    found = run(SimulationCosts(generate=(1.0,), update=0.3, optimizer=0.1), micro_batches=2, steps=3, scoring="inline")
    end = next(state for state in found.states if state.step == 2)
    shares = {worker.name: worker.busy_fraction for worker in end.workers}
    assert shares == {"g0": pytest.approx(2.0 / 2.4), "trainer": pytest.approx(0.7 / 2.4)}


def test_what_ended_before_a_step_and_is_reported_with_its_end_belongs_into_that_step() -> None:
    settings = SchedulerSettings(
        steps=2, micro_batches=2, generators=(G0, G1), trainer=TRAINER, scoring="inline", max_stale_fraction=0.5
    )
    clock = Manual(settings)
    clock.finish(G0)
    for worker in (G0, G1):
        clock.finish(worker)
    while not isinstance(clock.commands.get(TRAINER), OptimizerStep):
        clock.finish(TRAINER)
    clock.finish(G0)  # the prompts of step 1; g0 and then nobody generates for it
    start, end = clock.now_us, clock.now_us + 2_000_000
    events: list[Event] = [
        Finished(at_us=end, command=clock.commands[TRAINER], outcome=StepOutcome.APPLIED),
        Finished(at_us=start + 500_000, command=clock.commands[G0]),
    ]
    commands = clock.scheduler.handle(*sorted(events, key=lambda event: event.at_us))
    before = clock.watch.step_metrics(start)["bubble_fraction/generators"] * 2 * start
    clock.watch.record(events, commands)
    share = dict(clock.watch.snapshot(end).bubbles)["generators"]
    assert {worker.for_s for worker in clock.watch.snapshot(end).workers} == {0}  # commands are given once all is known
    assert share * 2 * end == pytest.approx(before + 2_000_000 + 1_500_000)  # all of g1's time and the rest of g0's


def test_a_run_that_goes_on_counts_from_the_version_that_it_starts_from() -> None:
    found = run(TWO, steps=7, first_version=5, tag="greedy")
    assert len(found.metrics) == 2
    assert found.states[0].step == 5 and found.states[-1].step == 7
    assert found.states[-1].left_s == 0 and all(state.left_s is None for state in found.states if state.step == 5)


def test_a_snapshot_may_be_taken_by_another_thread_at_any_time() -> None:
    settings = SchedulerSettings(
        steps=20, micro_batches=12, generators=(G0, G1), trainer=TRAINER, tag="greedy", max_stale_fraction=0.5
    )
    scheduler = Scheduler(settings)
    watch, executor = Watch(scheduler), SimulatedExecutor(settings, TWO, AWAY)
    over, broken, taken = threading.Event(), [], []

    def look() -> None:
        try:
            while not over.is_set():
                taken.append(watch.snapshot(executor.now_us()).step)
        except Exception as error:  # whatever it is, the test is to fail with it
            broken.append(error)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        drive(scheduler, executor, watch, command_timeout_s=1)
    finally:
        over.set()
        thread.join()
    assert not broken and taken and taken == sorted(taken)
