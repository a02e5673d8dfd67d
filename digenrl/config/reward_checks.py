"""Checks of the rewards that a recipe lists: their weights, and whether they can score what the model makes.

They run in ``digenrl check`` and before every run; a service's own needs are known, and checked in the same words, once it is
asked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from digenrl.config.registry import Medium, compares_groups, media_of
from digenrl.config.reward_list import RewardSpec
from digenrl.config.schema import Recipe
from digenrl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleKind:
    """What a run makes, as far as a reward may care."""

    height: int
    width: int
    num_frames: int = 1
    alone: bool = False
    """One sample of each prompt, as in held-out evaluation, rather than groups of them."""

    @property
    def medium(self) -> Medium:
        """A video of one frame is an image."""
        return "video" if self.num_frames > 1 else "image"


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a reward can look at."""

    media: tuple[Medium, ...] = ("image",)
    """A reward of images takes videos, too: it is asked for every frame."""
    sample_size: tuple[int, int] | None = None
    """The only (height, width) that it can score; None for any."""
    compares_groups: bool = False
    """Whether it is asked for all samples of a prompt at once."""


def trained_samples(recipe: Recipe) -> SampleKind:
    """What the rewards that are trained on see."""
    rollout = recipe.rollout
    return SampleKind(height=rollout.height, width=rollout.width, num_frames=rollout.num_frames)


def held_out_samples(recipe: Recipe) -> SampleKind:
    """What the rewards of held-out evaluation see."""
    rollout = recipe.rollout
    return SampleKind(height=rollout.height, width=rollout.width, num_frames=rollout.num_frames, alone=True)


def check_rewards(recipe: Recipe) -> None:
    """Raise ConfigError for rewards that cannot be summed, or that cannot score the samples of this recipe."""
    _check_list("rewards", recipe.rewards, trained_samples(recipe))
    if recipe.eval is not None:
        key = "rewards" if recipe.eval.rewards is None else "eval.rewards"
        _check_list(key, recipe.eval_rewards, held_out_samples(recipe))


def check_needs(needs: Needs, samples: SampleKind, who: str) -> None:
    """Raise ConfigError where a reward cannot score such samples. who: the reward, as the message begins."""
    if samples.medium not in needs.media and "image" not in needs.media:
        raise ConfigError(
            f"{who} scores videos, and rollout.num_frames is {samples.num_frames}: an image.",
            fix="Set rollout.num_frames, or use a reward that scores images.",
        )
    size = (samples.height, samples.width)
    if needs.sample_size is not None and needs.sample_size != size:
        height, width = needs.sample_size
        raise ConfigError(
            f"{who} scores pictures of {height} x {width} pixels, and rollout.height x rollout.width is {size[0]} x {size[1]}.",
            why="It says that it can judge this size alone.",
            fix=f"Set rollout.height={height} and rollout.width={width}, or use another reward.",
        )
    if needs.compares_groups and samples.alone:
        raise ConfigError(
            f"{who} compares the samples of a prompt, and held-out evaluation draws one of each.",
            why="It would have nothing to compare a picture with.",
            fix="List rewards that score a picture by itself in eval.rewards, or leave the eval section out.",
        )


def sample_size_of(settings: Any) -> tuple[int, int] | None:
    """``sample_size`` of a reward's settings: the only (height, width) that it can score. Settings without it take any."""
    size: tuple[int, int] | None = getattr(settings, "sample_size", None)
    return size


def _check_list(key: str, rewards: Sequence[RewardSpec], samples: SampleKind) -> None:
    _check_weights(key, rewards)
    for index, reward in enumerate(rewards):
        where = f"{key}.{index}"
        needs = Needs(
            media=media_of("reward", reward.type, where=f"{where}.type"),
            sample_size=sample_size_of(reward.settings),
            compares_groups=compares_groups(reward.type, where=f"{where}.type"),
        )
        check_needs(needs, samples, f"{where}: {reward.type}")


def _check_weights(key: str, rewards: Sequence[RewardSpec]) -> None:
    weights = [reward.weight for reward in rewards]
    if all(weight == 0 for weight in weights):
        raise ConfigError(
            f"All weights in {key} are 0.", why="Every sample would have the same reward.", fix="Give one a weight of 1."
        )
    if abs(math.fsum(weights)) <= 1e-9 * math.fsum(map(abs, weights)):  # 0.1 + 0.2 - 0.3 is not 0 in floating point
        raise ConfigError(
            f"The weights in {key} ({', '.join(f'{weight:g}' for weight in weights)}) sum to 0.",
            why="What is good by one reward would be as bad by the others, so that a sample that all like is worth nothing.",
            fix="Let the weights sum to something else; a small change of one is enough where this is meant.",
        )
    for index, reward in enumerate(rewards):
        if not reward.required and reward.weight != 0:
            raise ConfigError(
                f"{key}.{index}: required: false needs weight: 0, and the weight of {reward.name!r} is {reward.weight:g}.",
                why="Samples of a group would be compared by different sums, those without this reward and those with it.",
                fix=f"Set {key}.{index}.weight=0 to watch it alone, or {key}.{index}.required=true.",
            )
