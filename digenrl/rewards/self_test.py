"""Samples that a neural reward is tried with at the start: what nobody could mistake for its opposite.

They are drawn, so that they need no file and are the same everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from digenrl.ids import SampleId
from digenrl.rewards.base import RewardSample

_SIDE = 256
GoodAndBad = tuple[Sequence[RewardSample], Sequence[RewardSample]]


def circle_and_noise() -> GoodAndBad:
    """A red circle on white, as the prompt has it, and noise."""
    page = Image.new("RGB", (_SIDE, _SIDE), "white")
    ImageDraw.Draw(page).ellipse((64, 64, 192, 192), fill="red")
    return _pair("a red circle on a white background", np.array(page), noise())


def sunset_and_noise() -> GoodAndBad:
    """A low sun over the sea, and noise: for rewards that look at beauty alone."""
    rows = np.linspace(0, 1, _SIDE)[:, None, None]
    sky = np.array([60, 70, 140]) * (1 - rows) + np.array([250, 150, 70]) * rows
    page = Image.fromarray(np.broadcast_to(sky, (_SIDE, _SIDE, 3)).astype(np.uint8))
    draw = ImageDraw.Draw(page)
    draw.ellipse((96, 120, 160, 184), fill=(255, 230, 160))
    draw.rectangle((0, 168, _SIDE, _SIDE), fill=(40, 50, 90))
    draw.polygon(((112, 168), (144, 168), (176, _SIDE), (80, _SIDE)), fill=(220, 150, 100))
    return _pair("a sunset over the sea", np.array(page), noise())


def motion_and_noise() -> GoodAndBad:
    """A red ball that flies from left to right, and noise in every frame: for rewards of videos."""
    frames = []
    for number in range(16):
        page = Image.new("RGB", (_SIDE, _SIDE), (200, 225, 255))
        left = 8 + 12 * number
        ImageDraw.Draw(page).ellipse((left, 96, left + 48, 144), fill="red")
        frames.append(np.array(page))
    random = np.random.default_rng(0).integers(0, 256, size=(16, _SIDE, _SIDE, 3), dtype=np.uint8)
    return _pair("a red ball flies from left to right", np.stack(frames), random, fps=8.0)


def noise(side: int = _SIDE) -> NDArray[np.uint8]:
    """A picture [side, side, 3] of nothing."""
    return np.random.default_rng(0).integers(0, 256, size=(side, side, 3), dtype=np.uint8)


def _pair(prompt: str, good: NDArray[np.uint8], bad: NDArray[np.uint8], *, fps: float | None = None) -> GoodAndBad:
    samples = [
        RewardSample(id=SampleId(0, 0, n), prompt=prompt, metadata={}, image=image, fps=fps)
        for n, image in enumerate((good, bad))
    ]
    return samples[:1], samples[1:]
