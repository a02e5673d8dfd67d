"""Several rewards as one number per sample: a weighted sum, with every answer checked against its sample's id.

Each score is cut to the reward's ``clip`` and brought to size by its ``normalize`` before it enters the sum; what is logged of a
reward is the score itself.
"""

from __future__ import annotations

import math
import numbers
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from digenrl.config.registry import component_class
from digenrl.config.schema import RewardSpec
from digenrl.errors import ConfigError, DigenError, RunFailed
from digenrl.ids import SampleId
from digenrl.rewards.base import Reward, RewardSample, Score


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


class WeightedRewards:
    """The rewards of a recipe."""

    def __init__(self, rewards: Sequence[tuple[RewardSpec, Reward]]) -> None:
        self._rewards = tuple(rewards)

    @classmethod
    def from_recipe(cls, specs: Sequence[RewardSpec]) -> WeightedRewards:
        """Build every reward and run its self-test. Raises ConfigError naming the reward that fails."""
        built = []
        for index, spec in enumerate(specs):
            reward = _build(spec, component_class("reward", spec.type, where=f"rewards.{index}.type"))
            _self_test(spec.name, reward)
            built.append((spec, reward))
        return cls(built)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the rewards, as the logs have them."""
        return tuple(spec.name for spec, _ in self._rewards)

    def score(self, samples: Sequence[RewardSample]) -> Rewards:
        """Score the samples. Raises RunFailed when a reward raises, or answers for other samples than it was given."""
        # A tuple: a reward that sorts its samples in place must not change whose score is whose.
        samples = tuple(samples)
        totals = np.zeros(len(samples))
        parts: dict[str, NDArray[np.float64]] = {}
        efforts: dict[str, Effort] = {}
        for spec, reward in self._rewards:
            began = time.perf_counter()
            scores = _scores_or_none(spec, reward, samples)
            values = np.array([score.value for score in scores], dtype=np.float64)
            efforts[spec.name] = Effort(
                seconds=time.perf_counter() - began, invalid=int((~np.isfinite(values)).sum()), retries=_retries(reward)
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


def _scores_or_none(spec: RewardSpec, reward: Reward, samples: Sequence[RewardSample]) -> list[Score]:
    """One score per sample; NaN for all where a reward that is not required fails."""
    try:
        size = spec.batch_size or max(1, len(samples))
        return [
            score for start in range(0, len(samples), size) for score in _scores(spec.name, reward, samples[start : start + size])
        ]
    except RunFailed:
        if spec.required:
            raise
        return [Score(value=math.nan)] * len(samples)


def _retries(reward: Reward) -> int:
    take = getattr(reward, "take_retries", None)
    return take() if take is not None else 0


def _build(spec: RewardSpec, reward_class: Callable[[BaseModel], Reward]) -> Reward:
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


def _scores(name: str, reward: Reward, samples: Sequence[RewardSample]) -> list[Score]:
    """One score per sample: of videos, for a reward of images, the mean over frames."""
    is_video = samples[0].image.ndim == 4
    if not is_video or "video" in getattr(reward, "media", ("image",)):
        return [_as_score(name, answer) for answer in _ask(name, reward, samples)]
    by_frame = []
    for number in range(len(samples[0].frames)):
        # Frame by frame: the samples of one call have different ids, as a reward may expect.
        frames = tuple(replace(sample, image=sample.frames[number], fps=None) for sample in samples)
        by_frame.append([_as_score(name, answer) for answer in _ask(name, reward, frames)])
    return [_mean_score(scores) for scores in zip(*by_frame, strict=True)]


def _mean_score(frames: Sequence[Score]) -> Score:
    """The mean of each number; NaN where one frame has no valid score."""
    names = {part: None for frame in frames for part in frame.parts}
    parts = {part: float(np.mean([frame.parts.get(part, np.nan) for frame in frames])) for part in names}
    with np.errstate(invalid="ignore"):
        return Score(value=float(np.mean([frame.value for frame in frames])), parts=parts)


def _ask(name: str, reward: Reward, samples: Sequence[RewardSample]) -> list[Score | float]:
    try:
        answers = reward.score(samples)
    except DigenError:
        raise
    except Exception as error:
        raise RunFailed(
            f"The reward {name!r} raised {type(error).__name__}: {error}",
            why="An error is never scored as 0: the run would train on the reward's bugs.",
            fix="Mend the reward; its traceback stands above.",
        ) from error
    wanted = [sample.id for sample in samples]
    got = list(answers) if isinstance(answers, Mapping) else None
    if got is None or set(got) != set(wanted):
        detail = f"answered with a {type(answers).__name__}" if got is None else _difference(wanted, got)
        raise RunFailed(
            f"The reward {name!r} {detail}.",
            why="Every sample needs its own score, found by its id.",
            fix="Return {sample.id: score for each sample in samples}.",
        )
    return [answers[sample] for sample in wanted]


def _difference(wanted: Sequence[SampleId], got: Sequence[SampleId]) -> str:
    missing, foreign = set(wanted) - set(got), set(got) - set(wanted)
    return f"scored {len(got)} of {len(wanted)} samples: {len(missing)} missing, {len(foreign)} that were not asked for"


def _as_score(name: str, answer: object) -> Score:
    score = answer if isinstance(answer, Score) else Score(value=answer) if _is_number(answer) else None  # type: ignore[arg-type]
    if score is None or not _is_number(score.value):
        raise RunFailed(
            f"The reward {name!r} answered {answer!r}, which is not a number.",
            why="Only a number can be trained on; NaN is allowed and marks the sample invalid.",
            fix="Return floats, or Score(value=..., parts=...).",
        )
    for part, value in score.parts.items():
        if not (_is_number(value) or isinstance(value, bool | np.bool_)):
            raise RunFailed(
                f"The reward {name!r} answered {value!r} for its part {part!r}, which is not a number.",
                why="Parts are averaged for the logs.",
                fix="Return floats in Score.parts; True and False count as 1 and 0.",
            )
    return score


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real | np.integer | np.floating) and not isinstance(value, bool)


def _self_test(name: str, reward: Reward) -> None:
    test = getattr(reward, "self_test", None)
    try:
        samples = test() if test is not None else None
        if samples is None:
            return
        good, bad = ([float(_as_score(name, a).value) for a in _ask(name, reward, tuple(side))] for side in samples)
    except Exception as error:
        detail = error.what if isinstance(error, DigenError) else f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"The reward {name!r} fails its self-test: {detail}",
            why="It would fail in the run too, after the first samples are generated.",
            fix="Check its settings and the packages that it needs; self_test returns (good samples, bad samples).",
        ) from error
    # Every pair, rather than min and max: NaN compares false with everything and must fail.
    if not (good and bad) or any(not better > worse for better in good for worse in bad):
        raise ConfigError(
            f"The reward {name!r} fails its self-test: good samples score {good}, bad ones {bad}.",
            why="A reward that cannot tell them apart would train on noise.",
            fix="Check its settings and the packages that it needs.",
        )
