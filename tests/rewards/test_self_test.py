"""What a neural reward is tried with at the start."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from digenrl.rewards.self_test import GoodAndBad, circle_and_noise, sunset_and_noise


@pytest.mark.parametrize("make", [circle_and_noise, sunset_and_noise])
def test_a_good_and_a_bad_sample_differ_in_their_picture_alone(make: Callable[[], GoodAndBad]) -> None:
    (good,), (bad,) = make()
    assert good.id != bad.id and good.prompt == bad.prompt
    assert good.image.shape == bad.image.shape == (256, 256, 3)
    assert good.image.dtype == bad.image.dtype == np.uint8
    roughness = [np.abs(np.diff(sample.image.astype(int), axis=0)).mean() for sample in (good, bad)]
    assert roughness[0] < 5 < 50 < roughness[1]


def test_the_samples_are_the_same_every_time_and_leave_global_random_state_alone() -> None:
    before = str(np.random.get_state())
    assert all(np.array_equal(a[0].image, b[0].image) for a, b in zip(circle_and_noise(), circle_and_noise(), strict=True))
    assert str(np.random.get_state()) == before
