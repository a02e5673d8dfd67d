"""What a person sees while a run goes on."""

from __future__ import annotations

import io
import re
import time

import pytest
from rich.console import Console

from digenrl.metrics.console import REFRESH_PER_SECOND, RunConsole
from digenrl.metrics.live import LiveState, QueueView, WorkerView


def plain_console(width: int = 60) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=width, force_terminal=False), out


METRICS = {"reward_mean": 0.62549, "samples_per_second": 12.34, "grad_norm": 0.0123}


def test_without_a_terminal_each_step_is_one_line() -> None:
    console, out = plain_console()
    with RunConsole(3, console) as shown:
        for step in range(3):
            shown.stepped(step, METRICS)
    lines = out.getvalue().splitlines()
    assert [line.split("reward")[0].split() for line in lines] == [["step", f"{n}/3"] for n in (1, 2, 3)]
    assert "reward 0.625" in lines[0] and "grad norm 1.23e-02" in lines[0] and "12.3 samples/s" in lines[0]
    assert lines[-1].endswith(" 0 s left")


def test_a_line_is_neither_wrapped_nor_taken_for_markup() -> None:
    console, out = plain_console(width=20)
    text = "run folder: runs/[bold]name[/bold]-" + "x" * 60
    RunConsole(1, console).say(text)
    assert out.getvalue() == text + "\n"


def test_a_warning_is_shown_once_per_kind() -> None:
    console, out = plain_console()
    shown = RunConsole(1, console)
    for kind, text in (("a", "first [x]"), ("a", "again"), ("b", "other")):
        shown.warn(kind, text)
    assert out.getvalue() == "warning: first [x]\nwarning: other\n"


def test_a_voided_step_without_numbers_is_shown_all_the_same() -> None:
    console, out = plain_console()
    with RunConsole(1, console) as shown:
        shown.stepped(0, {"reward_mean": float("nan"), "samples_per_second": float("nan")})
    assert "reward nan" in out.getvalue()


def test_on_a_terminal_the_bar_shows_how_far_the_run_is() -> None:
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True)
    with RunConsole(4, console) as shown:
        shown.stepped(2, METRICS)
    assert "3/4" in out.getvalue() and "reward 0.625" in out.getvalue()


def test_the_bar_ends_when_the_run_fails() -> None:
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True)
    with pytest.raises(ZeroDivisionError), RunConsole(4, console):
        raise ZeroDivisionError
    before = out.getvalue()
    console.print("after")
    assert out.getvalue().removeprefix(before).strip() == "after"  # a live bar would be drawn again below the text


def state_of(*workers: str, step: int = 3) -> LiveState:
    views = tuple(
        WorkerView(name=name, pool="generators", state="waiting", shared_state="waiting", for_s=1.0, busy_fraction=0.5)
        for name in workers
    )
    return LiveState(step=step, steps=20, workers=views, queues=QueueView(total=4), elapsed_s=5.0)


def terminal() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=100, force_terminal=True), out


