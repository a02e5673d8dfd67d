"""Runs that go wrong quietly are told to the user; sound ones are not."""

from __future__ import annotations

import pytest

from digenrl.metrics.guards import warnings_of

SOUND = {"logprob_abs_diff": 1e-7, "clip_fraction": 0.1, "zero_std_ratio": 0.2}


def kinds(clip_range: float | None = 1e-4, **metrics: float) -> list[str]:
    return [kind for kind, _ in warnings_of({**SOUND, **metrics}, clip_range=clip_range)]


def test_a_sound_step_has_no_warning() -> None:
    assert kinds() == []


def test_metrics_that_an_algorithm_does_not_report_are_no_warning() -> None:
    assert warnings_of({}, clip_range=1e-4) == []


@pytest.mark.parametrize(("noise", "expected"), [(0.9e-5, []), (1.1e-5, ["clip_noise"])])
def test_a_clip_of_less_than_ten_times_the_numerical_noise_is_told(noise: float, expected: list[str]) -> None:
    assert kinds(clip_range=1e-4, logprob_abs_diff=noise) == expected


def test_an_algorithm_without_a_clip_is_not_warned_about_noise() -> None:
    assert kinds(clip_range=None, logprob_abs_diff=1.0) == []


@pytest.mark.parametrize(("fraction", "expected"), [(0.5, []), (0.51, ["clip_fraction"])])
def test_a_gradient_that_is_mostly_clipped_is_told(fraction: float, expected: list[str]) -> None:
    assert kinds(clip_fraction=fraction) == expected


@pytest.mark.parametrize(("ratio", "expected"), [(0.89, []), (0.9, ["zero_std"])])
def test_groups_that_teach_nothing_are_told(ratio: float, expected: list[str]) -> None:
    assert kinds(zero_std_ratio=ratio) == expected


def test_each_warning_names_the_numbers_and_what_to_change() -> None:
    found = dict(warnings_of({"logprob_abs_diff": 2e-5, "clip_fraction": 0.75, "zero_std_ratio": 1.0}, clip_range=1e-4))
    assert "0.0001" in found["clip_noise"] and "2.0e-05" in found["clip_noise"] and "float32" in found["clip_noise"]
    assert "75%" in found["clip_fraction"] and "learning rate" in found["clip_fraction"]
    assert "100%" in found["zero_std"] and "reward" in found["zero_std"]
