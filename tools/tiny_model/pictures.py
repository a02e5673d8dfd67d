"""Captioned pictures to train on: drawn from a seed, some with a caption that is wrong in one point.

Invariants: the same seed draws the same examples; no caption that RL holds out is drawn, but for those of ``single``,
of which there are three in all (a model that has not seen "a square" cannot know it).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from digenrl.rewards.shapes.render import render
from digenrl.rewards.shapes.scene import (
    CATEGORIES,
    COLORS,
    RELATIONS,
    SHAPES,
    Object,
    Scene,
    all_scenes,
    caption,
    is_held_out,
    random_layout,
)

CATEGORY_WEIGHTS = {"single": 1, "color": 2, "counting": 4, "two_objects": 4, "position": 5}
"""Harder categories are drawn more often."""
WRONG_CAPTIONS = 0.05
"""Share of the examples that show something else than their caption says, as captions from the web do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A caption and a picture for it."""

    caption: str
    image: NDArray[np.uint8]
    """[32, 32, 3]."""


def draw_examples(count: int, *, seed: int, wrong_captions: float = WRONG_CAPTIONS) -> list[Example]:
    """Draw examples. wrong_captions: the share in [0, 1] whose picture differs from the caption in one point."""
    rng = np.random.default_rng(seed)
    scenes = {category: _trainable(category) for category in CATEGORY_WEIGHTS}
    weights = np.array(list(CATEGORY_WEIGHTS.values())) / sum(CATEGORY_WEIGHTS.values())
    examples = []
    for index in rng.choice(len(weights), size=count, p=weights):
        candidates = scenes[CATEGORIES[index]]
        named = candidates[rng.integers(len(candidates))]
        shown = named
        if rng.random() < wrong_captions:
            misses = near_misses(named)
            shown = misses[rng.integers(len(misses))]
        image = render(random_layout(shown, rng), background=rng.uniform(0.9, 1.0))
        examples.append(Example(caption=caption(named), image=image))
    return examples


def near_misses(scene: Scene) -> list[Scene]:
    """The scenes that differ from this one in one point: a shape, a colour, an object more or less, the relation."""
    first, count = scene.objects[0], len(scene.objects)
    match scene.category:
        case "single":
            return [other for other in all_scenes("single") if other != scene]
        case "color":
            return [Scene("color", (item,)) for item in _variations(first)] + [Scene("counting", (first,) * 2)]
        case "counting":
            fewer = Scene("color", (first,)) if count == 2 else Scene("counting", (first,) * (count - 1))
            more = [Scene("counting", (first,) * (count + 1))] if count < 4 else []
            return [Scene("counting", (item,) * count) for item in _variations(first)] + [fewer, *more]
    second = scene.objects[1]
    pairs = [(item, second) for item in _variations(first)] + [(first, item) for item in _variations(second)]
    changed = [Scene(scene.category, pair, scene.relation) for pair in pairs if pair[0] != pair[1]]
    turned = [Scene("position", scene.objects, other) for other in RELATIONS if scene.relation not in (None, other)]
    return [*changed, *turned, Scene("color", (first,)), Scene("color", (second,))]


def _variations(item: Object) -> list[Object]:
    """The objects that differ from ``item`` in either shape or colour."""
    return [other for other in product(SHAPES, COLORS) if (other[0] == item[0]) != (other[1] == item[1])]


def _trainable(category: str) -> list[Scene]:
    return [scene for scene in all_scenes(category) if category == "single" or not is_held_out(scene)]
