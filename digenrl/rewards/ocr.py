"""The reward ``ocr``: how much of the text that the prompt asks for can be read in the image (text rendering of Flow-GRPO).

value = 1 - min(d, n) / n, with n characters in the target and d the edit distance (insert, delete, replace, 1 each) between the
target and all that is read, joined in the order in which the reader finds it. The reader is RapidOCR, whose weights come with
its package; it runs on one thread, so that its numbers can be repeated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from digenrl.config.settings.ocr import OcrSettings, comparable, target_of
from digenrl.errors import ConfigError
from digenrl.ids import SampleId
from digenrl.rewards.base import RewardSample, Score


class OcrReward:
    """Share of the target's characters that are right, from 0 to 1. A sample whose prompt has no target is invalid."""

    Settings = OcrSettings

    def __init__(self, settings: OcrSettings) -> None:
        """Raises ConfigError where the reader is not installed."""
        try:
            from rapidocr_onnxruntime import RapidOCR
        except ImportError as error:
            raise ConfigError(
                f"The reward ocr needs the package rapidocr-onnxruntime: {error}.",
                fix='pip install "digenrl[ocr]", on every machine that scores; its weights come with it.',
            ) from error
        self._settings = settings
        self._reader: Any = RapidOCR(intra_op_num_threads=1, inter_op_num_threads=1, det_limit_side_len=settings.detection_side)

    def score(self, samples: Sequence[RewardSample]) -> Mapping[SampleId, Score]:
        """One score for each image, with the part ``exact``: is the text right to the letter?"""
        return {sample.id: self._score_one(sample) for sample in samples}

    def self_test(self) -> tuple[Sequence[RewardSample], Sequence[RewardSample]]:
        """A rendered word must beat another word, and an empty page."""
        prompt = 'a sign that says "OPEN"'
        pages = [rendered("OPEN"), rendered("SHUT"), rendered("")]
        good, *bad = (
            RewardSample(id=SampleId(0, 0, number), prompt=prompt, metadata={}, image=page) for number, page in enumerate(pages)
        )
        return [good], bad

    def _score_one(self, sample: RewardSample) -> Score:
        target = target_of(sample.prompt, self._settings)
        if not target:
            return Score(value=math.nan)
        value = likeness(target, comparable(self._read(sample), self._settings), self._settings.match)
        return Score(value=value, parts={"exact": float(value == 1)})

    def _read(self, sample: RewardSample) -> str:
        found, _ = self._reader(np.ascontiguousarray(sample.image[..., ::-1]))  # it takes BGR
        return " ".join(text for _, text, _ in found or ())


def likeness(target: str, read: str, match: Literal["whole", "within"]) -> float:
    """1 - min(d, n) / n for a target of n > 0 characters; with ``within``, d is the least for any stretch of what is read."""
    # One row of the usual table for each character of the target; a free start and end make it a search.
    row = [0 if match == "within" else place for place in range(len(read) + 1)]
    for number, wanted in enumerate(target, start=1):
        above, row = row, [number]
        for place, seen in enumerate(read, start=1):
            row.append(min(above[place] + 1, row[-1] + 1, above[place - 1] + (wanted != seen)))
    distance = min(row) if match == "within" else row[-1]
    return 1 - min(distance, len(target)) / len(target)


def rendered(text: str, *, height: int = 192, width: int = 192, size: int = 40) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A page [height, width, 3] with a line of text in Pillow's own font."""
    page = Image.new("RGB", (width, height), "white")
    ImageDraw.Draw(page).text((12, (height - size) // 2), text, fill="black", font=ImageFont.load_default(size=size))
    return np.asarray(page)
