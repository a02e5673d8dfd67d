"""Anti-aliased pictures of scenes: a pixel's coverage is taken from its signed distance to the shape's outline.

The verifier compares objects with the same outlines (``signed_distance``), so a rendered scene is always verified.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from digenrl.rewards.shapes.scene import CANVAS, COLORS, Placement

_SQUARE_HALF_SIDE = 0.92
_TRIANGLE_HALF_HEIGHT = 0.95
"""Shares of a placement's radius; with them the three shapes look equally large."""


def render(layout: Sequence[Placement], *, background: float = 0.95, size: int = 32) -> NDArray[np.uint8]:
    """Draw a layout, later objects over earlier ones, on a grey ``background`` in [0, 1]: [size, size, 3] uint8."""
    return to_uint8(render_float(layout, background=background, size=size))


def render_float(layout: Sequence[Placement], *, background: float = 0.95, size: int = 32) -> NDArray[np.float32]:
    """As ``render``, before rounding: [size, size, 3] float32 in [0, 1]."""
    pixels_per_unit = size / CANVAS
    centres = (np.arange(size, dtype=np.float64) + 0.5) / pixels_per_unit
    image = np.full((size, size, 3), background, dtype=np.float64)
    for item in layout:
        distance = signed_distance(
            item.shape, centres[None, :] - item.x, centres[:, None] - item.y, half_extent(item.shape, item.radius)
        )
        cover = coverage(distance * pixels_per_unit)[..., None]
        image += cover * (np.array(COLORS[item.color]) / 255 - image)
    return image.astype(np.float32)


def to_uint8(image: NDArray[np.float32] | NDArray[np.float64]) -> NDArray[np.uint8]:
    """Round an image in [0, 1] to 0..255."""
    levels: NDArray[np.uint8] = np.rint(np.clip(image, 0, 1) * 255).astype(np.uint8)
    return levels


def half_extent(shape: str, radius: float) -> float:
    """Half the height of a shape drawn with this radius, in the radius' unit."""
    return radius * {"circle": 1.0, "square": _SQUARE_HALF_SIDE, "triangle": _TRIANGLE_HALF_HEIGHT}[shape]


def signed_distance(shape: str, dx: NDArray[np.float64], dy: NDArray[np.float64], half: float) -> NDArray[np.float64]:
    """Distance to the outline, negative inside, at (dx, dy) right of and below the middle of the bounding box.

    dx and dy broadcast against each other. half: half the height, in their unit; an upward triangle of this half
    height is as wide as high. Outside corners the distance is a lower bound, which is exact enough for one pixel.
    """
    distance: NDArray[np.float64]
    if shape == "circle":
        distance = np.hypot(dx, dy) - half
    elif shape == "square":
        distance = np.maximum(np.abs(dx), np.abs(dy)) - half
    else:
        flank = (np.abs(dx) * 2 - (dy + half)) / np.sqrt(5.0)
        distance = np.maximum(dy - half, flank)
    return distance


def coverage(distance_px: NDArray[np.float64]) -> NDArray[np.float64]:
    """Share of each pixel that the shape covers, given the signed distance at its centre in pixels."""
    return np.clip(0.5 - distance_px, 0, 1)
