"""The charts show what they should, explain what they show, and keep text apart and inside."""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from digenrl.errors import ConfigError
from digenrl.ids import WorkerId
from digenrl.simulation.costs import SimulationCosts
from digenrl.simulation.executor import Disturbance
from digenrl.trace.gantt import MOST_LANES, svg_gantt
from digenrl.trace.gantt_legend import NAMES
from digenrl.trace.record import Trace
from digenrl.trace.spans import spans
from digenrl.trace.svg import Axis, text_width
from digenrl.trace.terminal import text_gantt
from digenrl.trace.timeline import Kind, Mark

Simulate = Callable[..., Trace]
SVG = "{http://www.w3.org/2000/svg}"


def parsed(picture: str) -> ElementTree.Element:
    return ElementTree.fromstring(picture)


def texts(picture: str) -> list[str]:
    return [text.text or "" for text in parsed(picture).iter(f"{SVG}text")]


def boxes(picture: str) -> Iterator[tuple[str, float, float, float, float]]:
    """Content, left, top, right and bottom of every text, as wide as it can be in any usual font."""
    for text in parsed(picture).iter(f"{SVG}text"):
        size, x, y = (float(text.attrib[name]) for name in ("font-size", "x", "y"))
        width = text_width(text.text or "", size)
        left = x - {"middle": width / 2, "end": width}.get(text.get("text-anchor", ""), 0)
        yield text.text or "", left, y - 0.75 * size, left + width, y + 0.2 * size


def bars(picture: str, kind: Kind) -> list[ElementTree.Element]:
    return [node for node in parsed(picture).iter() if node.get("class") == f"bar {kind.replace(' ', '-')}"]


def large(simulate: Simulate) -> Trace:
    costs = SimulationCosts(
        generate=tuple(1 + i / 50 for i in range(63)), score=(0.05,) * 63, update=0.02, tag=1.0, optimizer=0.3, sync=0.2
    )
    disturbance = Disturbance(jitter=0.1, straggler_share=0.02)
    return simulate(costs, disturbance, micro_batches=200, steps=3, tag="greedy", max_stale_fraction=0.1)


def long(simulate: Simulate) -> Trace:
    costs = SimulationCosts(generate=(1.0, 1.3), score=(0.05, 0.05), update=0.3, tag=1.0, optimizer=0.1, sync=0.1)
    return simulate(costs, Disturbance(jitter=0.2), micro_batches=12, steps=150, tag="greedy", max_stale_fraction=0.25)


def assert_tidy(picture: str) -> None:
    root = parsed(picture)
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    found = list(boxes(picture))
    for content, left, top, right, bottom in found:
        assert 0 <= left <= right <= width, content
        assert 0 <= top <= bottom <= height, content
    found.sort(key=lambda box: box[1])
    for index, (content, _, top, right, bottom) in enumerate(found):
        for other, left, other_top, _, other_bottom in found[index + 1 :]:
            if left >= right:
                break
            assert other_top >= bottom or other_bottom <= top, f"{content!r} and {other!r} overlap"
    for rect in root.iter(f"{SVG}rect"):
        if "x" in rect.attrib:
            assert float(rect.attrib["width"]) >= 0
            assert 0 <= float(rect.attrib["x"]) <= float(rect.attrib["x"]) + float(rect.attrib["width"]) <= width + 0.01


def test_no_text_overlaps_another_or_leaves_the_picture(any_trace: Trace) -> None:
    assert_tidy(svg_gantt(spans(any_trace)))
    assert_tidy(svg_gantt(spans(any_trace), width=700))


def test_64_workers_and_many_commands_stay_tidy_and_small(simulate: Simulate) -> None:
    wide = svg_gantt(spans(large(simulate)))
    assert_tidy(wide)
    assert len([text for text in texts(wide) if re.fullmatch(r"g\d+", text)]) == 63
    timeline = spans(long(simulate))
    assert len(timeline.spans) > 5_000
    narrow = svg_gantt(timeline)
    assert_tidy(narrow)
    assert sum(len(bars(narrow, kind)) for kind in Kind) < 0.75 * len(timeline.spans)
    assert len(narrow) < 500_000
    assert "step 7" not in texts(narrow)


def test_more_workers_than_lanes_are_cut_with_a_word_and_the_trainer_stays(simulate: Simulate) -> None:
    costs = SimulationCosts(generate=(1.0,) * 100, update=0.1)
    picture = svg_gantt(spans(simulate(costs, steps=1, micro_batches=100, scoring="inline")))
    assert f"generators, the first {MOST_LANES - 1} of 100" in texts(picture)
    assert texts(picture).count("trainer") == 2  # the pool and its worker
    assert_tidy(picture)


