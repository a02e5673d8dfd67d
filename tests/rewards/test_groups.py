"""Rewards that compare the samples of a prompt see all of them at once, wherever they are asked."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from digenrl.config.checks import check_recipe
from digenrl.config.loader import load_reward
from digenrl.config.registry import KINDS, compares_groups, component_class, media_of
from digenrl.config.reward_checks import SampleKind
from digenrl.config.reward_list import RewardSpec
from digenrl.config.section import Section
from digenrl.errors import ConfigError
from digenrl.ids import SampleId
from digenrl.rewards.asking import whole_groups
from digenrl.rewards.base import RewardSample
from digenrl.rewards.compose import WeightedRewards
from digenrl.testing import check_reward
from tests.conftest import RecipeMaker
from tests.rewards.services import ROOT, FaultyServer, reward_serve, serving

VARIETY = "examples.group_reward:Variety"


class Ranks:
    """Share of the others of its prompt that a picture is brighter than."""

    class Settings(BaseModel):
        """None."""

    def __init__(self, settings: Any = None) -> None:
        self.asked: list[list[SampleId]] = []

    def score_group(self, samples: Sequence[RewardSample]) -> Mapping[SampleId, float]:
        self.asked.append([s.id for s in samples])
        shades = {s.id: s.frames.mean() for s in samples}
        return {i: sum(shade > other for other in shades.values()) / len(samples) for i, shade in shades.items()}

    def self_test(self) -> Any:
        return [picture(0, 0, 9)], [picture(0, 1, 3), picture(0, 2, 5)]


def picture(prompt: int, sample: int, shade: int, shape: tuple[int, ...] = (2, 2, 3)) -> RewardSample:
    image = np.full(shape, shade, dtype=np.uint8)
    return RewardSample(id=SampleId(0, prompt, sample), prompt="p", metadata={}, image=image)


def groups(*sizes: int) -> list[RewardSample]:
    return [picture(p, s, 7 * s + p) for p, size in enumerate(sizes) for s in range(size)]


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setitem(sys.modules, __name__, request.module)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", list(sys.path))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(1, 20), st.randoms(use_true_random=False))
def test_batches_never_cut_a_group_whatever_the_order_and_hold_no_more_than_asked_where_they_can(
    sizes: list[int], most: int, shuffler: random.Random
) -> None:
    samples = groups(*sizes)
    shuffler.shuffle(samples)
    batches = whole_groups(samples, most)
    prompts = [{s.id.prompt for s in batch} for batch in batches]
    assert sorted(s.id for batch in batches for s in batch) == sorted(s.id for s in samples)
    assert sum(map(len, prompts)) == len(sizes), "each prompt is in one batch"
    assert all(len(batch) <= most or len(held) == 1 for batch, held in zip(batches, prompts, strict=True))


@pytest.mark.parametrize("batch_size", [None, 1, 3, 100])
def test_each_prompt_is_asked_for_by_itself_and_as_a_whole_whatever_the_batch_size(batch_size: int | None) -> None:
    ranks, samples = Ranks(), groups(3, 1, 4)
    mixed = samples[::2] + samples[1::2]
    spec = RewardSpec(type="x", name="ranks", settings=Section(), batch_size=batch_size)
    scored = WeightedRewards([(spec, ranks)]).score(mixed)
    assert sorted(sorted(call) for call in ranks.asked) == [[s.id for s in samples if s.id.prompt == p] for p in range(3)]
    wanted = {s.id: s.id.sample / {0: 3, 1: 1, 2: 4}[s.id.prompt] for s in samples}
    assert dict(zip((s.id for s in mixed), scored.totals, strict=True)) == wanted


def test_of_videos_groups_are_compared_frame_by_frame() -> None:
    ranks = Ranks()
    videos = [picture(0, n, 10 * n, (3, 2, 2, 3)) for n in range(2)]
    scored = WeightedRewards([(RewardSpec(type="x", name="ranks", settings=Section()), ranks)]).score(videos)
    assert scored.totals.tolist() == [0, 0.5]
    assert [len(call) for call in ranks.asked] == [2, 2, 2]


def test_the_good_and_bad_samples_of_a_self_test_stand_beside_each_other() -> None:
    assert WeightedRewards.from_recipe([RewardSpec(type=f"{__name__}:Ranks", name="r", settings=Ranks.Settings())])


class Upside(Ranks):
    def score_group(self, samples: Sequence[RewardSample]) -> Mapping[SampleId, float]:
        return {i: -value for i, value in super().score_group(samples).items()}


class SeesOtherGroups(Ranks):
    total = 0.0

    def score_group(self, samples: Sequence[RewardSample]) -> Mapping[SampleId, float]:
        SeesOtherGroups.total += 1
        return {i: value + SeesOtherGroups.total for i, value in super().score_group(samples).items()}


class ByNumber(Ranks):
    def score_group(self, samples: Sequence[RewardSample]) -> Mapping[SampleId, float]:
        return {s.id: -float(s.id.sample) for s in samples}


class ByOrder(Ranks):
    def score_group(self, samples: Sequence[RewardSample]) -> Mapping[SampleId, float]:
        return {s.id: -float(place) for place, s in enumerate(samples)}


class NeedsTwo(Ranks):
    def score_group(self, samples: Sequence[RewardSample]) -> Mapping[SampleId, float]:
        if len(samples) == 1:
            raise IndexError("no other sample")
        return super().score_group(samples)


def test_the_example_and_a_sound_reward_keep_the_contract() -> None:
    check_reward(VARIETY)
    check_reward(f"{__name__}:Ranks")


@pytest.mark.parametrize(
    ("reward", "wrong"),
    [
        (Upside, "self-test"),
        (SeesOtherGroups, "asked for again"),
        (ByNumber, "depend on the samples' ids"),
        (ByOrder, "order of the samples"),
        (NeedsTwo, "raised IndexError"),
    ],
)
def test_a_reward_of_groups_that_breaks_the_contract_is_told_how(reward: type, wrong: str) -> None:
    with pytest.raises(Exception, match=wrong):
        check_reward(f"{__name__}:{reward.__name__}")


def test_variety_is_the_mean_difference_from_the_others() -> None:
    samples = [picture(0, 0, 0), picture(0, 1, 51), picture(0, 2, 255), picture(1, 0, 9)]
    scored = WeightedRewards.from_recipe([load_reward(VARIETY)]).score(samples)
    np.testing.assert_allclose(scored.totals, [(0.2 + 1) / 2, (0.2 + 0.8) / 2, (1 + 0.8) / 2, np.nan], rtol=1e-6)


def test_held_out_evaluation_draws_one_sample_a_prompt_and_refuses_to_compare_it(tiny_recipe: RecipeMaker) -> None:
    held_out = {"prompts": "builtin:shapes/heldout.jsonl"}
    rewards = [{"type": VARIETY}]
    check_recipe(tiny_recipe(rewards=rewards))
    with pytest.raises(ConfigError, match=r"rewards\.0: .*Variety compares the samples of a prompt") as caught:
        check_recipe(tiny_recipe(rewards=rewards, eval=held_out))
    assert "eval.rewards" in caught.value.fix
    check_recipe(tiny_recipe(rewards=rewards, eval={**held_out, "rewards": [{"type": "jpeg"}]}))
    with pytest.raises(ConfigError, match=r"eval\.rewards\.0: .*Variety compares"):
        check_recipe(tiny_recipe(eval={**held_out, "rewards": rewards}))


def test_a_service_says_that_it_compares_and_gets_whole_groups_in_every_request() -> None:
    samples = groups(5, 2, 2, 4)
    mixed = samples[::2] + samples[1::2]
    here = WeightedRewards.from_recipe([load_reward(VARIETY)]).score(mixed)
    with reward_serve(VARIETY, "--port", "0") as (url, _):
        for size in (1, 4, 100):
            spec = load_reward("remote", [f"url={url}", f"samples_per_request={size}", "batch_size=1"])
            there = WeightedRewards.from_recipe([spec])
            assert there.needs.compares_groups
            assert there.score(mixed).totals.tolist() == here.totals.tolist()


def test_a_service_that_compares_is_refused_for_held_out_evaluation_when_it_is_asked_at_the_start() -> None:
    server = FaultyServer()
    server.says(compares_groups=True)
    with serving(server) as url:
        spec = load_reward("remote", [f"url={url}"])
        WeightedRewards.from_recipe([spec], samples=SampleKind(height=8, width=8))
        with pytest.raises(ConfigError, match=r"eval\.rewards\.0: remote compares"):
            WeightedRewards.from_recipe([spec], where="eval.rewards", samples=SampleKind(height=8, width=8, alone=True))


@pytest.mark.parametrize("name", sorted(KINDS["reward"]))
def test_what_the_registry_says_of_a_built_in_reward_is_what_its_class_says(name: str) -> None:
    built_in = component_class("reward", name, where="test")
    assert compares_groups(name, where="test") == hasattr(built_in, "score_group")
    assert media_of("reward", name, where="test") == getattr(built_in, "media", ("image",))
