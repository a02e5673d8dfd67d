"""Several rewards as one number, and everything that a user's reward may get wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel

from digenrl.config.reward_list import RewardSpec
from digenrl.config.schema import Recipe
from digenrl.errors import ConfigError, RunFailed
from digenrl.ids import SampleId
from digenrl.rewards.base import RewardSample, Score
from digenrl.rewards.compose import Rewards, WeightedRewards

NAN = float("nan")


class NoSettings(BaseModel):
    """No keys."""


SAMPLES = [
    RewardSample(id=SampleId(0, 0, i), prompt="p", metadata={}, image=np.full((2, 2, 3), i, dtype=np.uint8)) for i in range(3)
]


class Answers:
    """A reward that answers with what a function makes of the samples."""

    def __init__(self, answer: Callable[[Sequence[RewardSample]], Any]) -> None:
        self._answer = answer

    def score(self, samples: Sequence[RewardSample]) -> Any:
        return self._answer(samples)


def each(*values: Any) -> Answers:
    """A reward that answers these values, sample by sample."""
    return Answers(lambda samples: {s.id: v for s, v in zip(samples, values, strict=True)})


def spec(name: str = "mine", weight: float = 1.0, type_: str = "x") -> RewardSpec:
    return RewardSpec(type=type_, name=name, weight=weight, settings=NoSettings())


def score(*rewards: tuple[RewardSpec, Any]) -> Rewards:
    return WeightedRewards(rewards).score(SAMPLES)


def fails(answer: Callable[[Sequence[RewardSample]], Any], match: str) -> RunFailed:
    with pytest.raises(RunFailed, match=match) as caught:
        score((spec("good"), each(1.0, 2.0, 3.0)), (spec("mine"), Answers(answer)))
    assert "'mine'" in caught.value.what
    assert caught.value.fix
    return caught.value


def test_the_total_is_the_weighted_sum_and_every_reward_is_logged_by_name() -> None:
    result = score((spec("a", 0.5), each(1.0, 2.0, 3.0)), (spec("b", -2.0), each(10, np.float32(20), np.int64(30))))
    assert result.totals.tolist() == [-19.5, -39.0, -58.5]
    assert {name: values.tolist() for name, values in result.parts.items()} == {"a": [1, 2, 3], "b": [10, 20, 30]}


def test_parts_of_scores_are_logged_beside_them() -> None:
    scores = [
        Score(value=1.0, parts={"strict": True, "soft": 0.25}),
        Score(value=2.0, parts={"strict": np.bool_(False)}),
        Score(value=3.0),
    ]
    result = score((spec("a"), each(*scores)))
    assert result.totals.tolist() == [1, 2, 3]
    np.testing.assert_array_equal(result.parts["a/strict"], [1, 0, NAN])
    np.testing.assert_array_equal(result.parts["a/soft"], [0.25, NAN, NAN])


def test_answers_are_found_by_id_and_not_by_order() -> None:
    backwards = Answers(lambda samples: {s.id: float(s.image[0, 0, 0]) for s in reversed(samples)})
    assert score((spec(), backwards)).totals.tolist() == [0, 1, 2]


@pytest.mark.parametrize("bad", [NAN, float("inf"), -float("inf"), np.float32("nan")])
@pytest.mark.parametrize("weight", [1.0, 0.0])
def test_a_non_finite_score_of_any_reward_makes_its_sample_invalid_and_no_other(bad: float, weight: float) -> None:
    result = score((spec("a"), each(1.0, 2.0, 3.0)), (spec("b", weight), each(1.0, bad, 1.0)))
    assert np.isfinite(result.totals).tolist() == [True, False, True]
    assert np.isnan(result.totals[1])
    assert result.parts["a"].tolist() == [1, 2, 3]


def test_infinities_of_two_rewards_do_not_cancel() -> None:
    result = score((spec("a"), each(float("inf"), 0, 0)), (spec("b"), each(-float("inf"), 0, 0)))
    assert np.isnan(result.totals[0])


def raising(_samples: Sequence[RewardSample]) -> Any:
    raise ValueError("no such file: clip.safetensors")


def test_a_reward_that_raises_stops_the_run_with_its_name_and_keeps_the_cause() -> None:
    error = fails(raising, "ValueError: no such file")
    assert isinstance(error.__cause__, ValueError)


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (lambda s: {x.id: 1.0 for x in s[:-1]}, "2 of 3 samples: 1 missing"),
        (lambda s: {}, "0 of 3 samples: 3 missing"),
        (lambda s: {SampleId(9, 0, i): 1.0 for i in range(3)}, "3 missing, 3 that were not asked for"),
        (lambda s: {x.id: 1.0 for x in s} | {SampleId(9, 0, 0): 1.0}, "1 that were not asked for"),
        (lambda s: dict.fromkeys(range(3), 1.0), "3 missing"),
        (lambda s: {str(x.id): 1.0 for x in s}, "3 missing"),
        (lambda s: [1.0, 2.0, 3.0], "list"),
        (lambda s: [1.0, 2.0], "list"),
        (lambda s: np.ones(3), "ndarray"),
        (lambda s: None, "NoneType"),
        (lambda s: 1.0, "float"),
    ],
)
def test_an_answer_that_is_not_one_score_for_each_sample_stops_the_run(answer: Callable[[Any], Any], match: str) -> None:
    fails(answer, match)


@pytest.mark.parametrize("value", ["0.5", None, True, False, np.bool_(True), [1.0], 1 + 2j, np.complex128(1), np.ones(1), b"1"])
@pytest.mark.parametrize("inside_a_score", [False, True])
def test_a_score_that_is_not_a_number_stops_the_run(value: Any, inside_a_score: bool) -> None:
    answer = Score(value=value) if inside_a_score else value
    fails(lambda samples: {s.id: answer for s in samples}, "not a number")


@pytest.mark.parametrize("value", ["high", None, [1.0]])
def test_a_part_that_is_not_a_number_stops_the_run_and_is_named(value: Any) -> None:
    fails(lambda samples: {s.id: Score(value=1.0, parts={"strict": value}) for s in samples}, "part 'strict'")


def test_a_reward_without_a_score_method_is_an_error_with_its_name() -> None:
    with pytest.raises(RunFailed, match="'mine' raised AttributeError"):
        score((spec("mine"), object()))


def test_no_samples_ask_nobody() -> None:
    result = WeightedRewards([(spec(), Answers(raising))]).score([])
    assert result.totals.shape == (0,)
    assert result.parts["mine"].shape == (0,)


GOOD, BAD = SAMPLES[:1], SAMPLES[1:]


class Sound:
    """A user's reward with a self-test; subclasses break it. Dark is good."""

    class Settings(BaseModel):
        """No keys."""

    def __init__(self, settings: BaseModel) -> None:
        self.settings = settings

    def score(self, samples: Sequence[RewardSample]) -> Mapping[SampleId, Any]:
        return {s.id: -float(s.image[0, 0, 0]) for s in samples}

    def self_test(self) -> Any:
        return GOOD, BAD


