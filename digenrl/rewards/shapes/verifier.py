"""What an image shows, and how much of a scene that is: connected components, their colours and their outlines.

Invariants: whatever stands out from the background is counted, be it small or faint, so a policy gains nothing by
speckle; a background that is not light grey is counted, too, and an object of several colours has none; ``strict`` is 1
exactly when ``soft`` is 1; from a right image, ``soft`` falls with every object added or removed, and by more for those added.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import permutations

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from digenrl.rewards.shapes.render import coverage, signed_distance
from digenrl.rewards.shapes.scene import COLORS, SHAPES, Object, Scene, relation_holds

SOLID = 0.36
"""Largest channel difference to the background, in [0, 1], from which a pixel belongs to an object."""
FAINT = 0.20
"""As ``SOLID``, away from objects. Measured on clean background: up to 0.08 after the tiny VAE, 0.14 with 3 % noise."""
MIN_AREA_PX = 6
"""Smaller components are fragments: counted, but without shape or colour."""
MIN_IOU = 0.82
"""At which an outline still passes for a shape. Smallest values of 1,500 scenes, measured: rendered 0.94, after the tiny VAE
0.90, with 3 % noise on top 0.88. At 0.70, blobs between a circle and a triangle passed, which nobody would take for either."""
MAX_COLOR_DISTANCE = 0.28
"""Largest channel difference, in [0, 1], at which a colour still passes for one of the palette."""
MIN_PURE_SHARE = 0.85
"""Share of an object's inner pixels that must be of its colour: stripes of red and yellow are no orange."""
PAPER = 0.95
"""The background's grey value, in [0, 1]."""
MAX_TINT = 0.15
"""As ``SOLID``, of the background to ``PAPER``. The training pictures' backgrounds lie within 0.05."""

_ATTRIBUTE_SHARE = 0.7
_COUNT_SHARE = 0.3
_SURPLUS_COST = 2.0
"""A thing too many weighs as much as two wanted ones: objects and specks that nobody asked for are what RL adds first."""
_MAX_MATCHED = 5
"""Only the largest objects are matched with the wanted ones, at most 4: a bound on the permutations."""
_TOUCHING = np.ones((3, 3), dtype=bool)
"""Pixels are connected through edges and corners."""
_NEAR = np.ones((5, 5), dtype=bool)
"""Anti-aliased edges reach at most 2 pixels beyond an object's solid ones."""
_PALETTE = np.array(list(COLORS.values()), dtype=np.float64) / 255
_COLOR_NAMES = tuple(COLORS)


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectedObject:
    """One connected thing that stands out from the background."""

    shape: str | None
    """None for a fragment, and when no outline fits."""
    color: str | None
    """None for a fragment, when no palette colour is near, and when the object has several."""
    iou: tuple[float, ...]
    """Soft intersection over union with each of SHAPES, drawn with the same area and centroid."""
    color_distances: tuple[float, ...]
    """Largest channel difference to each palette colour, in [0, 1] (in the order of COLORS)."""
    x: float
    """Pixels from the left edge to the centroid."""
    y: float
    """Pixels from the top edge to the centroid."""
    area: int
    """Pixels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How much of a scene an image shows."""

    strict: float
    """1 when count, shapes, colours and relation are all right, else 0."""
    soft: float
    """Share in [0, 1] that is right: 0.7 x attributes and relation, diluted by surplus things, + 0.3 x exact count."""


def verify(image: NDArray[np.uint8], scene: Scene) -> Verdict:
    """Compare an image [H, W, 3] uint8 with a scene."""
    return judge(find_objects(image), scene)


def find_objects(image: NDArray[np.uint8]) -> list[DetectedObject]:
    """Everything that stands out from the background of an image [H, W, 3] uint8, the largest first.

    A background that is not light grey is one more thing: a fragment as large as the image.
    """
    pixels = image / 255.0
    border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    background = np.median(border, axis=0)
    contrast = np.abs(pixels - background).max(axis=-1)
    solid = contrast > SOLID
    faint = (contrast > FAINT) & ~solid
    if faint.any():
        # Away from objects only: next to them it is the anti-aliased edge.
        faint &= ~ndimage.binary_dilation(solid, _NEAR)
    # Solid and faint pixels never touch, so one labelling serves both.
    labels, _ = ndimage.label(solid | faint, _TOUCHING)
    found = []
    if np.abs(background - PAPER).max() > MAX_TINT:
        found.append(_fragment(*np.nonzero(np.ones_like(solid))))
    for index, window in enumerate(ndimage.find_objects(labels), start=1):
        mask = labels[window] == index
        rows, columns = np.nonzero(mask)
        rows, columns = rows + window[0].start, columns + window[1].start
        if len(rows) >= MIN_AREA_PX and solid[rows[0], columns[0]]:
            found.append(_describe(pixels, contrast, rows, columns))
        else:
            found.append(_fragment(rows, columns))
    return sorted(found, key=lambda item: -item.area)


def judge(found: Sequence[DetectedObject], scene: Scene) -> Verdict:
    """Compare what was found (largest first) with a scene, under the assignment that suits the image best."""
    count_is_right = len(found) == len(scene.objects)
    best = _best_match(found[:_MAX_MATCHED], scene)
    wanted = len(scene.objects)
    surplus_dilution = wanted / (wanted + _SURPLUS_COST * max(0, len(found) - wanted))
    soft = _ATTRIBUTE_SHARE * best * surplus_dilution + _COUNT_SHARE * count_is_right
    return Verdict(strict=float(count_is_right and best == 1.0), soft=soft)


