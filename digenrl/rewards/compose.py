"""Several rewards as one number per sample: a weighted sum, with every answer checked against its sample's id.

Each score is cut to the reward's ``clip`` and brought to size by its ``normalize`` before it enters the sum; what is logged of a
reward is the score itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from digenrl.config.registry import MEDIA, component_class
from digenrl.config.reward_checks import Needs, SampleKind, check_needs
from digenrl.config.reward_list import RewardSpec
from digenrl.errors import ConfigError, DigenError, RunFailed
from digenrl.rewards.asking import AnyReward, ask, needs_of, self_test
from digenrl.rewards.base import RewardSample, Score


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """What the scores of one reward took."""

    seconds: float = 0.0
    invalid: int = 0
    """Samples that it was asked for and has no finite score of."""
    retries: int = 0
    """Requests to a service that were repeated."""

    def __add__(self, other: Effort) -> Effort:
        return Effort(
            seconds=self.seconds + other.seconds, invalid=self.invalid + other.invalid, retries=self.retries + other.retries
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewards:
    """Rewards of B samples, in the order of the samples given."""

    totals: NDArray[np.float64]
    """[B], the weighted sum; NaN where any reward is not finite."""
    parts: Mapping[str, NDArray[np.float64]]
    """``<reward>`` and ``<reward>/<part>`` -> [B]."""
    efforts: Mapping[str, Effort] = field(default_factory=dict)
    """By reward."""


def join_rewards(parts: Sequence[Rewards]) -> Rewards:
    """Rewards of the samples of all parts, in order. What one of them does not have is NaN for its samples."""
    names = list(dict.fromkeys(name for part in parts for name in part.parts))
    return Rewards(
        totals=np.concatenate([part.totals for part in parts]),
        parts={
            name: np.concatenate([part.parts.get(name, np.full(len(part.totals), np.nan)) for part in parts]) for name in names
        },
        efforts={
            name: sum((part.efforts[name] for part in parts if name in part.efforts), Effort())
            for name in dict.fromkeys(name for part in parts for name in part.efforts)
        },
    )


@dataclass(frozen=True, slots=True)
class Built:
    """One reward of a list, ready to be asked."""

    spec: RewardSpec
    reward: AnyReward
    needs: Needs


class WeightedRewards:
    """The rewards of a list."""

    def __init__(self, rewards: Sequence[tuple[RewardSpec, AnyReward]]) -> None:
        self.built = tuple(Built(spec, reward, needs_of(reward, spec.settings)) for spec, reward in rewards)

    @classmethod
    def from_recipe(
        cls,
        specs: Sequence[RewardSpec],
        *,
        where: str = "rewards",
        samples: SampleKind | None = None,
        beside: Sequence[Built] = (),
    ) -> WeightedRewards:
        """Build every reward and run its self-test. Raises ConfigError naming the reward that fails.

        where: the list's key in the recipe, for messages. samples: what is to be scored; unknown if None. beside: rewards that
        are there already; one of the same type and settings serves both lists.
        """
        rewards = []
        for index, spec in enumerate(specs):
            reward = _same_reward(spec, beside)
            if reward is None:
                reward = _build(spec, component_class("reward", spec.type, where=f"{where}.{index}.type"))
                _check_offload(spec, reward, f"{where}.{index}.offload")
                self_test(spec.name, reward, needs_of(reward, spec.settings))
                _put_away(spec, reward)
            rewards.append((spec, reward))
        made = cls(rewards)
        if samples is not None:
            made.check(samples, where=where)
        return made

    def check(self, samples: SampleKind, *, where: str) -> None:
        """Raise ConfigError where a reward cannot score such samples, which of a service is known only now."""
        for index, built in enumerate(self.built):
            check_needs(built.needs, samples, f"{where}.{index}: {built.spec.name}")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the rewards, as the logs have them."""
        return tuple(built.spec.name for built in self.built)

    @property
    def needs(self) -> Needs:
        """What all of them can score; a reward of images takes the frames of a video."""
        takes_images = all("image" in built.needs.media for built in self.built)
        sizes = [built.needs.sample_size for built in self.built if built.needs.sample_size is not None]
        return Needs(
            media=MEDIA if takes_images else ("video",),
            sample_size=sizes[0] if sizes else None,
            compares_groups=any(built.needs.compares_groups for built in self.built),
        )

    def score(self, samples: Sequence[RewardSample]) -> Rewards:
        """Score the samples. Raises RunFailed when a reward raises, or answers for other samples than it was given."""
        totals = np.zeros(len(samples))
        parts: dict[str, NDArray[np.float64]] = {}
        efforts: dict[str, Effort] = {}
        for built in self.built:
            spec, began = built.spec, time.perf_counter()
            scores = _scores_or_none(built, tuple(samples))
            values = np.array([score.value for score in scores], dtype=np.float64)
            efforts[spec.name] = Effort(
                seconds=time.perf_counter() - began, invalid=int((~np.isfinite(values)).sum()), retries=_retries(built.reward)
            )
            parts[spec.name] = values
            for part in {name: None for score in scores for name in score.parts}:
                parts[f"{spec.name}/{part}"] = np.array([s.parts.get(part, np.nan) for s in scores], dtype=np.float64)
            if spec.required:
                with np.errstate(invalid="ignore"):
                    totals += spec.weight * _sized(spec, values)
        totals[~np.isfinite(totals)] = np.nan
        return Rewards(totals=totals, parts=parts, efforts=efforts)


