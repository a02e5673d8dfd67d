"""The JPEG reward: smooth pictures score higher, in kilobytes."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError

from digenrl.config.settings.rewards import JpegSettings
from digenrl.ids import SampleId
from digenrl.rewards.base import RewardSample
from digenrl.rewards.jpeg import JpegReward, jpeg_kilobytes

NOISE = np.random.default_rng(0).integers(0, 256, size=(64, 64, 3), dtype=np.uint8)


def sample(index: int, image: np.ndarray) -> RewardSample:
    return RewardSample(id=SampleId(0, index, 0), prompt="", metadata={}, image=image)


def test_a_flat_image_beats_noise_in_the_self_test() -> None:
    reward = JpegReward(JpegSettings())
    (flat,), (noise,) = reward.self_test()
    scores = reward.score([flat, noise])
    assert scores[flat.id].value > scores[noise.id].value


def test_the_value_is_minus_the_size_of_the_file_in_kilobytes() -> None:
    file = io.BytesIO()
    Image.fromarray(NOISE).save(file, format="JPEG", quality=75)
    score = JpegReward(JpegSettings()).score([sample(0, NOISE)])[SampleId(0, 0, 0)]
    assert score.parts == {"kilobytes": file.tell() / 1000}
    assert score.value == -file.tell() / 1000


def test_higher_quality_means_a_larger_file() -> None:
    sizes = [jpeg_kilobytes(NOISE, quality) for quality in (1, 50, 75, 95, 100)]
    assert sizes == sorted(set(sizes))
    by_setting = [JpegReward(JpegSettings(quality=q)).score([sample(0, NOISE)])[SampleId(0, 0, 0)].value for q in (1, 95)]
    assert by_setting == [-sizes[0], -sizes[3]]


def test_rewards_are_keyed_by_id_whatever_the_order() -> None:
    reward = JpegReward(JpegSettings())
    samples = [sample(index, NOISE // divisor) for index, divisor in enumerate((1, 4, 32))]
    scores = reward.score(samples)
    values = [scores[item.id].value for item in samples]
    assert values == sorted(set(values))
    assert reward.score(samples[::-1]) == scores


@pytest.mark.parametrize("quality", [0, 101, 75.5])
def test_a_quality_outside_of_the_scale_is_refused(quality: float) -> None:
    with pytest.raises(ValidationError):
        JpegSettings(quality=quality)