def _best_match(found: Sequence[DetectedObject], scene: Scene) -> float:
    """Largest share in [0, 1] of attributes (the relation counts as one half) over all assignments of found objects."""
    wanted = scene.objects
    if not found:
        return 0.0
    named = {color for _, color in wanted}
    fit = [[_attributes_right(item, other, named) for other in found] + [0.0] for item in wanted]
    missing = len(found)
    # The index after the last one stands for "not there"; it may be given to several wanted objects.
    candidates = [*range(len(found))] + [missing] * max(0, len(wanted) - len(found))
    best = 0.0
    for assigned in permutations(candidates, len(wanted)):
        share = sum(row[column] for row, column in zip(fit, assigned, strict=True)) / len(wanted)
        if scene.relation is not None:
            share = (share + _relation_right(scene.relation, found, assigned)) / 2
        best = max(best, share)
    return best


def _attributes_right(wanted: Object, found: DetectedObject, named: Set[str | None]) -> float:
    """Shape and colour count one half each; a colour that the caption names nowhere takes half of the shape's, too."""
    shape, color = wanted
    if color is None:
        return 0.5 * (found.shape == shape) + 0.5
    return (0.5 if found.color in named else 0.25) * (found.shape == shape) + 0.5 * (found.color == color)


def _relation_right(relation: str, found: Sequence[DetectedObject], assigned: tuple[int, ...]) -> bool:
    first, second = assigned
    if max(first, second) == len(found):
        return False
    dx, dy = found[second].x - found[first].x, found[second].y - found[first].y
    return relation_holds(relation, dx, dy)


def _describe(
    pixels: NDArray[np.float64], contrast: NDArray[np.float64], rows: NDArray[np.intp], columns: NDArray[np.intp]
) -> DetectedObject:
    """Colour and outline of one component. pixels [H, W, 3] and contrast [H, W] in [0, 1]; rows and columns [area]."""
    own = contrast[rows, columns]
    middle, plateau = np.quantile(own, (0.5, 0.6))
    core = own >= middle  # the half with the most contrast: without the anti-aliased edge
    color = pixels[rows[core], columns[core]].mean(axis=0)
    color_distances = np.abs(_PALETTE - color).max(axis=1)
    nearest = int(color_distances.argmin())
    mask = np.zeros(contrast.shape, dtype=bool)
    mask[rows, columns] = True
    iou = _outline_iou(contrast / plateau, mask)
    likest = int(np.argmax(iou))
    named = color_distances[nearest] < MAX_COLOR_DISTANCE and _is_pure(pixels, mask, color)
    return DetectedObject(
        shape=SHAPES[likest] if iou[likest] >= MIN_IOU else None,
        color=_COLOR_NAMES[nearest] if named else None,
        iou=iou,
        color_distances=tuple(color_distances.tolist()),
        x=float(columns.mean()),
        y=float(rows.mean()),
        area=len(rows),
    )


def _fragment(rows: NDArray[np.intp], columns: NDArray[np.intp]) -> DetectedObject:
    return DetectedObject(
        shape=None,
        color=None,
        iou=(0.0,) * len(SHAPES),
        color_distances=(1.0,) * len(COLORS),
        x=float(columns.mean()),
        y=float(rows.mean()),
        area=len(rows),
    )


def _is_pure(pixels: NDArray[np.float64], mask: NDArray[np.bool_], color: NDArray[np.float64]) -> bool:
    """Whether nearly all of an object inside its edge is of one colour [3]. pixels [H, W, 3]; mask [H, W] of the object."""
    inner = pixels[ndimage.binary_erosion(mask, _TOUCHING)]
    return not len(inner) or bool((np.abs(inner - color).max(axis=1) < MAX_COLOR_DISTANCE).mean() >= MIN_PURE_SHARE)


def _outline_iou(relative_contrast: NDArray[np.float64], mask: NDArray[np.bool_]) -> tuple[float, ...]:
    """Soft IoU of one component, ``mask`` [H, W], with each shape of equal area and centroid. relative_contrast: [H, W].

    Sub-pixel: a hard fill ratio rejects a fifth of visually perfect anti-aliased shapes (measured).
    """
    height, width = relative_contrast.shape
    covered = np.clip(relative_contrast, 0, 1) * ndimage.binary_dilation(mask, _TOUCHING)
    covered[covered < 0.1] = 0
    area = covered.sum()
    y_px, x_px = np.ogrid[:height, :width]
    dx, dy = x_px - (covered * x_px).sum() / area, y_px - (covered * y_px).sum() / area
    triangle_half = np.sqrt(area / 2)
    # A triangle's centroid lies a third of its half height below the middle of its bounding box.
    distances = (
        signed_distance("circle", dx, dy, np.sqrt(area / np.pi)),
        signed_distance("square", dx, dy, np.sqrt(area) / 2),
        signed_distance("triangle", dx, dy + triangle_half / 3, triangle_half),
    )
    templates = coverage(np.stack(distances))
    overlap = np.minimum(covered, templates).sum(axis=(1, 2))
    return tuple((overlap / np.maximum(covered, templates).sum(axis=(1, 2))).tolist())
