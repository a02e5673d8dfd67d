"""The reward ``shapes``: does the image show the objects that its caption names?

Pure CPU, exact and below a millisecond for each image, so the quickstart needs neither a GPU nor a download.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from digenrl.config.settings.rewards import ShapesSettings
from digenrl.errors import ConfigError
from digenrl.ids import SampleId
from digenrl.rewards.base import RewardSample, Score
from digenrl.rewards.shapes.render import render
from digenrl.rewards.shapes.scene import COLORS, Placement, Scene, caption, random_layout
from digenrl.rewards.shapes.verifier import verify

Layout = tuple[Placement, ...]


class ShapesReward:
    """Scores images of captioned shapes in [0, 1]: the weighted mean of a strict and a soft verdict."""

    Settings = ShapesSettings

    def __init__(self, settings: ShapesSettings) -> None:
        self._settings = settings

    def score(self, samples: Sequence[RewardSample]) -> Mapping[SampleId, Score]:
        """One score for each sample, with the parts ``strict`` (0 or 1) and ``soft`` (in [0, 1]).

        Raises ConfigError, naming the prompt, when its metadata does not describe a scene.
        """
        return {sample.id: self._score_one(sample) for sample in samples}

    def self_test(self) -> tuple[Sequence[RewardSample], Sequence[RewardSample]]:
        """Rendered images of four scenes; and blank, crowded and recoloured ones with the same captions."""
        rng = np.random.default_rng(0)
        good: list[RewardSample] = []
        bad: list[RewardSample] = []
        for index, scene in enumerate(_SELF_TEST_SCENES):
            right = random_layout(scene, rng)
            blank: Layout = ()
            wrong = (blank, _with_extra_object(scene, rng), _recoloured(right))
            good.append(_sample(scene, right, SampleId(0, index, 0)))
            bad.extend(_sample(scene, layout, SampleId(0, index, 1 + k)) for k, layout in enumerate(wrong))
        return good, bad

    def _score_one(self, sample: RewardSample) -> Score:
        verdict = verify(sample.image, _scene_of(sample))
        strict_weight, soft_weight = self._settings.strict_weight, self._settings.soft_weight
        value = (strict_weight * verdict.strict + soft_weight * verdict.soft) / (strict_weight + soft_weight)
        return Score(value=value, parts={"strict": verdict.strict, "soft": verdict.soft})


_SELF_TEST_SCENES = (
    Scene("color", (("circle", "red"),)),
    Scene("counting", (("triangle", "yellow"),) * 3),
    Scene("two_objects", (("square", "blue"), ("circle", "orange"))),
    Scene("position", (("square", "green"), ("triangle", "purple")), "left of"),
)


def _scene_of(sample: RewardSample) -> Scene:
    try:
        return Scene.from_metadata(sample.metadata)
    except ConfigError as error:
        raise ConfigError(
            f"The reward `shapes` cannot score the prompt {sample.prompt!r}: {error.what}",
            why=error.why,
            fix="Use a jsonl prompt file with the fields prompt, category, objects and relation, such as the shipped "
            "builtin:shapes/train.jsonl; or another reward for other prompts.",
        ) from error


def _with_extra_object(scene: Scene, rng: np.random.Generator) -> Layout:
    """The scene's objects and its first one once more, all apart from each other."""
    objects = (*scene.objects, scene.objects[0])
    places = random_layout(Scene("counting", (("circle", "red"),) * len(objects)), rng)
    return tuple(
        replace(place, shape=shape, color=color or place.color) for place, (shape, color) in zip(places, objects, strict=True)
    )


def _recoloured(layout: Layout) -> Layout:
    """Every object in the palette's next colour."""
    names = list(COLORS)
    return tuple(replace(item, color=names[(names.index(item.color) + 1) % len(names)]) for item in layout)


def _sample(scene: Scene, layout: Layout, sample_id: SampleId) -> RewardSample:
    return RewardSample(id=sample_id, prompt=caption(scene), metadata=scene.to_metadata(), image=render(layout))