def test_the_legend_names_the_kinds_that_occur_and_no_others(any_trace: Trace) -> None:
    timeline = spans(any_trace)
    present = {span.kind for span in timeline.spans if span.duration_us}
    named = set(texts(svg_gantt(timeline)))
    assert {kind for kind, name in NAMES.items() if name in named} == present
    assert ("bubble: the trainer waits" in named) == bool(timeline.bubbles)
    assert ("worker away" in named) == any(gap.why == "lost" for gap in timeline.gaps)
    assert ("scoring or update of stale trajectories" in named) == any(
        span.stale and span.kind is not Kind.STALE_GENERATE for span in timeline.spans
    )


def test_every_command_that_is_wide_enough_is_a_bar_of_its_kind(traces: dict[str, Trace]) -> None:
    timeline = spans(traces["stale"])
    picture = svg_gantt(timeline)
    for kind in Kind:
        assert len(bars(picture, kind)) == sum(span.kind is kind and span.duration_us > 0 for span in timeline.spans)


def test_bars_lie_where_their_times_say(traces: dict[str, Trace]) -> None:
    timeline = spans(traces["no TAG"])
    rects = [bar.find(f"{SVG}rect") for bar in bars(svg_gantt(timeline), Kind.UPDATE)]
    found = sorted((float(r.attrib["x"]), float(r.attrib["width"])) for r in rects if r is not None)
    updates = sorted((s.start_us, s.duration_us) for s in timeline.spans if s.kind is Kind.UPDATE)
    (x0, width0), (t0, duration0) = found[0], updates[0]
    for (x, width), (start, duration) in zip(found, updates, strict=True):
        assert width == pytest.approx(width0 * duration / duration0, abs=0.05)
        assert x == pytest.approx(x0 + (start - t0) * width0 / duration0, abs=1)


def test_tag_stale_work_and_bubbles_are_hatched_and_ordinary_work_is_not(traces: dict[str, Trace]) -> None:
    timeline = spans(traces["stale"])
    picture = svg_gantt(timeline)
    patterns = {node.get("id") for node in parsed(picture).iter(f"{SVG}pattern")}

    def hatched(kind: Kind) -> list[str]:
        fills = [[rect.get("fill", "") for rect in bar.iter(f"{SVG}rect")] for bar in bars(picture, kind)]
        return [fill[5:-1] for bar in fills for fill in bar if fill.startswith("url(#")]

    for kind in (Kind.TAG, Kind.STALE_GENERATE):
        assert len(hatched(kind)) == len(bars(picture, kind)) > 0
        assert set(hatched(kind)) <= patterns
    assert hatched(Kind.GENERATE) == []
    assert len(hatched(Kind.UPDATE)) == sum(span.stale and span.kind is Kind.UPDATE for span in timeline.spans)
    bubbles = [node for node in parsed(picture).iter(f"{SVG}rect") if node.get("class") == "bubble"]
    assert len(bubbles) == len(timeline.bubbles)
    assert {node.attrib["fill"][5:-1] for node in bubbles} <= patterns


def test_bars_carry_their_micro_batch_and_tag_says_tag(traces: dict[str, Trace]) -> None:
    labels = texts(svg_gantt(spans(traces["stale"])))
    assert any(re.fullmatch(r"TAG \d", label) for label in labels)
    assert {"1.0", "1.1", "2.0", "2.1"} <= set(labels)  # stale ones name their step
    assert labels.count("0") >= 2


def test_versions_are_labelled_lines_and_steps_stand_between_them(traces: dict[str, Trace]) -> None:
    picture = svg_gantt(spans(traces["stale"]))
    lines = [node for node in parsed(picture).iter(f"{SVG}path") if node.get("class") == "version"]
    assert len(lines) == 3
    assert {"v1", "v2", "v3"} <= set(texts(picture))
    assert [text.split(" · ")[0] for text in texts(picture) if text.startswith("step")] == ["step 0", "step 1", "step 2"]


def test_a_resumed_run_is_drawn_with_the_numbers_of_its_steps(traces: dict[str, Trace]) -> None:
    written = texts(svg_gantt(spans(traces["resumed"])))
    assert "Schedule of 3 steps of 8 micro-batches, from step 3, simulated" in written
    assert {"v4", "v5", "v6"} <= set(written)
    assert [text.split(" · ")[0] for text in written if text.startswith("step")] == ["step 3", "step 4", "step 5"]
    assert re.findall(r"v\d", text_gantt(spans(traces["resumed"]))) == ["v4", "v5", "v6"]


