"""From latents to rewards: every reward under its own sample's id, and nothing non-finite in front of a reward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from digenrl.algorithms.base import RewardTable
from digenrl.algorithms.flow_grpo import FlowGRPO
from digenrl.config.reward_list import RewardSpec
from digenrl.config.schema import Recipe
from digenrl.config.section import Section
from digenrl.data.prompts import Prompt
from digenrl.data.sampler import PromptSampler
from digenrl.errors import ProtocolError, RunFailed
from digenrl.ids import MicroBatchId, SampleId
from digenrl.rewards.base import RewardSample, Score
from digenrl.rewards.compose import WeightedRewards
from digenrl.runtime.ledger import Ledger
from digenrl.workers.scorer import Scorer


class Painter:
    """An adapter whose pictures are flat, of the colour that the latents say."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def decode(self, latents: Tensor) -> Tensor:
        self.batches.append(len(latents))
        return (latents[:, :1, :1, :1] / 255).expand(-1, 3, 4, 4).clamp(0, 1)


class Reads:
    """A reward that reads the colour back, and answers in an order of its own."""

    def __init__(self) -> None:
        self.seen: list[RewardSample] = []

    def score(self, samples: Sequence[RewardSample]) -> Mapping[SampleId, Score | float]:
        self.seen.extend(samples)
        backwards = sorted(samples, key=lambda s: s.image[0, 0, 0], reverse=True)
        return {s.id: Score(value=float(s.image[0, 0, 0]), parts={"half": s.image[0, 0, 0] / 2}) for s in backwards}


def rewards_of(*rewards: Any) -> WeightedRewards:
    return WeightedRewards([(RewardSpec(type="x", name=f"r{i}", settings=Section()), r) for i, r in enumerate(rewards)])


def scorer(*rewards: Any, size: int = 3, adapter: Any = None) -> Scorer:
    return Scorer(adapter or Painter(), rewards_of(*rewards), forward_batch_size=size)


def samples(count: int) -> list[SampleId]:
    return [SampleId(0, 0, i) for i in range(count)]


def latents_of(ids: Sequence[float]) -> Tensor:
    return torch.tensor(ids, dtype=torch.float32).view(-1, 1, 1, 1).expand(-1, 2, 2, 2).clone()


def prompts(count: int) -> list[Prompt]:
    return [Prompt(text=f"prompt {i}", metadata={"number": i}) for i in range(count)]


def test_every_order_of_six_micro_batches_gives_every_sample_its_own_reward(tiny_recipe: Callable[..., Recipe]) -> None:
    recipe = tiny_recipe(rollout={"prompts_per_step": 6, "num_generations": 4})
    algorithm = FlowGRPO(recipe.algorithm.settings, recipe)  # type: ignore[arg-type]
    sampler = PromptSampler(prompts(10), prompts_per_step=6, seed=0)
    judge = scorer(Reads())
    wanted = np.arange(24.0).reshape(6, 4)
    for order in permutations(range(6)):
        ledger = Ledger(sampler, algorithm, recipe)
        for index in order:
            micro_batch = MicroBatchId(0, index)
            ids = ledger.samples(micro_batch)
            latents = latents_of([4 * s.prompt + s.sample for s in ids])
            batch = judge.score(ids, [ledger.step(0).prompts[s.prompt] for s in ids], latents)
            ledger.add_rewards(micro_batch, ids, batch.rewards)
        assert np.array_equal(ledger.step(0).rewards, wanted)
        for index in order:
            (group,) = ledger.advantages(MicroBatchId(0, index))
            assert np.array_equal(group.values, algorithm.advantages(RewardTable(total=wanted[index : index + 1]))[0].values)


def test_the_ledger_refuses_the_samples_of_another_micro_batch(tiny_recipe: Callable[..., Recipe]) -> None:
    recipe = tiny_recipe()
    algorithm = FlowGRPO(recipe.algorithm.settings, recipe)  # type: ignore[arg-type]
    ledger = Ledger(PromptSampler(prompts(4), prompts_per_step=2, seed=0), algorithm, recipe)
    ids = ledger.samples(MicroBatchId(0, 1))
    batch = scorer(Reads()).score(ids, prompts(3), latents_of([1, 2, 3]))
    with pytest.raises(ProtocolError):
        ledger.add_rewards(MicroBatchId(0, 0), ids, batch.rewards)
    assert np.isnan(ledger.step(0).rewards).all()


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_decoding_happens_in_batches_of_one_size_and_drops_the_padding(size: int) -> None:
    painter = Painter()
    batch = scorer(Reads(), size=size, adapter=painter).score(samples(5), prompts(5), latents_of([10, 20, 30, 40, 50]))
    assert set(painter.batches) == {size}
    assert batch.rewards.totals.tolist() == [10, 20, 30, 40, 50]
    assert batch.images.shape == (5, 4, 4, 3)
    assert batch.images.dtype == np.uint8


