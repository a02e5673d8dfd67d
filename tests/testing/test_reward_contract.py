"""The contract of rewards: built-in ones keep it, and each way to break it is named."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel

from digenrl.errors import ConfigError, RunFailed
from digenrl.ids import SampleId
from digenrl.rewards.base import RewardSample
from digenrl.testing import check_reward

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", ["jpeg", "brightness", "sharpness", "ocr"])
def test_built_in_rewards_keep_the_contract(name: str) -> None:
    check_reward(name, ["detection_side=64"] if name == "ocr" else [])


def test_the_example_keeps_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.setattr(sys, "path", list(sys.path))
    check_reward("custom_reward:Brightness", ["target=0.5"])


class Good:
    class Settings(BaseModel):
        """None."""

    def __init__(self, settings: BaseModel) -> None:
        self.calls = 0

    def score(self, samples: Sequence[RewardSample]) -> Mapping[SampleId, Any]:
        return {s.id: float(s.image.mean()) for s in samples}


class Motion(Good):
    media = ("video",)

    def score(self, samples: Sequence[RewardSample]) -> Mapping[SampleId, Any]:
        return {s.id: float(np.abs(np.diff(s.image.astype(float), axis=0)).mean()) * s.fps for s in samples}


class Ranks(Good):
    def score(self, samples: Sequence[RewardSample]) -> Mapping[SampleId, Any]:
        best = max(s.image.mean() for s in samples)
        return {s.id: float(s.image.mean() - best) for s in samples}


class Counts(Good):
    def score(self, samples: Sequence[RewardSample]) -> Mapping[SampleId, Any]:
        self.calls += 1
        return {s.id: float(self.calls) for s in samples}


class ByPlace(Good):
    def score(self, samples: Sequence[RewardSample]) -> Mapping[SampleId, Any]:
        return {s.id: float(place) for place, s in enumerate(samples)}


class ById(Good):
    def score(self, samples: Sequence[RewardSample]) -> Mapping[SampleId, Any]:
        return {s.id: float(s.id.step) for s in samples}


class Draws(Good):
    def score(self, samples: Sequence[RewardSample]) -> Mapping[SampleId, Any]:
        random.random()
        return super().score(samples)


class Never(Good):
    def score(self, samples: Sequence[RewardSample]) -> Mapping[SampleId, Any]:
        return {s.id: float("nan") for s in samples}


class Forgets(Good):
    def score(self, samples: Sequence[RewardSample]) -> Mapping[SampleId, Any]:
        return {s.id: 1.0 for s in samples[1:]}


class EmptySelfTest(Good):
    def self_test(self) -> Any:
        return [], []


def check(reward: type) -> None:
    check_reward(f"{__name__}:{reward.__name__}")


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setitem(sys.modules, __name__, request.module)


def test_own_rewards_of_images_and_videos_can_keep_it() -> None:
    check(Good)
    check(Motion)


@pytest.mark.parametrize(
    ("reward", "wrong"),
    [
        (Ranks, "alone than beside others"),
        (Counts, "asked for again"),
        (ByPlace, "order of the samples"),
        (ById, "the sample's id"),
        (Draws, "global random state"),
        (Never, "another prompt"),
    ],
)
def test_a_reward_that_breaks_the_contract_is_told_how(reward: type, wrong: str) -> None:
    with pytest.raises(AssertionError, match=wrong):
        check(reward)


def test_wrong_answers_and_failed_self_tests_are_the_errors_of_a_run() -> None:
    with pytest.raises(RunFailed, match="1 missing"):
        check(Forgets)
    with pytest.raises(ConfigError, match="self-test"):
        check(EmptySelfTest)