def test_versions_of_a_long_run_are_named_at_even_distances(simulate: Simulate) -> None:
    picture = svg_gantt(spans(long(simulate)))
    named = [int(text[1:]) for text in texts(picture) if re.fullmatch(r"v\d+", text)]
    lines = [node for node in parsed(picture).iter() if node.get("class") == "version"]
    assert len(lines) == len(named)  # one every 7 pixels would hide what they separate
    assert len(named) > 5
    assert len({b - a for a, b in pairwise(named)}) == 1


def test_losses_are_marked_and_said_on_hover(traces: dict[str, Trace]) -> None:
    picture = svg_gantt(spans(traces["lost and back"]))
    marks = [node for node in parsed(picture).iter(f"{SVG}g") if node.get("class") == "mark"]
    said = [mark.findtext(f"{SVG}title", "") for mark in marks]
    assert "g1 was lost at 2.500 s" in said
    assert "g1 joined at 5.000 s" in said
    assert {"worker lost", "worker joined", "worker away", "lost"} <= set(texts(picture))


def test_lost_prompts_and_trajectories_are_marked_and_explained(traces: dict[str, Trace]) -> None:
    timeline = spans(traces["objects lost"])
    picture = svg_gantt(timeline)
    said = [mark.findtext(f"{SVG}title", "") for mark in parsed(picture).iter(f"{SVG}g") if mark.get("class") == "mark"]
    for mark, name in ((Mark.CONDITIONING_LOST, "encoded prompts lost"), (Mark.TRAJECTORY_LOST, "trajectory lost")):
        happened = [instant for instant in timeline.instants if instant.mark is mark]
        assert happened
        assert all(f"{instant.text} at {instant.at_us / 1e6:.3f} s" in said for instant in happened)
        assert name in texts(picture)
    assert "encoded prompts lost" not in texts(svg_gantt(spans(traces["lost and back"])))


def test_the_title_says_simulated_only_of_a_simulation(traces: dict[str, Trace]) -> None:
    simulated = svg_gantt(spans(traces["no TAG"]))
    recorded = svg_gantt(spans(dataclasses.replace(traces["no TAG"], source="run")))
    assert texts(simulated)[0] == "Schedule of 2 steps of 4 micro-batches, simulated"
    assert texts(recorded)[0] == "Schedule of 2 steps of 4 micro-batches"
    assert "virtual time [s]" in texts(simulated)
    assert "virtual time [s]" not in texts(recorded)


def test_a_window_shows_its_part_alone(traces: dict[str, Trace]) -> None:
    timeline = spans(traces["lost and back"])
    first = timeline.published[0].at_us
    picture = svg_gantt(timeline, window=(first + 1, timeline.published[1].at_us - 1))
    assert_tidy(picture)
    named = texts(picture)
    assert "v1" not in named
    assert "v2" not in named
    assert "worker lost" not in named
    inside = [s for s in timeline.spans if s.kind is Kind.OPTIMIZER and first + 1 < s.end_us < timeline.published[1].at_us + 1]
    assert len(bars(picture, Kind.OPTIMIZER)) == len(inside) == 1
    assert named[0].endswith(f", {(first + 1) / 1e6:g} to {(timeline.published[1].at_us - 1) / 1e6:g} s")


def test_the_busy_share_beside_a_lane_is_that_of_the_window(traces: dict[str, Trace]) -> None:
    timeline = spans(traces["no TAG"])
    waiting = timeline.bubbles[0]
    shares = [text for text in texts(svg_gantt(timeline, window=(0, 2 * waiting.duration_us))) if re.fullmatch(r"\d+ %", text)]
    assert waiting.start_us == 0
    assert timeline.bubbles[1].start_us < 2 * waiting.duration_us
    second = timeline.bubbles[1]
    busy = 1 - (waiting.duration_us + min(second.end_us, 2 * waiting.duration_us) - second.start_us) / (2 * waiting.duration_us)
    assert shares == ["100 %", "100 %", f"{100 * busy:.0f} %"]


def test_an_empty_window_is_refused(traces: dict[str, Trace]) -> None:
    with pytest.raises(ConfigError, match="The window from 5 to 5 us is empty"):
        svg_gantt(spans(traces["no TAG"]), window=(5, 5))


