"""The reward-hacking alarm: steady and large enough falls beside a rising training reward, and no noise."""

from __future__ import annotations

import math
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from digenrl.metrics.hacking import Alarm, HackingWatch, Observation, alarm_of, chance_of_falling, standard_error

NAN = float("nan")


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6])
def test_the_chance_is_the_share_of_all_orders_that_fall_as_steadily(count: int) -> None:
    def rising(order: tuple[int, ...]) -> int:
        return sum(order[i] < order[j] for j in range(count) for i in range(j))

    everything = list(permutations(range(count)))
    for order in everything[:: max(1, len(everything) // 60)]:
        as_steady = sum(rising(other) <= rising(order) for other in everything)
        assert chance_of_falling(order) == pytest.approx(as_steady / len(everything))


def test_equal_values_do_not_fall() -> None:
    assert chance_of_falling([1.0] * 6) == pytest.approx(1)
    assert chance_of_falling([5, 4, 3, 2, 1]) == pytest.approx(1 / 120)
    assert chance_of_falling(range(100, 0, -1)) < 1e-50


def window(held_out: list[float], trained: list[float], error: float = 0.01) -> list[Observation]:
    pairs = enumerate(zip(held_out, trained, strict=True))
    return [Observation(version=10 * n, held_out=h, standard_error=error, trained=t) for n, (h, t) in pairs]


FALLS, RISES = [0.6, 0.58, 0.55, 0.51, 0.5], [0.6, 0.65, 0.7, 0.71, 0.8]


@pytest.mark.parametrize(
    ("held_out", "trained", "error", "alarms"),
    [
        (FALLS, RISES, 0.01, True),
        (FALLS, RISES, 0.0353, True),
        (FALLS, RISES, 0.0354, False),  # 0.1 is two standard errors of the difference of two such means
        (FALLS, RISES[::-1], 0.01, False),
        (FALLS[::-1], RISES, 0.01, False),
        (FALLS, [0.6] * 5, 0.01, False),
        ([0.6] * 5, RISES, 0.01, False),
        ([0.6, 0.58, 0.59, 0.51, 0.5], RISES, 0.01, False),
        (FALLS[:4], RISES[:4], 0.0, False),
        ([0.6, 0.61, 0.58, 0.55, 0.51, 0.5, 0.48], [0.6, *RISES, 0.9], 0.01, True),
        ([0.6], [0.6], 0.01, False),
    ],
)
def test_only_a_steady_and_large_fall_beside_a_rise_alarms(
    held_out: list[float], trained: list[float], error: float, alarms: bool
) -> None:
    assert (alarm_of(window(held_out, trained, error), errors=2.0) is not None) == alarms


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-1, 1), st.floats(-1, 1)), min_size=2, max_size=9),
    st.floats(0, 0.5),
    st.floats(0.5, 4),
    st.floats(-5, 5),
)
def test_the_units_of_a_reward_do_not_matter_and_an_alarm_is_about_a_fall_and_a_rise(
    pairs: list[tuple[float, float]], error: float, scale: float, shift: float
) -> None:
    held_out, trained = ([round(v, 3) for v in side] for side in zip(*pairs, strict=True))
    alarm = alarm_of(window(held_out, trained, error), errors=2.0)
    if alarm is not None:
        assert alarm.last.held_out < alarm.first.held_out
        assert len(pairs) >= 5
        flipped = alarm_of(window(trained, held_out, 0.0), errors=0.0)
        assert flipped is None
    doubled = [4 * v for v in held_out]
    again = alarm_of(window(doubled, [2 * v for v in trained], 4 * error), errors=2.0)
    assert (alarm is None) == (again is None)