class Constant(Sound):
    def score(self, samples: Sequence[RewardSample]) -> Mapping[SampleId, Any]:
        return {s.id: 0.5 for s in samples}


class Inverted(Sound):
    def score(self, samples: Sequence[RewardSample]) -> Mapping[SampleId, Any]:
        return {s.id: float(s.image[0, 0, 0]) for s in samples}


class NanForGood(Sound):
    def self_test(self) -> Any:
        return SAMPLES[:2], SAMPLES[2:]

    def score(self, samples: Sequence[RewardSample]) -> Mapping[SampleId, Any]:
        return {s.id: NAN if s.id == SAMPLES[1].id else -float(s.image[0, 0, 0]) for s in samples}


class NanForBad(Sound):
    def score(self, samples: Sequence[RewardSample]) -> Mapping[SampleId, Any]:
        return {s.id: NAN if s.id == SAMPLES[2].id else -float(s.image[0, 0, 0]) for s in samples}


class Raises(Sound):
    def score(self, samples: Sequence[RewardSample]) -> Mapping[SampleId, Any]:
        raise ImportError("No module named 'clip'")


class RaisesInSelfTest(Sound):
    def self_test(self) -> Any:
        raise FileNotFoundError("good.png")


class AnswersText(Sound):
    def score(self, samples: Sequence[RewardSample]) -> Mapping[SampleId, Any]:
        return {s.id: "good" for s in samples}


