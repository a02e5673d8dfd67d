"""A timeline in Chrome's trace event format, for ui.perfetto.dev: drag the file onto the page.

The format is the "Trace Event Format" of Chromium's trace viewer (catapult/docs/trace-event-format.md names the document).
One process per pool, one thread per worker, and a process ``schedule`` with counters for the queues and the policy version.
Every command that took time is a complete event ("X"); arrows ("s", "t", "f") follow a micro-batch from its generation through
scoring to its update. Times are whole microseconds, and events are in order of time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from digenrl.ids import MicroBatchId, WorkerId
from digenrl.scheduling.commands import Accumulate, Generate, Score
from digenrl.trace.record import MADE
from digenrl.trace.timeline import Mark, Span, Spans, describe

Event = dict[str, Any]

_SCHEDULE = 1
"""Process of what belongs to no worker; the pools come after it."""
_VERSIONS = 100
"""Row of the versions, in the process of the schedule; the workers' rows are numbered from here on. Above every process number:
a thread that has the number of its process is shown as its main thread."""


def chrome_trace(timeline: Spans) -> dict[str, Any]:
    """The JSON object to write into a file."""
    rows = _rows(timeline)
    events = [
        *_metadata(timeline, rows),
        *sorted((*_work(timeline, rows), *_instants(timeline, rows), *_counters(timeline)), key=lambda event: event["ts"]),
    ]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"made_by": "DigenRL", "source": timeline.source},
    }


def _rows(timeline: Spans) -> dict[WorkerId, tuple[int, int]]:
    """Process and thread number of every worker."""
    threads = {worker: _VERSIONS + 1 + index for index, worker in enumerate(timeline.settings.workers)}
    return {
        worker: (_SCHEDULE + 1 + index, threads[worker]) for index, pool in enumerate(timeline.pools) for worker in pool.workers
    }


def _metadata(timeline: Spans, rows: dict[WorkerId, tuple[int, int]]) -> Iterator[Event]:
    made = f" ({MADE[timeline.source]})" if timeline.source in MADE else ""
    for index, name in enumerate(["schedule", *(pool.name for pool in timeline.pools)]):
        pid = _SCHEDULE + index
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name + made}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": index}}
    for name, (pid, tid) in (("versions", (_SCHEDULE, _VERSIONS)), *rows.items()):
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}


def _work(timeline: Spans, rows: dict[WorkerId, tuple[int, int]]) -> Iterator[Event]:
    """Commands, each with the arrow that leaves or reaches it, and the gaps that mean something."""
    links = _links(timeline)
    for span in timeline.spans:
        if not span.duration_us:
            continue
        pid, tid = rows[span.worker]
        yield {
            "ph": "X",
            "name": f"{span.kind} {describe(span.command)}",
            "cat": span.kind,
            "pid": pid,
            "tid": tid,
            "ts": span.start_us,
            "dur": span.duration_us,
            "args": _arguments(span),
        }
        if id(span) in links:
            phase, number = links[id(span)]
            # Directly behind its span and at its start: Perfetto binds an arrow to what has begun last on the row, which
            # later could be an instant inside the span, and at the same time a span without length.
            arrow = {"ph": phase, "id": number, "name": "micro-batch", "cat": "micro-batch", "pid": pid, "tid": tid}
            yield arrow | {"ts": span.start_us} | ({"bp": "e"} if phase == "f" else {})
    for gap in timeline.gaps:
        if gap.why in ("bubble", "lost"):
            pid, tid = rows[gap.worker]
            event = {"ph": "X", "name": gap.why, "cat": gap.why, "pid": pid, "tid": tid}
            yield event | {"ts": gap.start_us, "dur": gap.duration_us, "args": {}}


def _arguments(span: Span) -> dict[str, object]:
    found: dict[str, object] = {"policy_version": span.policy_version, "reason": span.command.reason}
    if span.micro_batch is not None:
        found |= {"micro_batch": str(span.micro_batch), "stale": span.stale}
    return found | ({"ended": span.ended} if span.ended != "finished" else {})


def _links(timeline: Spans) -> dict[int, tuple[str, int]]:
    """Phase and number of the arrow at a span (by its ``id``), for those that are on the way of a micro-batch.

    The way is the last generation that finished, the scoring after it and the update; attempts that came to nothing have no
    arrows. A way of one span alone has none either.
    """
    ways: dict[MicroBatchId, list[Span]] = {}
    for span in timeline.spans:
        micro_batch = span.micro_batch
        if micro_batch is None or span.ended in ("failed", "lost") or not span.duration_us:
            continue
        if isinstance(span.command, Generate):
            ways[micro_batch] = [span]
        elif isinstance(span.command, Score | Accumulate) and micro_batch in ways:
            ways[micro_batch].append(span)
    links = {}
    for number, way in enumerate((way for way in ways.values() if len(way) > 1), start=1):
        for index, span in enumerate(way):
            phase = "s" if index == 0 else "f" if index == len(way) - 1 else "t"
            links[id(span)] = (phase, number)
    return links


def _instants(timeline: Spans, rows: dict[WorkerId, tuple[int, int]]) -> Iterator[Event]:
    for instant in timeline.instants:
        event: Event = {"ph": "i", "name": instant.text or instant.mark, "cat": instant.mark, "ts": instant.at_us}
        pid, tid = _SCHEDULE, _VERSIONS
        if instant.worker is not None and instant.mark is not Mark.PUBLISHED:
            pid, tid = rows[instant.worker]
        yield event | {"pid": pid, "tid": tid, "s": "t"}


def _counters(timeline: Spans) -> Iterator[Event]:
    """Lengths of the queues and the policy version: of several samples at one instant only the last is a value that lasted."""
    samples = {sample.at_us: sample for sample in timeline.queues}
    version = None
    for at, sample in samples.items():
        event: Event = {"ph": "C", "pid": _SCHEDULE, "ts": at}
        # Perfetto shows each argument as a row of its own, named "queue pending" and so on.
        yield event | {"name": "queue", "args": {"pending": sample.pending, "SQ": sample.scoring, "UQ": sample.update}}
        if sample.policy_version != version:
            version = sample.policy_version
            yield event | {"name": "policy", "args": {"version": version}}
