"""The live table fits its place, whatever the number of workers, and hides nobody who needs a person."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from digenrl.metrics.live import MOST_ROWS, LiveState, QueueView, WorkerView, bubble_words, live_table

QUEUES = QueueView(pending=3, scoring=1, update=2, accumulated=5, total=12, stale_used=1, stale_quota=3)


def worker(name: str, state: str = "waiting", shared: str | None = None, **changes: object) -> WorkerView:
    plain = WorkerView(name=name, pool="generators", state=state, shared_state=shared or state, for_s=12.0, busy_fraction=0.5)
    return replace(plain, **changes)  # type: ignore[arg-type]


def generating(count: int, first: int = 0) -> tuple[WorkerView, ...]:
    found = []
    for index in range(first, first + count):
        state, shared = f"generating 3.{index} under version 3", "generating under version 3"
        found.append(worker(f"generator-{index}", state, shared, for_s=float(index), busy_fraction=index / 100))
    return tuple(found)


TRAINER = worker("trainer", "updating with 3.1", "updating", pool="trainer", busy_fraction=0.876)
STATE = LiveState(
    step=3,
    steps=20,
    workers=(*generating(2), worker("generator-2"), TRAINER),
    queues=QUEUES,
    elapsed_s=750.0,
    left_s=3723.4,
    bubbles=(("generators", 0.031), ("trainer", 0.125)),
    stale_fraction=0.25,
    tag_fraction=0.08,
    reward=0.62549,
    samples_per_second=12.34,
)


def drawn(state: LiveState, width: int = 100) -> list[str]:
    out = io.StringIO()
    Console(force_terminal=True, width=width, file=out, color_system="truecolor").print(live_table(state))
    return [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue()).splitlines()]


def test_the_table_tells_of_the_run_its_queues_its_last_step_and_each_worker() -> None:
    head, queues, last, *table = drawn(STATE)
    assert head.split(maxsplit=1)[1] == "3/20 steps  reward 0.625  12.3 samples/s  elapsed 0:12:30  ETA 1:02:03"
    assert queues == "step 3: 3 pending, SQ 1, UQ 2, 5 of 12 accumulated; stale for step 4: 1 of 3"
    assert last == "step 2: bubble generators 3 %, trainer 12 %; 25 % stale; 8 % by the trainer (TAG)"
    assert [re.split(r"\s{2,}", row) for row in table] == [
        ["worker", "state", "for", "busy"],
        ["generator-0", "generating 3.0 under version 3", "0 s", "0 %"],
        ["generator-1", "generating 3.1 under version 3", "1 s", "1 %"],
        ["generator-2", "waiting", "12 s", "50 %"],
        ["trainer", "updating with 3.1", "12 s", "88 %"],
    ]


def test_what_is_not_known_yet_is_left_out() -> None:
    start = LiveState(step=0, steps=20, workers=STATE.workers, queues=replace(QUEUES, stale_quota=0), elapsed_s=3.0)
    head, queues, *table = drawn(start)
    assert head.split(maxsplit=1)[1] == "0/20 steps  elapsed 3 s"
    assert queues == "step 0: 3 pending, SQ 1, UQ 2, 5 of 12 accumulated"
    assert table[0].startswith("worker")


def test_after_the_last_step_no_queue_is_shown() -> None:
    assert drawn(replace(STATE, step=20, queues=QueueView()))[1] == "all steps are done"


@pytest.mark.parametrize("count", [3, MOST_ROWS - 1, MOST_ROWS, 64, 4096])
def test_the_table_is_small_whatever_the_number_of_workers(count: int) -> None:
    long = replace(STATE, step=1234, steps=12345, reward=-1234.5678, samples_per_second=123456.7, left_s=1e6, elapsed_s=1e6)
    names = tuple(replace(w, name=f"{w.name}-with-a-name-that-is-long", state=w.state * 3) for w in generating(count))
    lines = drawn(replace(long, workers=(*names, replace(TRAINER, for_s=1e6))))
    assert len(lines) <= 4 + MOST_ROWS <= 20
    assert all(len(line) <= 100 for line in lines)
    assert lines[-1].split()[-1] == "%"  # the last column is not pushed out


def test_many_workers_that_do_the_same_share_a_row_with_the_longest_time_and_the_mean_share() -> None:
    busy = (*generating(41), *(worker(f"generator-{index}") for index in range(41, 64)))
    rows = [re.split(r"\s{2,}", row) for row in drawn(replace(STATE, workers=(*busy, TRAINER)))[4:]]
    assert rows == [
        ["generator-0 and 40 more", "generating under version 3", "40 s", "20 %"],
        ["generator-41 and 22 more", "waiting", "12 s", "50 %"],
        ["trainer", "updating with 3.1", "12 s", "88 %"],
    ]


def test_workers_in_trouble_come_first_in_a_large_run_and_by_name() -> None:
    lost = worker("generator-50", "lost, restarting", trouble=True)
    rows = drawn(replace(STATE, workers=(*generating(50), lost, *generating(13, first=51), TRAINER)))[4:]
    assert rows[0].split()[0] == "generator-50"
    assert rows[1].startswith("generator-0 and 62 more")


def test_workers_of_different_pools_share_no_row() -> None:
    scorers = tuple(worker(f"scorer-{index}", pool="scorers") for index in range(20))
    idle = tuple(worker(f"generator-{index}") for index in range(20))
    rows = drawn(replace(STATE, workers=(*idle, *scorers)))[4:]
    assert [row.split("  ")[0] for row in rows] == ["generator-0 and 19 more", "scorer-0 and 19 more"]


def test_what_does_not_fit_is_counted() -> None:
    different = tuple(worker(f"generator-{index}", f"evaluating version {index}") for index in range(64))
    rows = drawn(replace(STATE, workers=different))[4:]
    assert len(rows) == MOST_ROWS
    assert rows[-1] == f"... and {64 - MOST_ROWS + 1} more"


def test_columns_stay_where_they_are_when_the_words_change() -> None:
    def places(state: str) -> tuple[int, int]:
        head = drawn(replace(STATE, workers=(worker("generator-0", state), TRAINER)))[3]
        return head.index("for"), head.index("busy")

    assert places("waiting") == places("generating 123.45 under version 123, stale")


@pytest.mark.parametrize("width", [50, 80, 100, 200])
def test_the_table_fits_the_screen(width: int) -> None:
    lines = drawn(STATE, width)[4 if width >= 100 else 5 :]
    assert all(len(line) <= min(width, 100) for line in lines)
    assert lines[-1].endswith("88 %") and lines[-1].startswith("trainer")


def test_words_are_never_taken_for_markup() -> None:
    rows = drawn(replace(STATE, workers=(worker("[red]a[/red]", "[bold]b[/bold]"), TRAINER)))
    assert "[red]a[/red]" in rows[4] and "[bold]b[/bold]" in rows[4]


def test_shares_of_no_pools_are_no_words() -> None:
    assert bubble_words(()) == ""
    assert bubble_words((("generators", 0.031), ("trainer", 0.125))) == "bubble generators 3 %, trainer 12 %"