class WithoutSamples(Sound):
    def self_test(self) -> Any:
        return [], BAD


class CannotBeMade(Sound):
    def __init__(self, settings: BaseModel) -> None:
        raise OSError("weights are not there")


class SkipsItsTest(Constant):
    def self_test(self) -> Any:
        return None


def build(reward: type, name: str = "mine") -> WeightedRewards:
    return WeightedRewards.from_recipe([RewardSpec(type=f"{__name__}:{reward.__name__}", name=name, settings=reward.Settings())])  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """The classes of this file are named in recipes by import path, the way a user's are."""
    monkeypatch.setitem(sys.modules, __name__, request.module)


def test_a_reward_that_passes_its_self_test_or_has_none_is_built() -> None:
    assert build(Sound).score(SAMPLES).totals.tolist() == [0, -1, -2]
    assert build(SkipsItsTest).score(SAMPLES).totals.tolist() == [0.5] * 3
    assert score((spec(), each(1, 2, 3))).totals.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("reward", "detail"),
    [
        (Constant, "0.5"),
        (Inverted, "good samples score"),
        (NanForGood, "nan"),
        (NanForBad, "nan"),
        (Raises, "No module named 'clip'"),
        (RaisesInSelfTest, "good.png"),
        (AnswersText, "not a number"),
        (WithoutSamples, r"\[\]"),
    ],
)
def test_a_reward_that_fails_its_self_test_does_not_start_and_is_named(reward: type, detail: str) -> None:
    with pytest.raises(ConfigError, match=f"'mine' fails its self-test.*{detail}"):
        build(reward)


def test_a_reward_that_cannot_be_made_is_a_mistake_to_mend_and_not_a_traceback() -> None:
    with pytest.raises(ConfigError, match="'mine' could not be made: OSError: weights are not there"):
        build(CannotBeMade)


@pytest.mark.parametrize("name", ["shapes", "jpeg", "brightness", "sharpness"])
def test_the_built_in_rewards_pass_their_self_tests(name: str, tiny_recipe: Callable[..., Recipe]) -> None:
    recipe = tiny_recipe(rewards=[{"type": name}])
    assert WeightedRewards.from_recipe(recipe.rewards)


def test_two_rewards_of_one_name_are_refused_and_different_names_are_the_way_out(tiny_recipe: Callable[..., Recipe]) -> None:
    with pytest.raises(ConfigError, match="same name"):
        tiny_recipe(rewards=[{"type": "jpeg"}, {"type": "jpeg", "quality": 50}])
    recipe = tiny_recipe(rewards=[{"type": "jpeg"}, {"type": "jpeg", "quality": 50, "name": "coarse"}])
    result = WeightedRewards.from_recipe(recipe.rewards).score(SAMPLES)
    assert set(result.parts) == {"jpeg", "jpeg/kilobytes", "coarse", "coarse/kilobytes"}


class Costly(Sound):
    """Counts how often it is made."""

    made = 0

    def __init__(self, settings: BaseModel) -> None:
        super().__init__(settings)
        Costly.made += 1


def test_a_reward_of_two_lists_is_made_once_and_weighted_in_each_by_its_own_weight() -> None:
    def listed(weight: float, name: str) -> RewardSpec:
        return RewardSpec(type=f"{__name__}:Costly", name=name, weight=weight, settings=Costly.Settings())

    Costly.made = 0
    trained_on = WeightedRewards.from_recipe([listed(1.0, "a")])
    held_out = WeightedRewards.from_recipe([listed(-2.0, "b"), spec_of(Sound)], where="eval.rewards", beside=trained_on.built)
    assert Costly.made == 1
    assert trained_on.score(SAMPLES).totals.tolist() == [0, -1, -2]
    assert held_out.score(SAMPLES).parts["b"].tolist() == [0, -1, -2]
    assert held_out.score(SAMPLES).totals.tolist() == [0, 1, 2]


def spec_of(reward: type) -> RewardSpec:
    return RewardSpec(type=f"{__name__}:{reward.__name__}", name="mine", settings=reward.Settings())  # type: ignore[attr-defined]