def test_names_are_escaped_and_what_xml_cannot_hold_is_replaced(simulate: Simulate) -> None:
    names = (WorkerId('<g a="b">&amp;'), WorkerId("\x1b[31mred\x00\ud800"), WorkerId("w" * 300))
    costs = SimulationCosts(generate=(1.0,) * 3, update=0.1)
    trace = simulate(costs, generators=names, scoring="inline")
    picture = svg_gantt(spans(trace))
    picture.encode()
    assert_tidy(picture)
    assert '<g a="b">&amp;' in texts(picture)
    assert "\ufffd[31mred\ufffd\ufffd" in texts(picture)
    assert any(re.fullmatch("w+…", text) for text in texts(picture))


@pytest.mark.parametrize(
    ("start", "end", "unit", "labels"),
    [
        (0, 12_345, "ms", ["0", "2", "4", "6", "8", "10", "12"]),
        (0, 22_000_000, "s", ["0", "5", "10", "15", "20"]),
        (5_000_000, 9_100_000, "s", ["5", "6", "7", "8", "9"]),
        (0, 7_000_000_000, "min", ["0", "20", "40", "60", "80", "100"]),
        (0, 40_000_000_000, "h", ["0", "2", "4", "6", "8", "10"]),
    ],
)
def test_ticks_are_round_and_in_the_unit_that_suits_the_length(start: int, end: int, unit: str, labels: list[str]) -> None:
    axis = Axis.over(start, end, most=8)
    assert axis.unit == unit
    assert [label for _, label in axis.ticks()] == labels


def test_the_text_chart_of_a_small_run_is_the_one_drawn_by_hand(simulate: Simulate) -> None:
    costs = SimulationCosts(generate=(1.0,), update=0.4, tag=1.0, optimizer=0.2)
    trace = simulate(costs, steps=1, micro_batches=3, scoring="inline", tag="static", tag_static=1)
    assert text_gantt(spans(trace), columns=23).splitlines() == [
        "                    v1|",
        "g0      |gggggggggg   |",
        "trainer |TTTTTuuuu.uuO|",
        "         0 s",
        "g generate   T TAG",
        "u update   O optimizer",
        ". bubble",
    ]


def test_the_rows_of_the_text_chart_are_one_column_per_slot_and_fit(any_trace: Trace) -> None:
    for columns in (60, 100, 180):
        timeline = spans(any_trace)
        rows = [line for line in text_gantt(timeline, columns=columns).splitlines() if line.endswith("|") and line[0] != " "]
        assert len(rows) == len(timeline.settings.workers)
        assert len({len(row) for row in rows}) == 1
        assert all(len(line) <= columns for line in text_gantt(timeline, columns=columns).splitlines())


def test_the_text_chart_shares_its_letters_out_as_the_time_was(traces: dict[str, Trace]) -> None:
    timeline = spans(traces["stale"])
    rows = {line.split(" |")[0].strip(): line.split(" |")[1] for line in text_gantt(timeline, columns=1000).splitlines()[1:-2]}
    times: dict[str, int] = defaultdict(int)
    for span in timeline.spans:
        if span.worker == "trainer":
            times[span.kind] += span.duration_us
    for kind, letter in ((Kind.TAG, "T"), (Kind.UPDATE, "u")):
        share = rows["trainer"].count(letter) / (len(rows["trainer"]) - 1)
        assert share == pytest.approx(times[kind] / timeline.duration_us, abs=0.02)
    bubble = sum(gap.duration_us for gap in timeline.bubbles) / timeline.duration_us
    assert rows["trainer"].count(".") / (len(rows["trainer"]) - 1) == pytest.approx(bubble, abs=0.02)


def test_the_text_chart_explains_the_letters_that_it_uses_and_no_others(traces: dict[str, Trace]) -> None:
    greedy = text_gantt(spans(traces["greedy"])).splitlines()[-1]
    assert "T TAG" in greedy
    assert "~ stale generate" not in greedy
    assert "x worker lost" in text_gantt(spans(traces["lost and back"])).splitlines()[-1]


def test_the_versions_of_a_long_run_do_not_run_into_each_other_in_the_text_chart(simulate: Simulate) -> None:
    named = text_gantt(spans(long(simulate))).splitlines()[0].split()
    assert len(named) > 5
    assert all(re.fullmatch(r"\|v\d+|v\d+\|", name) for name in named)


def test_the_text_chart_keeps_its_columns_under_wide_and_unprintable_names(simulate: Simulate) -> None:
    names = (WorkerId("生成器-1"), WorkerId("a\x1b[31m\nb"))
    costs = SimulationCosts(generate=(1.0,) * 2, update=0.1)
    lines = text_gantt(spans(simulate(costs, generators=names, scoring="inline"))).splitlines()
    assert lines[1].startswith("生成器-1")
    assert lines[2].startswith("a?[31m?b ")
    assert lines[1].index("|") + 3 == lines[2].index("|")  # three characters of two columns each
