"""Clips, sizes, batches, rewards that are only watched, and what scoring took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from digenrl.config.checks import check_recipe
from digenrl.config.loader import load_reward
from digenrl.config.reward_list import RewardSpec
from digenrl.config.section import Section
from digenrl.errors import ConfigError, RewardUnavailable, RunFailed
from digenrl.ids import SampleId
from digenrl.rewards.base import RewardSample
from digenrl.rewards.compose import Effort, Rewards, WeightedRewards, join_rewards
from tests.conftest import RecipeMaker
from tests.rewards.services import pictures

SAMPLES = pictures(5)


class Gives:
    """A reward with fixed scores, that notes how many samples it was asked for at a time."""

    def __init__(self, *values: float, error: Exception | None = None) -> None:
        self._values = {sample.id: value for sample, value in zip(SAMPLES, values, strict=False)}
        self._error = error
        self.asked: list[int] = []

    def score(self, samples: Sequence[RewardSample]) -> Mapping[SampleId, float]:
        self.asked.append(len(samples))
        if self._error is not None:
            raise self._error
        return {sample.id: self._values[sample.id] for sample in samples}

    def take_retries(self) -> int:
        return len(self.asked)


def score(*rewards: tuple[dict[str, Any], Gives]) -> Rewards:
    given = {"type": "x", "settings": Section()}
    specs = [(RewardSpec(**{**given, "name": f"r{n}", **keys}), r) for n, (keys, r) in enumerate(rewards)]
    return WeightedRewards(specs).score(SAMPLES)


def test_a_score_is_clipped_then_normalized_then_weighted_and_logged_as_it_is() -> None:
    keys = {"weight": 2.0, "clip": (0.0, 10.0), "normalize": {"mean": 4.0, "std": 2.0}}
    scored = score((keys, Gives(-5, 0, 4, 10, 99)))
    assert scored.totals.tolist() == [-4, -4, 0, 6, 6]
    assert scored.parts["r0"].tolist() == [-5, 0, 4, 10, 99]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_no_clip_makes_a_number_of_what_is_none(bad: float) -> None:
    scored = score(({"clip": (0.0, 1.0)}, Gives(0.5, bad, 2, 0, 1)))
    assert np.isfinite(scored.totals).tolist() == [True, False, True, True, True]
    assert scored.efforts["r0"].invalid == 1


def test_a_reward_is_asked_for_as_many_samples_at_once_as_its_batch_size_says() -> None:
    whole, small = Gives(1, 2, 3, 4, 5), Gives(1, 2, 3, 4, 5)
    scored = score(({}, whole), ({"batch_size": 2}, small))
    assert whole.asked == [5]
    assert small.asked == [2, 2, 1]
    assert scored.parts["r0"].tolist() == scored.parts["r1"].tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("error", [RewardUnavailable("the service is away"), ValueError("a bug")])
def test_a_reward_that_is_only_watched_stops_nothing_and_makes_nothing_invalid(error: Exception) -> None:
    watched = {"weight": 0.0, "required": False}
    scored = score(({}, Gives(1, 2, 3, 4, 5)), (watched, Gives(error=error)))
    assert scored.totals.tolist() == [1, 2, 3, 4, 5]
    assert np.isnan(scored.parts["r1"]).all()
    assert scored.efforts["r1"].invalid == 5
    assert score(({}, Gives(1, 2, 3, 4, 5)), (watched, Gives(1, float("nan"), 3, 4, 5))).totals.tolist() == [1, 2, 3, 4, 5]
    with pytest.raises(RunFailed):
        score(({}, Gives(1, 2, 3, 4, 5)), ({"weight": 0.0}, Gives(error=error)))


def test_efforts_of_the_parts_of_a_micro_batch_are_added() -> None:
    one = score(({}, Gives(1, float("nan"), 3, 4, 5)))
    assert one.efforts["r0"].seconds > 0
    assert one.efforts["r0"].retries == 1
    both = join_rewards([one, one])
    assert both.efforts["r0"] == one.efforts["r0"] + one.efforts["r0"]
    assert Effort(seconds=1.5, invalid=2, retries=3) + Effort(seconds=0.5, invalid=1) == Effort(seconds=2, invalid=3, retries=3)


@pytest.mark.parametrize(
    ("rewards", "detail"),
    [
        ([{"weight": 1}, {"weight": -1, "name": "b"}], "(1, -1) sum to 0"),
        ([{"weight": 0}], "All weights in rewards are 0"),
        ([{"weight": 1, "required": False}], "required: false needs weight: 0"),
        ([{"clip": [1, 1]}], "not below the upper one"),
        ([{"normalize": {"std": 0}}], "normalize.std"),
        ([{"batch_size": 0}], "batch_size"),
    ],
)
def test_rewards_that_cannot_be_summed_are_refused(rewards: list[dict[str, Any]], detail: str, tiny_recipe: RecipeMaker) -> None:
    with pytest.raises(ConfigError) as caught:
        check_recipe(tiny_recipe(rewards=[{"type": "jpeg", **reward} for reward in rewards]))
    assert detail in str(caught.value)


def test_the_keys_of_a_reward_survive_being_written_and_read(tiny_recipe: RecipeMaker) -> None:
    given = {"type": "jpeg", "clip": [-3, 0], "normalize": {"mean": -1, "std": 0.5}, "batch_size": 2}
    recipe = tiny_recipe(rewards=[given])
    plain = recipe.to_plain()["rewards"][0]
    assert {key: plain[key] for key in given} == given


class OnMeta(Section):
    device: str = "meta"


class OnLoan:
    """A reward with a network that is somewhere."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error
        self.told: list[str] = []

    def to(self, device: Any) -> None:
        self.told.append(f"to {device}")

    def score(self, samples: Sequence[RewardSample]) -> Mapping[SampleId, float]:
        self.told.append(f"score {len(samples)}")
        if self._error is not None:
            raise self._error
        return {sample.id: 1.0 for sample in samples}


def test_an_offloaded_reward_is_on_its_device_only_while_it_scores() -> None:
    first, second = OnLoan(), OnLoan()
    score(({"offload": True, "batch_size": 3, "settings": OnMeta()}, first), ({}, second))  # type: ignore[arg-type]
    assert first.told == ["to meta", "score 3", "score 2", "to cpu"]
    assert second.told == ["score 5"]


def test_an_offloaded_reward_goes_back_also_when_it_fails() -> None:
    broken = OnLoan(ValueError("out of memory"))
    with pytest.raises(RunFailed):
        score(({"offload": True}, broken))  # type: ignore[arg-type]
    assert broken.told[-1] == "to cpu"


def test_a_reward_without_a_network_of_its_own_is_not_offloaded() -> None:
    with pytest.raises(ConfigError, match=r"rewards\.0\.offload: jpeg has nothing to offload"):
        WeightedRewards.from_recipe([load_reward("jpeg", ["offload=true"])])
