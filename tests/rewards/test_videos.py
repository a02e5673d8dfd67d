"""Rewards of videos: what looks at frames gets them, what looks at images is asked frame by frame."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel

from digenrl.config.checks import check_recipe
from digenrl.config.registry import media_of
from digenrl.config.reward_list import RewardSpec
from digenrl.config.schema import Recipe
from digenrl.errors import ConfigError
from digenrl.ids import SampleId
from digenrl.rewards.base import RewardSample, Score
from digenrl.rewards.compose import WeightedRewards
from digenrl.rewards.jpeg import jpeg_kilobytes

RecipeMaker = Callable[..., Recipe]


class NoSettings(BaseModel):
    """None."""


class Motion:
    """Mean change from frame to frame, per second."""

    Settings = NoSettings
    media = ("video",)

    def __init__(self, settings: NoSettings) -> None:
        self.seen: list[RewardSample] = []

    def score(self, samples: Sequence[RewardSample]) -> Mapping[SampleId, float]:
        self.seen.extend(samples)
        return {s.id: float(np.abs(np.diff(s.frames.astype(float), axis=0)).mean()) * (s.fps or 0) for s in samples}


class Brightness:
    """A reward of images, as users have written them before there were videos."""

    Settings = NoSettings

    def __init__(self, settings: NoSettings) -> None:
        self.calls: list[list[SampleId]] = []

    def score(self, samples: Sequence[RewardSample]) -> Mapping[SampleId, Score]:
        assert all(sample.image.ndim == 3 and sample.fps is None for sample in samples)
        self.calls.append([sample.id for sample in samples])
        means = {s.id: float(s.image.mean()) for s in samples}
        # Frames that are black have no score.
        return {i: Score(value=m if m else float("nan"), parts={"mean": m}) for i, m in reversed(means.items())}


class Wrong(Brightness):
    media = ("picture",)


def videos(count: int = 3, frames: int = 5) -> list[RewardSample]:
    rng = np.random.default_rng(0)
    pixels = rng.integers(1, 256, size=(count, frames, 8, 8, 3), dtype=np.uint8)
    return [RewardSample(id=SampleId(0, 0, i), prompt="", metadata={}, image=pixels[i], fps=8.0) for i in range(count)]


def rewards(*parts: Any) -> WeightedRewards:
    specs = [RewardSpec(type="x", name=type(part).__name__.lower(), settings=NoSettings()) for part in parts]
    return WeightedRewards(list(zip(specs, parts, strict=True)))


def test_a_reward_of_videos_gets_all_frames_and_their_rate() -> None:
    motion, samples = Motion(NoSettings()), videos()
    scored = rewards(motion).score(samples)
    assert [sample.frames.shape for sample in motion.seen] == [(5, 8, 8, 3)] * 3
    wanted = [np.abs(np.diff(s.image.astype(float), axis=0)).mean() * 8.0 for s in samples]
    assert scored.totals.tolist() == pytest.approx(wanted)


def test_a_reward_of_images_scores_a_video_by_the_mean_over_its_frames_each_frame_of_all_samples_at_once() -> None:
    brightness, samples = Brightness(NoSettings()), videos()
    scored = rewards(brightness).score(samples)
    assert brightness.calls == [[sample.id for sample in samples]] * 5
    wanted = [sample.image.mean() for sample in samples]
    assert scored.totals.tolist() == pytest.approx(wanted)
    assert scored.parts["brightness/mean"].tolist() == pytest.approx(wanted)


def test_a_video_with_one_frame_that_has_no_score_is_invalid_and_the_others_are_not() -> None:
    samples = videos()
    samples[1].image[2] = 0
    scored = rewards(Brightness(NoSettings())).score(samples)
    assert np.isfinite(scored.totals).tolist() == [True, False, True]


def test_both_kinds_are_weighted_into_one_number() -> None:
    samples = videos()
    both = rewards(Motion(NoSettings()), Brightness(NoSettings())).score(samples)
    assert both.totals.tolist() == pytest.approx((both.parts["motion"] + both.parts["brightness"]).tolist())


def test_jpeg_of_a_video_is_the_mean_size_of_its_frames() -> None:
    from digenrl.config.settings.rewards import JpegSettings
    from digenrl.rewards.jpeg import JpegReward

    (sample,) = videos(1)
    scored = rewards(JpegReward(JpegSettings())).score([sample])
    assert scored.totals[0] == pytest.approx(-np.mean([jpeg_kilobytes(frame, 75) for frame in sample.frames]))


def test_an_image_is_a_video_of_one_frame_for_whoever_takes_both() -> None:
    image = np.zeros((8, 8, 3), dtype=np.uint8)
    assert RewardSample(id=SampleId(0, 0, 0), prompt="", metadata={}, image=image).frames.shape == (1, 8, 8, 3)


def test_a_reward_of_videos_is_refused_where_images_are_made(tiny_recipe: RecipeMaker) -> None:
    with pytest.raises(ConfigError, match=r"rewards.0: .*Motion scores videos, and rollout.num_frames is 1"):
        check_recipe(tiny_recipe(rewards=[{"type": f"{__name__}:Motion"}]))


def test_frames_are_refused_where_the_model_makes_images(tiny_recipe: RecipeMaker) -> None:
    with pytest.raises(ConfigError, match=r"rollout.num_frames \(5\) is for models of videos, and sd3 makes images"):
        check_recipe(tiny_recipe(rollout={"num_frames": 5}))


def test_a_medium_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ConfigError, match="has media ="):
        media_of("reward", f"{__name__}:Wrong", where="rewards.0.type")
    assert media_of("reward", f"{__name__}:Brightness", where="rewards.0.type") == ("image",)


def test_videos_without_the_package_that_saves_them_are_refused_at_once(
    video_recipe: RecipeMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_recipe(video_recipe("wan"))
    monkeypatch.setattr("digenrl.config.checks.find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match="pip install av"):
        check_recipe(video_recipe("wan"))
    check_recipe(video_recipe("wan", rollout={"num_frames": 1}))
