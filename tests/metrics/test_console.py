"""What a person sees while a run goes on."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from digenrl.metrics.console import RunConsole


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
