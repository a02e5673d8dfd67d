"""The Chrome trace keeps to the documented format, so that Perfetto and chrome://tracing read it."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from digenrl.ids import WorkerId
from digenrl.scheduling.commands import Score
from digenrl.simulation.costs import SimulationCosts
from digenrl.trace.chrome import chrome_trace
from digenrl.trace.record import Trace
from digenrl.trace.spans import spans
from digenrl.trace.timeline import Mark

Simulate = Callable[..., Trace]

REQUIRED = {
    "X": {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"},
    "i": {"name", "cat", "ph", "ts", "pid", "tid", "s"},
    "C": {"name", "ph", "ts", "pid", "args"},
    "M": {"name", "ph", "pid", "args"},
    "s": {"name", "cat", "ph", "ts", "pid", "tid", "id"},
    "t": {"name", "cat", "ph", "ts", "pid", "tid", "id"},
    "f": {"name", "cat", "ph", "ts", "pid", "tid", "id", "bp"},
}
"""Keys of each phase that we write (Trace Event Format)."""
METADATA = {"process_name": "name", "process_sort_index": "sort_index", "thread_name": "name", "thread_sort_index": "sort_index"}


def events_of(trace: Trace) -> list[dict[str, Any]]:
    plain = json.loads(json.dumps(chrome_trace(spans(trace))))
    assert plain["displayTimeUnit"] in ("ms", "ns")
    events: list[dict[str, Any]] = plain["traceEvents"]
    return events


def test_every_event_has_the_keys_that_the_format_asks_for_and_whole_microseconds(any_trace: Trace) -> None:
    events = events_of(any_trace)
    for event in events:
        assert REQUIRED[event["ph"]] <= set(event), event
        for key in {"ts", "dur", "pid", "tid"} & set(event):
            assert type(event[key]) is int
            assert event[key] >= 0
    for event in events:
        if event["ph"] == "M":
            assert set(event["args"]) == {METADATA[event["name"]]}
        elif event["ph"] == "C":
            assert all(type(value) is int for value in event["args"].values())
        elif event["ph"] == "i":
            assert event["s"] in ("g", "p", "t")


def test_every_row_is_in_order_of_time_and_its_spans_do_not_overlap(any_trace: Trace) -> None:
    rows = defaultdict(list)
    for event in events_of(any_trace):
        if "ts" in event and "tid" in event:
            rows[event["pid"], event["tid"]].append(event)
    for row in rows.values():
        times = [event["ts"] for event in row]
        assert times == sorted(times)
        complete = [event for event in row if event["ph"] == "X"]
        assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in pairwise(complete))
        assert all(event["dur"] > 0 for event in complete)


def test_every_worker_is_a_named_row_in_the_process_of_its_pool(any_trace: Trace) -> None:
    timeline, events = spans(any_trace), events_of(any_trace)
    processes = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    threads = {e["args"]["name"]: (e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    for pool in timeline.pools:
        for worker in pool.workers:
            assert threads[worker][0] == processes[f"{pool.name} (simulated)"]
    assert len({tid for _, tid in threads.values()}) == len(timeline.settings.workers) + 1
    assert not {tid for _, tid in threads.values()} & set(processes.values())
    drawn = {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}
    assert drawn <= set(threads.values())


def test_every_command_that_took_time_is_a_complete_event_with_its_reason(traces: dict[str, Trace]) -> None:
    timeline = spans(traces["stale"])
    events = [event for event in events_of(traces["stale"]) if event["ph"] == "X" and event["cat"] not in ("bubble", "lost")]
    expected = [span for span in timeline.spans if span.duration_us]
    assert len(events) == len(expected)
    for span, event in zip(expected, sorted(events, key=lambda e: (e["ts"], e["tid"])), strict=True):
        assert (event["ts"], event["dur"], event["cat"]) == (span.start_us, span.duration_us, span.kind)
        assert (event["args"]["reason"], event["args"]["policy_version"]) == (span.command.reason, span.policy_version)
        assert event["args"].get("micro_batch") == (str(span.micro_batch) if span.micro_batch else None)
    assert {"TAG", "stale generate", "score", "update"} <= {event["cat"] for event in events}


@pytest.mark.parametrize(("name", "phases"), [("lost and back", "stf"), ("inline", "sf"), ("pool", "stf"), ("one pool", "stf")])
def test_an_arrow_follows_every_micro_batch_from_generation_through_scoring_to_its_update(
    traces: dict[str, Trace], name: str, phases: str
) -> None:
    events = events_of(traces[name])
    settings = traces[name].settings
    ways = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            around = [
                other
                for other in events
                if other["ph"] == "X" and other["tid"] == event["tid"] and other["ts"] <= event["ts"] < other["ts"] + other["dur"]
            ]
            ways[event["id"]].append((event["ph"], around))
    assert len(ways) == settings.steps * settings.micro_batches
    kinds = [["generate", "TAG", "stale generate"], *([["score"]] if "t" in phases else []), ["update"]]
    for way in ways.values():
        assert "".join(phase for phase, _ in way) == phases
        bound = [around for _, around in way]
        assert all(len(around) == 1 for around in bound)
        assert len({around[0]["args"]["micro_batch"] for around in bound}) == 1
        assert all(around[0]["cat"] in allowed for around, allowed in zip(bound, kinds, strict=True))
        assert all(a[0]["ts"] + a[0]["dur"] <= b[0]["ts"] for a, b in pairwise(bound))


def test_an_arrow_comes_directly_behind_the_span_that_it_belongs_to(any_trace: Trace) -> None:
    """Perfetto binds it to whatever began last on its row."""
    last: dict[int, dict[str, Any]] = {}
    for event in events_of(any_trace):
        if event["ph"] in "stf":
            assert last[event["tid"]]["ph"] == "X"
            assert last[event["tid"]]["ts"] == event["ts"]
        if "tid" in event:
            last[event["tid"]] = event


def test_a_scoring_that_failed_is_not_on_the_way_of_its_micro_batch(traces: dict[str, Trace]) -> None:
    timeline = spans(traces["no TAG"])
    scored = next(span for span in timeline.spans if isinstance(span.command, Score))
    attempt = dataclasses.replace(scored, start_us=scored.start_us - 2, end_us=scored.start_us - 1, ended="failed")
    events = chrome_trace(dataclasses.replace(timeline, spans=(*timeline.spans, attempt)))["traceEvents"]
    assert not [event for event in events if event["ph"] in "stf" and event["ts"] == attempt.start_us]
    assert sum(event["ph"] == "t" for event in events) == 8
    assert [e["args"]["ended"] for e in events if "ended" in e.get("args", {})] == ["failed"]


def test_a_trace_that_stops_early_has_no_arrow_without_its_end(traces: dict[str, Trace]) -> None:
    whole = traces["greedy"]
    for length in range(1, len(whole.entries)):
        cut = dataclasses.replace(whole, entries=whole.entries[:length])
        phases = defaultdict(str)
        for event in events_of(cut):
            if event["ph"] in "stf":
                phases[event["id"]] += event["ph"]
        assert set(phases.values()) <= {"sf", "stf"}


def test_counters_start_with_all_pending_and_end_with_nothing_and_the_last_version(traces: dict[str, Trace]) -> None:
    events = [event for event in events_of(traces["no TAG"]) if event["ph"] == "C"]
    queues = [event["args"] for event in events if event["name"] == "queue"]
    versions = [event["args"]["version"] for event in events if event["name"] == "policy"]
    assert queues[0] == {"pending": 2, "SQ": 0, "UQ": 0}  # of four, two are claimed at the first instant
    assert queues[-1] == {"pending": 0, "SQ": 0, "UQ": 0}
    assert max(queue["SQ"] for queue in queues) <= 4
    assert versions == [0, 1, 2]
    resumed = [event["args"] for event in events_of(traces["resumed"]) if event.get("name") == "policy"]
    assert [counter["version"] for counter in resumed] == [3, 4, 5, 6]


def test_bubbles_losses_and_versions_can_be_seen(traces: dict[str, Trace]) -> None:
    events = events_of(traces["lost and back"])
    timeline = spans(traces["lost and back"])
    assert sum(event.get("cat") == "bubble" for event in events) == len(timeline.bubbles) > 0
    assert sum(event.get("cat") == "lost" for event in events) == 1
    instants = [event["cat"] for event in events if event["ph"] == "i"]
    assert instants.count(Mark.PUBLISHED) == 3
    assert {Mark.WORKER_LOST, Mark.WORKER_JOINED, Mark.WORKER_OVERDUE} <= set(instants)


def test_a_recorded_run_is_not_called_simulated(traces: dict[str, Trace]) -> None:
    recorded = dataclasses.replace(traces["no TAG"], source="run")
    assert "simulated" not in json.dumps(chrome_trace(spans(recorded)))
    assert "simulated" in json.dumps(chrome_trace(spans(traces["no TAG"])))


def test_names_of_workers_survive_whatever_they_contain(simulate: Simulate) -> None:
    names = (WorkerId('a"<b>\n'), WorkerId("生成器"))
    costs = SimulationCosts(generate=(1.0, 1.0), update=0.1)
    events = events_of(simulate(costs, generators=names, scoring="inline"))
    assert set(names) <= {event["args"]["name"] for event in events if event["name"] == "thread_name"}