def test_a_reward_gets_the_prompt_the_metadata_and_the_pixels_of_its_sample() -> None:
    reads = Reads()
    batch = scorer(reads).score(samples(4), prompts(4), latents_of([9, 8, 7, 6]))
    for index, seen in enumerate(reads.seen):
        assert (seen.id, seen.prompt, seen.metadata) == (SampleId(0, 0, index), f"prompt {index}", {"number": index})
        assert np.array_equal(seen.image, batch.images[index])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_an_image_of_non_finite_latents_never_reaches_a_reward_and_its_sample_is_invalid(bad: float) -> None:
    reads = Reads()
    batch = scorer(reads).score(samples(4), prompts(4), latents_of([9, bad, 7, 6]))
    assert [s.id.sample for s in reads.seen] == [0, 2, 3]
    assert np.isnan(batch.rewards.totals[1])
    assert batch.rewards.totals[[0, 2, 3]].tolist() == [9, 7, 6]
    for values in batch.rewards.parts.values():
        assert np.isnan(values[1])
        assert np.isfinite(values[[0, 2, 3]]).all()
    assert not batch.images[1].any()


def test_one_bad_pixel_makes_an_image_invalid_and_black() -> None:
    class OneBadPixel(Painter):
        def decode(self, latents: Tensor) -> Tensor:
            images = super().decode(latents).clone()
            images[latents[:, 0, 0, 0] == 7, 1, 2, 3] = float("nan")
            return images

    reads = Reads()
    batch = scorer(reads, adapter=OneBadPixel()).score(samples(3), prompts(3), latents_of([9, 7, 6]))
    assert [s.id.sample for s in reads.seen] == [0, 2]
    assert not batch.images[1].any()


def test_rewards_are_not_asked_when_no_image_is_valid() -> None:
    class NeverAsked:
        def score(self, samples: Sequence[RewardSample]) -> Mapping[SampleId, float]:
            raise AssertionError("no image is valid")

    batch = scorer(NeverAsked()).score(samples(2), prompts(2), latents_of([float("nan")] * 2))
    assert np.isnan(batch.rewards.totals).all()
    assert np.isnan(batch.rewards.parts["r0"]).all()


def test_a_reward_that_sorts_its_samples_in_place_cannot_exchange_rewards() -> None:
    class Sorts(Reads):
        def score(self, samples: Sequence[RewardSample]) -> Mapping[SampleId, Score | float]:
            samples.sort(key=lambda s: s.image[0, 0, 0])  # type: ignore[attr-defined]
            return super().score(samples)

    with pytest.raises(RunFailed, match="sort"):
        scorer(Sorts()).score(samples(3), prompts(3), latents_of([9, 8, 7]))


def test_a_reward_that_paints_over_the_pixels_is_stopped() -> None:
    class Paints(Reads):
        def score(self, samples: Sequence[RewardSample]) -> Mapping[SampleId, Score | float]:
            samples[0].image[:] = 255
            return super().score(samples)

    with pytest.raises(RunFailed, match="read-only"):
        scorer(Paints()).score(samples(3), prompts(3), latents_of([9, 8, 7]))


def test_pixels_are_rounded_to_the_nearest_of_256_levels(make_rig: Callable[..., Any]) -> None:
    rig = make_rig()
    trajectory = rig.trajectory()
    reads = Reads()
    batch = Scorer(rig.adapter, rewards_of(reads), forward_batch_size=6).score(
        trajectory.samples, prompts(6), trajectory.final_latents
    )
    decoded = rig.adapter.decode(trajectory.final_latents)
    assert np.array_equal(batch.images, (decoded * 255).round().byte().permute(0, 2, 3, 1).numpy())
    assert batch.images.std() > 5, "the pictures are not flat"
