"""GenEval's rules (arXiv 2310.11513): are the objects of a prompt there, as many, in their colours, in their places?

Pure functions of what a detector has found. The surest ``count`` objects of a class are looked at; an entry of ``include`` is
met when there are at least so many, all of them have the colour, and each stands in the relation to each object of the other
entry. An entry of ``exclude`` is met when there are fewer than its count. Strict: all entries are met. ``soft`` is ours: the mean
over all that is asked (each count, colour and position) of the share that is right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from digenrl.config.settings.geneval import COUNTING, GenEvalSettings, Scene, Wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One object that a detector has found."""

    label: str
    score: float
    box: tuple[float, float, float, float]
    """Left, top, right and bottom, in pixels."""
    mask: NDArray[np.bool_] | None = None
    """[H, W]; None of a detector that finds boxes alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Of one image."""

    strict: bool
    soft: float
    """From 0 to 1."""


Group = tuple[Found, ...]
ColorsOf = Callable[[str, Group], Sequence[str]]
"""A class and some objects of it -> the colour of each."""


def by_class(found: Sequence[Found], tag: str, settings: GenEvalSettings) -> dict[str, Group]:
    """The objects that count, the surest of each class first."""
    threshold = settings.counting_threshold if tag == COUNTING else settings.threshold
    groups: dict[str, Group] = {}
    for label in dict.fromkeys(each.label for each in found):
        sure = [each for each in found if each.label == label and each.score > threshold]
        sure = sorted(sure, key=lambda each: -each.score)[: settings.max_objects]
        kept: list[Found] = []
        for each in sure:
            if settings.max_overlap == 1 or all(overlap(other.box, each.box) < settings.max_overlap for other in kept):
                kept.append(each)
        if kept:
            groups[label] = tuple(kept)
    return groups


def judge(scene: Scene, groups: Mapping[str, Group], colors_of: ColorsOf, settings: GenEvalSettings) -> Verdict:
    """Whether a scene is there. colors_of is asked only about objects whose colour matters."""
    shares: list[float] = []
    matched: list[Group | None] = []
    for wanted in scene.include:
        objects = groups.get(wanted.label, ())[: wanted.count]
        mine = _shares(wanted, objects, matched, colors_of, settings.position_threshold)
        matched.append(objects if all(share == 1 for share in mine) else None)
        shares += mine
    shares += [float(len(groups.get(wanted.label, ())) < wanted.count) for wanted in scene.exclude]
    return Verdict(strict=all(share == 1 for share in shares), soft=sum(shares) / len(shares))


def overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> float:
    """Intersection over union of two boxes whose last pixels belong to them."""
    shared = _area((max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3])))
    whole = _area(a) + _area(b) - shared
    return shared / whole if whole else 0.0


def relations(of: Found, to: Found, threshold: float) -> set[str]:
    """Where an object is, seen from another; two of them on a diagonal, none where they are too near.

    The offset of the centres is shortened by ``threshold`` times both sizes along each axis. What is left counts along an axis
    where it is more than half of the whole offset.
    """
    boxes = np.array([of.box, to.box]).reshape(2, 2, 2)
    centres, sizes = boxes.mean(axis=1), np.abs(np.diff(boxes, axis=1))[:, 0]
    offset = centres[0] - centres[1]
    left_over = np.maximum(np.abs(offset) - threshold * sizes.sum(axis=0), 0) * np.sign(offset)
    if (np.abs(left_over) < 1e-3).all():
        return set()
    x, y = left_over / np.linalg.norm(offset)
    names = {"left of": x < -0.5, "right of": x > 0.5, "above": y < -0.5, "below": y > 0.5}
    return {name for name, holds in names.items() if holds}


def _shares(
    wanted: Wanted, objects: Group, matched: Sequence[Group | None], colors_of: ColorsOf, position_threshold: float
) -> list[float]:
    """The share that is right of the count, and of colour and position where they are asked for; 0 for what cannot be seen."""
    enough = len(objects) == wanted.count
    shares = [len(objects) / wanted.count]
    if wanted.color is not None:
        shares.append(list(colors_of(wanted.label, objects)).count(wanted.color) / wanted.count if enough else 0.0)
    if wanted.position is not None:
        relation, place = wanted.position
        others = matched[place]
        # As GenEval: places are looked at only where number and colour of both sides are right.
        seen = others is not None and all(share == 1 for share in shares)
        pairs = [(mine, other) for mine in objects for other in others or ()]
        right = [relation in relations(mine, other, position_threshold) for mine, other in pairs]
        shares.append(sum(right) / len(right) if seen else 0.0)
    return shares


def _area(box: tuple[float, float, float, float]) -> float:
    return max(box[2] - box[0] + 1, 0) * max(box[3] - box[1] + 1, 0)
