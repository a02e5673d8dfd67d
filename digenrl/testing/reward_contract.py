"""What every reward has to do, as assertions that say what is wrong: the built-in ones pass them, and so should yours."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from digenrl.config.loader import load_reward
from digenrl.ids import SampleId
from digenrl.rewards.base import RewardSample
from digenrl.rewards.compose import WeightedRewards

Values = NDArray[np.float64]


def check_reward(name: str, settings: Sequence[str] = (), *, prompt: str = 'a sign that says "OPEN"', size: int = 64) -> None:
    """Assert the contract of a reward: a built-in name or package.module:Class. settings: ``key=value``, as in a recipe.

    size: height and width of the pictures that it is shown, where it does not name its own ``sample_size``.

    Raises AssertionError with what is wrong, ConfigError where the reward cannot be made or fails its self-test, and RunFailed
    where it answers for other samples than it was given, or with something else than numbers.
    """
    spec = load_reward(name, settings)
    before = _random_states()
    rewards = WeightedRewards.from_recipe([spec])
    samples = _samples(prompt, rewards.needs.sample_size or (size, size), video="image" not in rewards.needs.media)
    pixels = [sample.image.tobytes() for sample in samples]
    first = _values(rewards, samples)
    assert np.isfinite(first).any(), f"no sample of the prompt {prompt!r} has a finite score: give check_reward another prompt"
    assert [sample.image.tobytes() for sample in samples] == pixels, "score changes the pixels that it is given"
    _same(first, _values(rewards, samples), "the same samples score differently when they are asked for again")
    _same(first, _values(rewards, samples[::-1])[::-1], "scores depend on the order of the samples")
    if rewards.needs.compares_groups:
        _check_groups(rewards, samples, first)
    else:
        _check_alone(rewards, samples, first)
    assert _random_states() == before, "making it or scoring changes global random state (torch, numpy, random)"


def _check_alone(rewards: WeightedRewards, samples: Sequence[RewardSample], first: Values) -> None:
    alone = np.array([_values(rewards, [sample])[0] for sample in samples])
    _same(first, alone, "a sample scores differently alone than beside others, so its reward would depend on the placement")
    twin = replace(samples[0], id=SampleId(7, 0, 0))
    _same(first[:1], _values(rewards, [twin]), "a score depends on the sample's id, which says nothing about the picture")


def _check_groups(rewards: WeightedRewards, samples: Sequence[RewardSample], first: Values) -> None:
    others = [replace(sample, id=SampleId(0, 1, number)) for number, sample in enumerate(samples[1:4])]
    mixed = [sample for pair in zip(others, samples, strict=False) for sample in pair] + list(samples[len(others) :])
    scored = dict(zip((sample.id for sample in mixed), _values(rewards, mixed), strict=True))
    _same(first, [scored[sample.id] for sample in samples], "a group scores differently alone than beside another group")
    twins = [replace(sample, id=SampleId(7, 3, 9 - sample.id.sample)) for sample in samples]
    _same(first, _values(rewards, twins), "scores depend on the samples' ids, which say nothing about the pictures")
    _values(rewards, samples[:1])  # a group whose other samples are not finite is asked for, too


def _samples(prompt: str, size: tuple[int, int], *, video: bool) -> list[RewardSample]:
    height, width = size
    generator = np.random.default_rng(0)
    noise = generator.integers(0, 256, size=(4, height, width, 3), dtype=np.uint8)
    ramp = np.broadcast_to(np.linspace(0, 255, width).astype(np.uint8)[None, :, None], (height, width, 3))
    pictures = [np.zeros_like(noise[0]), np.full_like(noise[0], 255), np.array(ramp), *noise[:2]]
    if video:
        pictures = [np.stack([picture, picture[::-1], picture]) for picture in pictures]
    for picture in pictures:
        picture.setflags(write=False)  # as in a run
    return [
        RewardSample(id=SampleId(0, 0, n), prompt=prompt, metadata={}, image=picture, fps=8.0 if video else None)
        for n, picture in enumerate(pictures)
    ]


def _values(rewards: WeightedRewards, samples: Sequence[RewardSample]) -> Values:
    return rewards.score(samples).totals


def _same(first: object, second: object, wrong: str) -> None:
    assert np.array_equal(np.asarray(first), np.asarray(second), equal_nan=True), f"{wrong}: {first} and {second}"


def _random_states() -> tuple[object, ...]:
    numpy_state = np.random.get_state()
    return random.getstate(), str(numpy_state), torch.get_rng_state().numpy().tobytes()