def _sized(spec: RewardSpec, values: NDArray[np.float64]) -> NDArray[np.float64]:
    """As they enter the sum; an infinity stays one, so that no bound makes a number of it."""
    if spec.clip is not None:
        values = np.where(np.isfinite(values), np.clip(values, *spec.clip), values)
    return (values - spec.normalize.mean) / spec.normalize.std


def _scores_or_none(built: Built, samples: Sequence[RewardSample]) -> list[Score]:
    """One score per sample; NaN for all where a reward that is not required fails."""
    spec = built.spec
    try:
        with _on_its_device(spec, built.reward):
            return ask(spec.name, built.reward, built.needs, samples, spec.batch_size)
    except RunFailed:
        if spec.required:
            raise
        return [Score(value=math.nan)] * len(samples)


@contextmanager
def _on_its_device(spec: RewardSpec, reward: Any) -> Iterator[None]:
    if not spec.offload:
        yield
        return
    from digenrl.rewards.neural import device_of  # needs torch, which this file does not

    reward.to(device_of(getattr(spec.settings, "device", "auto")))
    try:
        yield
    finally:
        _put_away(spec, reward)


def _put_away(spec: RewardSpec, reward: Any) -> None:
    if spec.offload:
        reward.to("cpu")


def _check_offload(spec: RewardSpec, reward: AnyReward, key: str) -> None:
    if spec.offload and not hasattr(reward, "to"):
        raise ConfigError(
            f"{key}: {spec.name} has nothing to offload.",
            why="It has no network here, or does not say how to move it (a method `to(device)`).",
            fix=f"Set {key}=false.",
        )


def _retries(reward: AnyReward) -> int:
    take = getattr(reward, "take_retries", None)
    return take() if take is not None else 0


def _same_reward(spec: RewardSpec, beside: Sequence[Built]) -> AnyReward | None:
    for built in beside:
        if (built.spec.type, built.spec.settings, built.spec.offload) == (spec.type, spec.settings, spec.offload):
            return built.reward
    return None


def _build(spec: RewardSpec, reward_class: Callable[[BaseModel], AnyReward]) -> AnyReward:
    try:
        return reward_class(spec.settings)
    except DigenError:
        raise
    except Exception as error:
        raise ConfigError(
            f"The reward {spec.name!r} could not be made: {type(error).__name__}: {error}",
            why="It is built once, before anything is generated.",
            fix="Check its settings and the packages that it needs; `__init__` takes its settings and nothing else.",
        ) from error
