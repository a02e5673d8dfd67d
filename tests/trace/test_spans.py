"""The timeline says what the trace says: every command once, no time twice, no time missing."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from digenrl.errors import ConfigError
from digenrl.ids import MicroBatchId, WorkerId
from digenrl.scheduling.commands import Encode, Generate, Score, StopRun, SwitchMode
from digenrl.scheduling.events import (
    CommandFailed,
    ConditioningLost,
    Event,
    Finished,
    RunStarted,
    TrajectoryLost,
    WorkerJoined,
    WorkerLost,
    WorkerOverdue,
)
from digenrl.scheduling.scheduler import Scheduler
from digenrl.scheduling.settings import SchedulerSettings
from digenrl.simulation.costs import SimulationCosts
from digenrl.simulation.executor import Disturbance, Incident
from digenrl.trace.record import Entry, Trace
from digenrl.trace.spans import spans
from digenrl.trace.timeline import Kind, Mark, Spans

Simulate = Callable[..., Trace]
G0, G1, TRAINER = WorkerId("g0"), WorkerId("g1"), WorkerId("trainer")
ONE = SimulationCosts(generate=(1.0,), update=0.3, optimizer=0.1, sync=0.2)


def parts(timeline: Spans, worker: WorkerId) -> list[tuple[str, int, int]]:
    """Spans and gaps of a worker in milliseconds, in order."""
    spans_ = [(str(s.kind), s.start_us // 1000, s.end_us // 1000) for s in timeline.spans if s.worker == worker and s.duration_us]
    gaps = [(g.why, g.start_us // 1000, g.end_us // 1000) for g in timeline.gaps if g.worker == worker]
    return sorted([*spans_, *gaps], key=lambda part: part[1])


def test_one_generator_and_one_trainer_without_tag_are_timed_as_by_hand(simulate: Simulate) -> None:
    timeline = spans(simulate(ONE, micro_batches=2, steps=2, scoring="inline"))
    assert parts(timeline, G0) == [
        ("generate", 0, 1000),
        ("generate", 1000, 2000),
        ("idle", 2000, 2400),
        ("sync", 2400, 2600),
        ("generate", 2600, 3600),
        ("generate", 3600, 4600),
        ("idle", 4600, 5000),
    ]
    assert parts(timeline, TRAINER) == [
        ("bubble", 0, 1000),
        ("update", 1000, 1300),
        ("bubble", 1300, 2000),
        ("update", 2000, 2300),
        ("optimizer", 2300, 2400),
        ("sync", 2400, 2600),
        ("bubble", 2600, 3600),
        ("update", 3600, 3900),
        ("bubble", 3900, 4600),
        ("update", 4600, 4900),
        ("optimizer", 4900, 5000),
    ]
    assert [(instant.at_us, instant.policy_version) for instant in timeline.published] == [(2_400_000, 1), (5_000_000, 2)]


def test_every_command_is_one_span(any_trace: Trace) -> None:
    commands = Counter(c for entry in any_trace.entries for c in entry.commands if not isinstance(c, StopRun))
    assert Counter(span.command for span in spans(any_trace).spans) == commands


def assert_no_time_twice_and_none_missing(timeline: Spans) -> None:
    for worker in timeline.settings.workers:
        own = [*(s for s in timeline.spans if s.worker == worker), *(g for g in timeline.gaps if g.worker == worker)]
        cursor = timeline.start_us
        for start, end in sorted((part.start_us, part.end_us) for part in own):
            assert start == cursor
            cursor = end
        assert cursor == timeline.end_us or not own


def test_the_spans_and_gaps_of_a_worker_are_all_of_its_time(any_trace: Trace) -> None:
    assert_no_time_twice_and_none_missing(spans(any_trace))


@settings(max_examples=40, deadline=None, database=None)
@given(
    generate=st.lists(st.floats(0.1, 3), min_size=1, max_size=4),
    update=st.floats(0.05, 1),
    micro_batches=st.integers(1, 7),
    tag=st.sampled_from(["never", "greedy", "bts_plus"]),
    away=st.none() | st.tuples(st.floats(0.1, 3), st.floats(0.1, 3)),
    seed=st.integers(0, 99),
)
def test_no_time_is_counted_twice_under_any_costs_and_losses(
    simulate: Simulate,
    generate: list[float],
    update: float,
    micro_batches: int,
    tag: str,
    away: tuple[float, float] | None,
    seed: int,
) -> None:
    many = len(generate)
    costs = SimulationCosts(
        generate=tuple(generate), score=(0.1,) * many, update=update, tag=1.0, switch_in=0.1, switch_out=0.1, optimizer=0.1
    )
    incidents = ()
    if away is not None:
        incidents = (Incident(at_s=away[0], worker=G0), Incident(at_s=sum(away), worker=G0, joins=True))
    disturbance = Disturbance(jitter=0.2, straggler_share=0.1, seed=seed, incidents=incidents)
    trace = simulate(costs, disturbance, micro_batches=micro_batches, tag=tag, max_stale_fraction=0.5)
    assert_no_time_twice_and_none_missing(spans(trace))


def test_bubbles_are_the_times_in_which_the_scheduler_left_the_trainer_without_a_command(any_trace: Trace) -> None:
    scheduler, expected, before = Scheduler(any_trace.settings), 0, None
    for entry in any_trace.entries:
        now = entry.events[0].at_us
        if before is not None and scheduler.state.step is not None and scheduler.state.trainer.running is None:
            expected += now - before
        scheduler.handle(*entry.events)
        before = now
    assert sum(gap.duration_us for gap in spans(any_trace).bubbles) == expected


def test_the_queues_are_those_of_the_scheduler(any_trace: Trace) -> None:
    timeline = spans(any_trace)
    samples = {sample.at_us: sample for sample in timeline.queues}
    times = sorted(samples)
    scheduler, compared = Scheduler(any_trace.settings), 0
    instants = [entry.events[0].at_us for entry in any_trace.entries]
    for number, entry in enumerate(any_trace.entries):
        scheduler.handle(*entry.events)
        now, state = instants[number], scheduler.state
        last_of_its_time = number + 1 == len(instants) or instants[number + 1] > now
        # The scheduler takes a micro-batch out of its queue when the trainer starts to switch its mode for it.
        switching = isinstance(state.trainer.running, SwitchMode)
        if switching or not last_of_its_time or state.step is None or state.stopped:
            continue
        sample = samples[max(at for at in times if at <= now)]
        step = state.step
        found = (sample.policy_version, sample.pending, sample.scoring, sample.update)
        assert found == (state.policy_version, step.pending, len(step.scoring_queue), len(step.update_queue))
        compared += 1
    assert compared or not any_trace.settings.steps


def test_generation_by_the_trainer_is_tag_and_by_a_worker_in_turn_is_not(traces: dict[str, Trace]) -> None:
    greedy, turn = spans(traces["greedy"]), spans(traces["one pool"])
    tags = [span for span in greedy.spans if span.tag]
    assert tags
    assert all(span.kind is Kind.TAG and span.worker == TRAINER and isinstance(span.command, Generate) for span in tags)
    assert all(span.tag == (span.worker == TRAINER) for span in greedy.spans if isinstance(span.command, Generate))
    assert any(isinstance(span.command, Generate) and span.worker == G0 == turn.settings.trainer for span in turn.spans)
    assert not any(span.tag for span in turn.spans)


def test_a_stale_trajectory_is_stale_when_it_is_made_scored_and_accumulated(traces: dict[str, Trace]) -> None:
    timeline = spans(traces["stale"])
    stale = [span for span in timeline.spans if span.stale]
    by_micro_batch = Counter(span.micro_batch for span in stale)
    assert by_micro_batch
    assert set(by_micro_batch.values()) == {3}
    assert all(span.micro_batch is not None and span.policy_version == span.micro_batch.step - 1 for span in stale)
    per_step = Counter(micro_batch.step for micro_batch in by_micro_batch if micro_batch is not None)
    assert max(per_step.values()) <= timeline.settings.stale_quota == 2
    assert {span.kind for span in stale} == {Kind.STALE_GENERATE, Kind.SCORE, Kind.UPDATE}
    assert not any(span.stale for span in spans(traces["greedy"]).spans)


def test_a_lost_worker_has_a_lost_span_and_is_away_until_it_joins(traces: dict[str, Trace]) -> None:
    timeline = spans(traces["lost and back"])
    (lost,) = (span for span in timeline.spans if span.ended == "lost")
    assert (lost.worker, lost.end_us) == (G1, 2_500_000)
    (away,) = (gap for gap in timeline.gaps if gap.why == "lost")
    assert (away.worker, away.start_us, away.end_us) == (G1, 2_500_000, 5_000_000)
    happened = [(i.at_us, i.mark) for i in timeline.instants if i.worker == G1 and i.mark is not Mark.WORKER_OVERDUE]
    assert happened == [(2_500_000, Mark.WORKER_LOST), (5_000_000, Mark.WORKER_JOINED)]
    again = [s for s in timeline.spans if s.micro_batch == lost.micro_batch and isinstance(s.command, Generate)]
    assert [span.ended for span in again] == ["lost", "finished"]


def test_a_trace_that_stops_early_has_open_spans_to_its_last_event(traces: dict[str, Trace]) -> None:
    whole = traces["no TAG"]
    cut = dataclasses.replace(whole, entries=whole.entries[:4])
    timeline = spans(cut)
    still = [span for span in timeline.spans if span.ended == "open"]
    assert {span.worker for span in still} == {G0, G1, TRAINER}
    assert {span.end_us for span in still} == {timeline.end_us} == {cut.entries[-1].events[0].at_us}
    assert_no_time_twice_and_none_missing(timeline)


def test_a_stopped_run_says_so_and_ends_there(traces: dict[str, Trace]) -> None:
    timeline = spans(traces["trainer lost"])
    assert [instant.mark for instant in timeline.instants] == [Mark.WORKER_LOST, Mark.STOPPED]
    assert timeline.end_us == 1_500_000
    assert timeline.published == ()


def test_a_version_is_published_once_per_step_however_many_updates_it_has(traces: dict[str, Trace]) -> None:
    timeline = spans(traces["two updates"])
    assert [instant.policy_version for instant in timeline.published] == [1, 2]
    assert sum(span.kind is Kind.OPTIMIZER for span in timeline.spans) == 4


def test_a_resumed_run_goes_on_counting_where_it_was_stopped_and_is_over_after_its_last_step(traces: dict[str, Trace]) -> None:
    timeline = spans(traces["resumed"])
    assert [instant.policy_version for instant in timeline.published] == [4, 5, 6]
    assert (timeline.queues[0].policy_version, timeline.queues[-1].policy_version) == (3, 6)
    first = [span for span in timeline.spans if span.stale and span.micro_batch is not None and span.micro_batch.step == 3]
    assert {span.micro_batch.index for span in first if span.micro_batch} == {0, 1}
    assert {(span.policy_version, span.kind) for span in first} == {
        (2, Kind.STALE_GENERATE),
        (2, Kind.SCORE),
        (2, Kind.UPDATE),
    }
    last = timeline.published[-1].at_us
    assert {gap.why for gap in timeline.gaps if gap.start_us >= last} <= {"done"}
    assert all(gap.end_us <= last for gap in timeline.bubbles)


def test_the_time_after_the_last_step_of_a_resumed_run_is_not_a_bubble(simulate: Simulate) -> None:
    costs = dataclasses.replace(ONE, save=5.0)
    timeline = spans(simulate(costs, micro_batches=2, steps=4, first_version=3, scoring="inline", save_at=(4,)))
    assert parts(timeline, G0)[-1] == ("done", 2400, 7600)  # while the trainer publishes and saves
    assert ("bubble", 1300, 2000) in parts(timeline, TRAINER)


def test_the_pools_are_those_of_the_settings(traces: dict[str, Trace]) -> None:
    def named(name: str) -> list[tuple[str, int]]:
        return [(pool.name, len(pool.workers)) for pool in spans(traces[name]).pools]

    assert named("no TAG") == [("generators", 2), ("trainer", 1)]
    assert named("pool") == [("generators", 2), ("scorers", 1), ("trainer", 1)]
    assert named("one pool") == [("colocated", 2)]


def by_hand(*events: Event) -> Trace:
    """What the scheduler answers to these events, each at its own instant."""
    setup = SchedulerSettings(steps=1, micro_batches=2, generators=(G0, G1), trainer=TRAINER)
    scheduler = Scheduler(setup)
    return Trace(setup, tuple(Entry((event,), tuple(scheduler.handle(event))) for event in events))


ENCODED = Finished(at_us=0, command=Encode(worker=G0, step=0, reason="once per step, before its first trajectory"))
FIRST = Generate(worker=G0, micro_batch=MicroBatchId(0, 0), policy_version=0, reason="first of 2 pending")
SCORE = Score(worker=G0, micro_batch=MicroBatchId(0, 0), reason="oldest of 1 waiting; scoring goes before new generation")
GENERATED = Finished(at_us=5, command=FIRST)


def test_a_failed_generation_is_a_failed_span_and_its_micro_batch_is_pending_again() -> None:
    trace = by_hand(RunStarted(at_us=0), ENCODED, CommandFailed(at_us=5, command=FIRST, error="out of memory"))
    timeline = spans(trace)
    assert [(span.end_us, span.ended) for span in timeline.spans if span.command == FIRST] == [(5, "failed")]
    assert timeline.queues[-1].pending == 0  # the free generator has claimed it again
    assert [span.micro_batch for span in timeline.spans if span.start_us == 5] == [MicroBatchId(0, 0)]


def test_a_lost_trajectory_is_marked_at_the_worker_that_had_made_it_and_is_pending_again() -> None:
    scored = Finished(at_us=6, command=SCORE)
    lost = TrajectoryLost(at_us=8, micro_batch=MicroBatchId(0, 0))
    with pytest.raises(ConfigError, match=r"the trajectory of 0\.0 was lost, and there was none"):
        spans(Trace(by_hand().settings, (Entry((lost,), ()),)))
    trace = by_hand(RunStarted(at_us=0), ENCODED, WorkerLost(at_us=1, worker=G1), GENERATED, WorkerOverdue(at_us=6, worker=G0))
    instant = Entry((scored,), ()), Entry((lost,), ())
    timeline = spans(dataclasses.replace(trace, entries=(*trace.entries, *instant)))
    assert [(i.worker, i.micro_batch) for i in timeline.instants if i.mark is Mark.TRAJECTORY_LOST] == [(G0, MicroBatchId(0, 0))]
    assert (timeline.queues[-1].pending, timeline.queues[-1].update) == (2, 0)


def pending_after(*events: Event) -> list[int]:
    """Of a step of two micro-batches: how many were pending after each of these events."""
    trace = by_hand(*events)
    return [spans(dataclasses.replace(trace, entries=trace.entries[: n + 1])).queues[-1].pending for n in range(len(events))]


@pytest.mark.parametrize("end", [Finished(at_us=7, command=SCORE), CommandFailed(at_us=7, command=SCORE, untouched=True)])
def test_a_trajectory_that_is_lost_while_it_is_scored_is_pending_when_the_scorer_is_done(end: Event) -> None:
    lost = TrajectoryLost(at_us=6, micro_batch=MicroBatchId(0, 0))
    start = (RunStarted(at_us=0), ENCODED, WorkerLost(at_us=1, worker=G1), GENERATED)
    # Two, none of which can begin; one is generated, the other given back by the lost worker; it stays while the first is scored.
    assert pending_after(*start, lost, end) == [2, 0, 1, 1, 1, 1]
    twice = by_hand(*start, lost)
    with pytest.raises(ConfigError, match=r"the trajectory of 0\.0 was lost, and there was none"):
        spans(dataclasses.replace(twice, entries=(*twice.entries, Entry((lost,), ()))))


def test_lost_prompts_are_marked_at_the_worker_that_had_encoded_them() -> None:
    lost = ConditioningLost(at_us=7, step=0)
    timeline = spans(by_hand(RunStarted(at_us=0), ENCODED, lost))
    (instant,) = (i for i in timeline.instants if i.mark is Mark.CONDITIONING_LOST)
    assert (instant.worker, instant.at_us, instant.text) == (G0, 7, "the encoded prompts of step 0 were lost")
    again = by_hand(RunStarted(at_us=0), ENCODED, lost)
    for entries in ((START, Entry((ConditioningLost(at_us=9, step=0),), ())), (*again.entries, Entry((lost,), ()))):
        with pytest.raises(ConfigError, match="the encoded prompts of step 0 were lost, and there were none"):
            spans(Trace(again.settings, entries))


START = Entry((RunStarted(at_us=9),), ())
BUSY = Entry((RunStarted(at_us=9),), (FIRST,))


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ((START, Entry((Finished(at_us=10, command=FIRST),), ())), "Instant 1 of the trace: the end of Generate"),
        ((BUSY, Entry((Finished(at_us=8, command=FIRST),), ())), "lies before 9 us"),
        ((BUSY, Entry((), (FIRST,))), "busy or lost"),
        ((START, Entry((), (SCORE,))), "does not wait for that"),
        (
            (START, Entry((), (dataclasses.replace(FIRST, micro_batch=MicroBatchId(7, 0)),))),
            "micro-batch 7.0 is of none of the 1",
        ),
        ((START, Entry((), (dataclasses.replace(FIRST, micro_batch=MicroBatchId(0, 5)),))), "does not wait for that"),
        ((START, Entry((), (dataclasses.replace(FIRST, worker=WorkerId("g7")),))), "g7 is no worker of this run"),
        ((START, Entry((WorkerOverdue(at_us=9, worker=WorkerId("g7")),), ())), "g7 is no worker of this run"),
        ((START, Entry((WorkerJoined(at_us=9, worker=G0),), ())), "g0 joined, and was not lost"),
        ((START, Entry((WorkerLost(at_us=9, worker=G0),), (FIRST,))), "busy or lost"),
        ((START, Entry((WorkerLost(at_us=9, worker=G0),), ()), Entry((WorkerLost(at_us=9, worker=G0),), ())), "lost before"),
    ],
)
def test_a_trace_that_contradicts_itself_is_refused_with_the_instant(entries: tuple[Entry, ...], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        spans(Trace(by_hand().settings, entries))
    assert caught.value.what.startswith(f"Instant {len(entries) - 1} of the trace: ")


def test_a_trace_without_an_entry_is_an_empty_timeline() -> None:
    timeline = spans(Trace(by_hand().settings, ()))
    assert (timeline.spans, timeline.gaps, timeline.duration_us) == ((), (), 0)
