"""Settings of the reward ``geneval``, and what a prompt's metadata asks for in the format of GenEval (arXiv 2310.11513)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from digenrl.config.settings.neural import NeuralSettings

COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
RELATIONS = ("left of", "right of", "above", "below")
COUNTING = "counting"


class GenEvalSettings(NeuralSettings):
    """Which networks look, and how sure they must be. The defaults are those of GenEval."""

    detector_path: str = Field(
        default="facebook/mask2former-swin-small-coco-instance",
        min_length=1,
        description="Folder or hub id of a detector in transformers' format, with safetensors: Mask2Former (GenEval's), or any "
        "model for object detection with fixed classes (DETR, RT-DETR).",
    )
    clip_path: str = Field(
        default="openai/clip-vit-large-patch14",
        min_length=1,
        description="Folder or hub id of the CLIP model that names colours, in transformers' format, with safetensors.",
    )
    read: Literal["strict", "soft"] = Field(
        default="strict",
        description="strict: 1 where all is right and else 0 is trained on; soft: the share that is right. Both are logged.",
    )
    threshold: float = Field(default=0.3, ge=0, lt=1, description="Objects count that the detector is surer of than this.")
    counting_threshold: float = Field(default=0.9, ge=0, lt=1, description="The same for prompts with the tag `counting`.")
    max_objects: int = Field(default=16, ge=1, description="Most objects of one class; the surest count.")
    max_overlap: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="An object is left out that overlaps a surer one of its class by this share (intersection over union); 1: "
        "none is.",
    )
    position_threshold: float = Field(
        default=0.1, ge=0, description="Distance between two objects, in shares of their sizes, that is no direction yet."
    )

    def check_prompt(self, text: str, metadata: Mapping[str, Any]) -> str | None:
        """What is wrong with a prompt; None if nothing is."""
        del text
        try:
            Scene.from_metadata(metadata)
        except ValueError as error:
            return str(error)
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """One entry of ``include`` or ``exclude``."""

    label: str
    count: int
    color: str | None = None
    position: tuple[str, int] | None = None
    """A relation, and the place in ``include`` of what it relates to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What a prompt asks for."""

    tag: str
    include: tuple[Wanted, ...]
    exclude: tuple[Wanted, ...]
    """Not as many as ``count`` of these."""

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Scene:
        """Raises ValueError where tag, include or exclude are not as GenEval has them."""
        tag = metadata.get("tag")
        if not isinstance(tag, str):
            raise ValueError("it has no `tag`, as the lines of GenEval's evaluation_metadata.jsonl have")
        include, exclude = (_entries(metadata, key) for key in ("include", "exclude"))
        if not include and not exclude:
            raise ValueError("it has neither `include` nor `exclude`: nothing to look for")
        for place, wanted in enumerate(include):
            if wanted.position is not None and not 0 <= wanted.position[1] < place:
                raise ValueError(f"position {list(wanted.position)} of {wanted.label!r} relates to no earlier entry of `include`")
        return cls(tag=tag, include=include, exclude=exclude)


def _entries(metadata: Mapping[str, Any], key: str) -> tuple[Wanted, ...]:
    plain = metadata.get(key, [])
    if not isinstance(plain, list | tuple) or not all(isinstance(entry, Mapping) for entry in plain):
        raise ValueError(f"`{key}` is not a list of objects")
    return tuple(_wanted(key, entry) for entry in plain)


def _wanted(key: str, entry: Mapping[str, Any]) -> Wanted:
    label, count, color, position = (entry.get(name) for name in ("class", "count", "color", "position"))
    if not isinstance(label, str) or not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ValueError(f"an entry of `{key}` needs a class and a count of at least 1, and is {dict(entry)}")
    if color is not None and color not in COLORS:
        raise ValueError(f"color {color!r} is none of {', '.join(COLORS)}")
    if position is None:
        return Wanted(label=label, count=count, color=color)
    if not isinstance(position, list | tuple) or len(position) != 2 or position[0] not in RELATIONS:
        raise ValueError(f"position {position!r} is not a pair of one of {', '.join(RELATIONS)} and the other entry's place")
    if not isinstance(position[1], int):
        raise ValueError(f"position {position!r} does not end with the other entry's place in `include`")
    return Wanted(label=label, count=count, color=color, position=(position[0], position[1]))
