"""The reward ``geneval``: 1 where a detector and CLIP find in the image all that the prompt's metadata asks for, else 0.

The detector is Mask2Former, as GenEval's; the colour of an object is that of GenEval's ten whose texts lie nearest to its picture
in CLIP's space: cut out by its box, and grey (0x99) where its mask is not. Value: see rules; both readings are logged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from digenrl.config.settings.geneval import COLORS, GenEvalSettings, Scene
from digenrl.ids import SampleId
from digenrl.rewards.base import RewardSample, Score
from digenrl.rewards.clip import Clip
from digenrl.rewards.geneval.detector import Detector
from digenrl.rewards.geneval.rules import Found, Group, by_class, judge
from digenrl.rewards.neural import device_of
from digenrl.rewards.self_test import GoodAndBad, noise

_GREY = 0x99
_TEXTS = ("a photo of a {color} {label}", "a photo of a {color}-colored {label}", "a photo of a {color} object")
"""GenEval's; a colour is the mean of what CLIP makes of them."""
_SIGN = "stop sign"


class GenEvalReward:
    """Checks the objects of a prompt, their number, colours and places."""

    Settings = GenEvalSettings

    def __init__(self, settings: GenEvalSettings) -> None:
        """Raises ConfigError where the weights are not there."""
        self._settings = settings
        self._detector = Detector(settings.detector_path, least=min(settings.threshold, settings.counting_threshold))
        self._namer = ColorNamer(Clip.load(settings.clip_path, None, settings))
        self.to(device_of(settings.device))

    def score(self, samples: Sequence[RewardSample]) -> Mapping[SampleId, Score]:
        """One score for each image, with the parts ``strict`` and ``soft``. Raises ValueError where metadata ask for nothing."""
        scenes = [self._scene(sample) for sample in samples]
        return {sample.id: self._judged(sample.image, scene) for sample, scene in zip(samples, scenes, strict=True)}

    def self_test(self) -> GoodAndBad | None:
        """A drawn stop sign must beat noise, where the detector knows stop signs."""
        if not self._settings.self_test or _SIGN not in self._detector.classes:
            return None
        metadata = {"tag": "single_object", "include": [{"class": _SIGN, "count": 1}]}
        good, bad = (
            RewardSample(id=SampleId(0, 0, n), prompt=f"a photo of a {_SIGN}", metadata=metadata, image=image)
            for n, image in enumerate((_drawn_sign(), noise(512)))
        )
        return [good], [bad]

    def to(self, device: torch.device | str) -> None:
        """Move the networks."""
        self._detector.to(device)
        self._namer.to(device)

    def _scene(self, sample: RewardSample) -> Scene:
        try:
            scene = Scene.from_metadata(sample.metadata)
        except ValueError as error:
            raise ValueError(f"the prompt {sample.prompt!r} cannot be checked: {error}") from error
        unknown = {wanted.label for wanted in (*scene.include, *scene.exclude)} - self._detector.classes
        if unknown:
            raise ValueError(f"the prompt {sample.prompt!r} asks for {sorted(unknown)}, which the detector does not know")
        return scene

    def _judged(self, image: NDArray[np.uint8], scene: Scene) -> Score:
        groups = by_class(self._detector.find(image), scene.tag, self._settings)
        verdict = judge(scene, groups, lambda label, objects: self._namer.colors(image, label, objects), self._settings)
        parts = {"strict": float(verdict.strict), "soft": verdict.soft}
        return Score(value=parts[self._settings.read], parts=parts)


class ColorNamer:
    """Which of GenEval's colours an object has, as CLIP sees it."""

    def __init__(self, clip: Clip) -> None:
        self._clip = clip
        self._known: dict[str, Tensor] = {}

    def to(self, device: torch.device | str) -> None:
        """Move the network."""
        self._clip.to(device)

    def colors(self, image: NDArray[np.uint8], label: str, objects: Group) -> list[str]:
        """The colour of each object in an image [H, W, 3]."""
        if label not in self._known:
            self._known[label] = self._texts(label)
        pictures = self._clip.image_embeddings([cut_out(image, each) for each in objects])
        return [COLORS[place] for place in (pictures @ self._known[label].T).argmax(-1).tolist()]

    def _texts(self, label: str) -> Tensor:
        """[colours, width] of length 1."""
        texts = [text.format(color=color, label=label) for color in COLORS for text in _TEXTS]
        read = self._clip.text_embeddings(texts).reshape(len(COLORS), len(_TEXTS), -1)
        return torch.nn.functional.normalize(read.mean(1), dim=-1)


def cut_out(image: NDArray[np.uint8], found: Found) -> NDArray[np.uint8]:
    """An object's part [h, w, 3] of an image [H, W, 3], at least one pixel of it; grey beside its mask."""
    shown = image if found.mask is None else np.where(found.mask[..., None], image, np.uint8(_GREY))
    left, top, right, bottom = (round(edge) for edge in found.box)
    height, width = image.shape[:2]
    left, top = min(max(left, 0), width - 1), min(max(top, 0), height - 1)
    return np.ascontiguousarray(shown[top : max(bottom, top + 1), left : max(right, left + 1)])


def _drawn_sign() -> NDArray[np.uint8]:
    page = Image.new("RGB", (512, 512), (150, 190, 230))
    draw = ImageDraw.Draw(page)
    draw.rectangle((246, 330, 266, 512), fill=(120, 120, 120))
    draw.regular_polygon((256, 220, 150), 8, fill="white")
    draw.regular_polygon((256, 220, 138), 8, fill=(190, 20, 30))
    draw.text((256, 220), "STOP", fill="white", font=ImageFont.load_default(size=84), anchor="mm")
    return np.asarray(page)
