"""What a vision-language judge is shown, and how its answer is read: strictly or not at all.

Invariant: an answer with no score, two, or one out of range is NaN, never a number.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from digenrl.config.settings.vlm_judge import JudgeSettings

_FENCE = re.compile(r"\A```(?:json)?\s*\n(.*)\n\s*```\Z", re.DOTALL)


def read_score(text: str, settings: JudgeSettings) -> float:
    """The number that an answer gives; NaN where it gives none, more than one, or one out of range."""
    value = (
        _by_key(text, settings.score_key or "score") if settings.score_regex is None else _by_regex(text, settings.score_regex)
    )
    return value if settings.minimum <= value <= settings.maximum else math.nan


def spread(frames: NDArray[np.uint8], count: int) -> NDArray[np.uint8]:
    """At most ``count`` frames [n, H, W, 3] of [F, H, W, 3], evenly spread; the middle one if it is to be one."""
    if count == 1:
        return frames[len(frames) // 2 : len(frames) // 2 + 1]
    return frames[sorted({round(place) for place in np.linspace(0, len(frames) - 1, count)})]


def _by_key(text: str, key: str) -> float:
    text = text.strip()
    fenced = _FENCE.match(text)
    try:
        plain = json.loads(fenced[1] if fenced else text, object_pairs_hook=_without_doubles)
        value = plain.get(key) if isinstance(plain, dict) else None
        return math.nan if isinstance(value, bool) or not isinstance(value, int | float) else float(value)
    except (ValueError, OverflowError, RecursionError):
        return math.nan


def _without_doubles(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    """A JSON object. Raises ValueError where a key stands twice, of which json would take the last."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice")
    return found


def _by_regex(text: str, pattern: str) -> float:
    found = re.findall(pattern, text)
    try:
        # Python's underscores between digits are nobody's way to write a score.
        return float(found[0]) if len(found) == 1 and "_" not in found[0] else math.nan
    except ValueError:
        return math.nan