def visible(out: io.StringIO) -> str:
    """What was written, without colours and movements of the cursor."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue()).replace("\r", "\n")


SEVERAL = {
    **METRICS,
    "bubble_fraction/generators": 0.031,
    "bubble_fraction/trainer": 0.125,
    "stale_fraction": 0.25,
    "tag_fraction": 0.0,
}


def test_without_a_terminal_a_step_of_several_workers_says_how_long_they_waited() -> None:
    console, out = plain_console()
    with RunConsole(1, console) as shown:
        shown.show(state_of("generator-0", "trainer"))
        shown.stepped(0, SEVERAL)
    (line,) = out.getvalue().splitlines()
    assert "  12.3 samples/s  bubble generators 3 %, trainer 12 %  stale 25 %  0 s, 0 s left" in line


def test_on_a_terminal_a_run_of_several_workers_is_a_table_with_the_numbers_of_the_last_step() -> None:
    console, out = terminal()
    with RunConsole(20, console) as shown:
        shown.show(state_of("generator-0", "trainer"))
        shown.stepped(2, SEVERAL)
    text = visible(out)
    assert "3/20 steps  reward 0.625  12.3 samples/s" in text
    assert "generator-0" in text and "worker" in text
    assert "step    3/20" not in text  # no line, the table says it


def test_the_newest_state_is_the_last_one_on_the_screen() -> None:
    console, out = terminal()
    with RunConsole(20, console) as shown:
        for step in range(5):
            shown.show(state_of("generator-0", "trainer", step=step))
    assert re.findall(r"(\d+)/20 steps", visible(out))[-1] == "4"


def test_the_table_moves_while_nothing_happens() -> None:
    console, out = terminal()
    asked: list[int] = []

    def source() -> LiveState:
        asked.append(len(asked))
        return state_of("generator-0", "trainer", step=len(asked))

    began = time.monotonic()
    with RunConsole(20, console) as shown:
        shown.follow(source)
        time.sleep(3.5 / REFRESH_PER_SECOND)
    drawings = visible(out).count("worker")
    assert len(set(re.findall(r"(\d+)/20 steps", visible(out)))) == drawings
    assert 3 <= drawings <= 3 + REFRESH_PER_SECOND * (time.monotonic() - began)


def test_many_states_are_not_drawn_faster_than_a_person_reads() -> None:
    console, out = terminal()
    began = time.monotonic()
    with RunConsole(20, console) as shown:
        for _ in range(2000):
            shown.show(state_of("generator-0", "trainer"))
    assert visible(out).count("worker") <= 3 + REFRESH_PER_SECOND * (time.monotonic() - began)


def test_lines_and_warnings_stand_above_the_table() -> None:
    console, out = terminal()
    with RunConsole(20, console) as shown:
        shown.show(state_of("generator-0", "trainer"))
        shown.say("held out [x]: reward 0.5")
        shown.warn("a", "careful")
        shown.warn("a", "careful")
    text = visible(out)
    assert text.count("held out [x]: reward 0.5\n") == 1 and text.count("warning: careful\n") == 1
    assert text.rindex("generator-0") > text.rindex("warning: careful")


def test_a_line_leaves_the_table_its_colours_and_its_width() -> None:
    out = io.StringIO()
    console = Console(file=out, width=40, force_terminal=True, color_system="standard")
    with RunConsole(20, console) as shown:
        shown.show(state_of("g0", "trainer"))
        shown.warn("a", "x" * 80)
    after = out.getvalue().split("x" * 80, 1)[1]
    assert "g0" in after and "\x1b[33m" not in after  # yellow is the warning alone
    lines = visible(out).split("x" * 80, 1)[1].splitlines()
    assert any("UQ" in line for line in lines) and max(map(len, lines)) == 40  # none runs over into the next row


def test_one_worker_keeps_the_bar() -> None:
    console, out = terminal()
    with RunConsole(4, console) as shown:
        shown.show(state_of("inline"))
        shown.stepped(2, METRICS)
    assert "training" in visible(out) and "3/4" in visible(out) and "inline" not in visible(out)


@pytest.mark.parametrize("before", [True, False])
def test_the_table_may_come_before_the_run_begins_or_while_it_goes_on(before: bool) -> None:
    console, out = terminal()
    shown = RunConsole(4, console)
    if before:
        shown.show(state_of("generator-0", "trainer"))
    with shown:
        shown.show(state_of("generator-0", "trainer"))
    end = visible(out)
    assert end.rstrip().splitlines()[-1].startswith("trainer")
    console.print("after")
    assert visible(out).removeprefix(end).strip() == "after"


def test_the_table_ends_when_the_run_fails() -> None:
    console, out = terminal()
    with pytest.raises(ZeroDivisionError), RunConsole(4, console) as shown:
        shown.show(state_of("generator-0", "trainer"))
        raise ZeroDivisionError
    before = out.getvalue()
    console.print("after")
    assert out.getvalue().removeprefix(before).strip() == "after"