@pytest.mark.parametrize("kind", ["white noise", "a saturated run"])
def test_noise_raises_no_alarm(kind: str) -> None:
    rng = np.random.default_rng(7)
    alarms = 0
    for _ in range(60):
        trained = rng.normal(0.7, 0.02, 400)
        if kind == "a saturated run":
            trained += 0.3 * (1 - np.exp(-np.arange(400) / 60))
        held_out = rng.normal(0.6, 0.02, 41)
        watch = HackingWatch(window=5, errors=0.0)  # noise must not need the second rule
        for version in range(0, 401, 10):
            alarms += watch.evaluated(version, held_out[version // 10], 0.02) is not None
            for step in range(version, min(version + 10, 400)):
                watch.trained(step, trained[step])
    assert alarms <= 4, "of 2160 windows, each alarms by chance in 1 of 14400 cases, or of 120 where training truly rises"


def play(watch: HackingWatch, held_out: list[float], start: int = 0, error: float = 0.01) -> list[Alarm]:
    """Evaluations every 3 steps, whose training reward keeps rising."""
    alarms = []
    for number, value in enumerate(held_out, start=start):
        found = watch.evaluated(3 * number, value, error)
        alarms += [found] if found is not None else []
        for step in range(3 * number, 3 * number + 3):
            watch.trained(step, 0.01 * step)
    return alarms


def test_an_episode_is_told_once_and_the_next_one_anew() -> None:
    watch = HackingWatch(window=5, errors=2.0)
    falling = [0.9, 0.8, 0.7, 0.6, 0.5, 0.4]
    (alarm,) = play(watch, falling)
    assert (alarm.first.version, alarm.last.version) == (3, 15)
    assert watch.in_episode
    assert play(watch, [0.3, 0.2, 0.5, 0.1], start=6) == []
    assert watch.in_episode
    assert play(watch, [0.85], start=10) == []
    assert not watch.in_episode
    (again,) = play(watch, [0.8, 0.7, 0.6, 0.5, 0.4], start=11)
    assert (again.first.version, again.last.version) == (30, 42)


def test_an_alarm_says_what_why_and_what_helps() -> None:
    (alarm,) = play(HackingWatch(window=5, errors=2.0), [0.9, 0.8, 0.7, 0.6, 0.5, 0.4])
    for words in ("0.8 (version 3) to 0.4 (version 15)", "rose from 0.01 to 0.13", "Why it matters", "kl_beta", "alarm_window"):
        assert words in str(alarm)


def test_without_a_window_nothing_alarms() -> None:
    assert play(HackingWatch(window=0, errors=0.0), [0.9, 0.8, 0.7, 0.6, 0.5, 0.4]) == []


def test_evaluations_that_say_nothing_are_passed_over() -> None:
    watch = HackingWatch(window=5, errors=2.0)
    assert len(play(watch, [0.9, 0.8, NAN, 0.7, 0.6, 0.5, 0.4])) == 1
    watch.evaluated(21, 0.3, 0.01)
    assert watch.evaluated(21, 0.3, 0.01) is None  # no step in between


def test_a_step_that_runs_ahead_of_an_evaluation_counts_for_the_next_one() -> None:
    watch = HackingWatch(window=5, errors=2.0)
    watch.evaluated(0, 1.0, 0.01)
    for version in range(1, 6):
        watch.trained(version - 1, 0.1 * version)
        watch.trained(version, 99.0 if version == 5 else 0.1 * (version + 1))
        alarm = watch.evaluated(version, 1.0 - 0.1 * version, 0.01)
    assert alarm is not None
    assert alarm.last.trained == pytest.approx(0.5)


def test_a_run_that_goes_on_remembers_what_it_has_logged() -> None:
    straight, stopped = HackingWatch(window=5, errors=2.0), HackingWatch(window=5, errors=2.0)
    rows: list[dict[str, Any]] = []
    for version, value in enumerate([0.9, 0.8, 0.7, 0.6, 0.5]):
        rows.append(
            {"kind": "eval", "step": version, "reward": value, "reward_std": 0.1, "num_images": 102.0, "invalid_samples": 2.0}
        )
        rows.append({"kind": "train", "step": version, "reward_mean": 0.1 * version})
    straight.replay(rows)
    stopped.replay(rows[:7])
    stopped.replay(rows[7:])
    first, second = straight.evaluated(5, 0.4, 0.01), stopped.evaluated(5, 0.4, 0.01)
    assert first == second
    assert first is not None
    assert first.first.standard_error == pytest.approx(0.01)
    before = HackingWatch(window=5, errors=2.0)
    before.replay([{key: value for key, value in row.items() if key != "reward_std"} for row in rows])
    assert before.evaluated(5, 0.4, 0.01) is None, "what an older version has logged says nothing of errors"


def test_the_standard_error_of_nothing_is_no_number() -> None:
    assert standard_error(0.2, 4) == 0.1
    assert math.isnan(standard_error(0.2, 0))
