"""Asking one reward: samples in, one checked score for each of them out.

Invariants: an answer is found by its sample's id, and checked for missing, surplus and foreign ones; the samples of a prompt
are never cut apart before a reward that compares them; of a video, a reward of images is asked for every frame.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from digenrl.config.reward_checks import Needs, sample_size_of
from digenrl.errors import ConfigError, DigenError, RunFailed
from digenrl.ids import SampleId
from digenrl.rewards.base import GroupReward, Reward, RewardSample, Score

AnyReward = Reward | GroupReward


def needs_of(reward: AnyReward, settings: object) -> Needs:
    """What a reward can look at: what it says of itself (a service does, once it was asked), or its class and settings."""
    said = getattr(reward, "needs", None)
    if isinstance(said, Needs):
        return said
    return Needs(
        media=getattr(reward, "media", ("image",)),
        sample_size=sample_size_of(settings),
        compares_groups=hasattr(reward, "score_group"),
    )


def ask(name: str, reward: AnyReward, needs: Needs, samples: Sequence[RewardSample], batch_size: int | None) -> list[Score]:
    """One score per sample, in order. Raises RunFailed with the reward's name for what it raises or answers wrongly."""
    order = {sample.id: place for place, sample in enumerate(samples)}
    scores: dict[int, Score] = {}
    for batch in _batches(samples, needs, batch_size):
        for sample, score in zip(batch, _scores(name, reward, needs, batch), strict=True):
            scores[order[sample.id]] = score
    return [scores[place] for place in range(len(samples))]


def self_test(name: str, reward: AnyReward, needs: Needs) -> None:
    """Raise ConfigError unless every good sample that the reward brings along scores above every bad one."""
    test = getattr(reward, "self_test", None)
    try:
        sides = test() if test is not None else None
        if sides is None:
            return
        good, bad = (tuple(side) for side in sides)
        # Beside each other, as a reward that compares them needs it.
        together = ask(name, reward, needs, (*good, *bad), None) if needs.compares_groups else []
        values = [s.value for s in together or [*ask(name, reward, needs, good, None), *ask(name, reward, needs, bad, None)]]
        better, worse = values[: len(good)], values[len(good) :]
    except Exception as error:
        detail = error.what if isinstance(error, DigenError) else f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"The reward {name!r} fails its self-test: {detail}",
            why="It would fail in the run too, after the first samples are generated.",
            fix="Check its settings and the packages that it needs; self_test returns (good samples, bad samples).",
        ) from error
    # Every pair, rather than min and max: NaN compares false with everything and must fail.
    if not (better and worse) or any(not high > low for high in better for low in worse):
        raise ConfigError(
            f"The reward {name!r} fails its self-test: good samples score {better}, bad ones {worse}.",
            why="A reward that cannot tell them apart would train on noise.",
            fix="Check its settings and the packages that it needs.",
        )


def groups_of(samples: Sequence[RewardSample]) -> list[tuple[RewardSample, ...]]:
    """The samples by prompt, in order of first appearance."""
    groups: dict[tuple[int, int], list[RewardSample]] = {}
    for sample in samples:
        groups.setdefault((sample.id.step, sample.id.prompt), []).append(sample)
    return [tuple(group) for group in groups.values()]


def whole_groups(samples: Sequence[RewardSample], size: int) -> list[tuple[RewardSample, ...]]:
    """The samples in batches of whole groups: of at most ``size`` samples, or of one group where that is larger."""
    batches: list[tuple[RewardSample, ...]] = []
    for group in groups_of(samples):
        if batches and len(batches[-1]) + len(group) <= size:
            batches[-1] = (*batches[-1], *group)
        else:
            batches.append(group)
    return batches


def _batches(samples: Sequence[RewardSample], needs: Needs, size: int | None) -> list[tuple[RewardSample, ...]]:
    size = size or max(1, len(samples))
    if needs.compares_groups:
        return whole_groups(samples, size)
    return [tuple(samples[start : start + size]) for start in range(0, len(samples), size)]


def _scores(name: str, reward: AnyReward, needs: Needs, samples: Sequence[RewardSample]) -> list[Score]:
    is_video = samples[0].image.ndim == 4
    if not is_video or "video" in needs.media:
        return _answers(name, reward, samples)
    # Frame by frame: the samples of one call have different ids, as a reward may expect.
    by_frame = [
        _answers(name, reward, [replace(sample, image=sample.frames[number], fps=None) for sample in samples])
        for number in range(len(samples[0].frames))
    ]
    return [_mean_score(scores) for scores in zip(*by_frame, strict=True)]


def _mean_score(frames: Sequence[Score]) -> Score:
    """The mean of each number; NaN where one frame has no valid score."""
    names = {part: None for frame in frames for part in frame.parts}
    parts = {part: float(np.mean([frame.parts.get(part, np.nan) for frame in frames])) for part in names}
    with np.errstate(invalid="ignore"):
        return Score(value=float(np.mean([frame.value for frame in frames])), parts=parts)


def _answers(name: str, reward: AnyReward, samples: Sequence[RewardSample]) -> list[Score]:
    # Tuples: a reward that sorts its samples in place must not change whose score is whose.
    calls = groups_of(samples) if hasattr(reward, "score_group") else [tuple(samples)]
    found: dict[SampleId, Score] = {}
    for call in calls:
        answers = _call(name, reward, call)
        found |= {sample.id: _as_score(name, answers[sample.id]) for sample in call}
    return [found[sample.id] for sample in samples]


def _call(name: str, reward: AnyReward, samples: Sequence[RewardSample]) -> Mapping[SampleId, Score | float]:
    try:
        answers = reward.score_group(samples) if isinstance(reward, GroupReward) else reward.score(samples)
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
    return answers


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
