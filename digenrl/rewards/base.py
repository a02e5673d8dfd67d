"""What a reward is: a mapping from sample ids to scores, computed from the very pixels that are saved.

A class says in ``media`` what it looks at: ("image",), which is the default, ("video",) or both. Of a video, a reward of images
is asked for every frame, and the mean over frames is the video's score. A class with ``score_group`` is asked for one prompt's
samples at a time, all of them.

Invariants: a reward sees each image together with its sample's id and answers by id, so a shuffled batch cannot mix
rewards up; a missing, surplus or foreign id, a non-number or an exception stops the run with the reward's name; a
non-finite score marks its sample invalid and is never replaced by a number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from digenrl.ids import SampleId


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSample:
    """One generated image with all that a reward may look at."""

    id: SampleId
    prompt: str
    metadata: Mapping[str, object]
    """The prompt's extra fields from a jsonl file (GenEval's ``include``, an OCR target, ...); empty for txt files."""
    image: NDArray[np.uint8]
    """[H, W, 3] uint8 RGB, exactly the pixels that the run folder's PNG holds; [F, H, W, 3] for a reward of videos."""
    fps: float | None = None
    """Frames per second of a video."""

    @property
    def frames(self) -> NDArray[np.uint8]:
        """[F, H, W, 3]; F is 1 for an image. The run folder's mp4 is a compressed copy of it."""
        return self.image if self.image.ndim == 4 else self.image[None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A reward's answer for one sample; a plain float means a score without parts."""

    value: float
    """What is trained on; higher is better. NaN or infinity marks the sample invalid."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named details for the logs (``strict``, ``soft``), averaged as ``reward/<name>/<part>``."""


class Reward(Protocol):
    """One reward. A user's class needs ``__init__(self, settings)``, ``Settings`` (pydantic) and ``score``.

    ``media``, a class attribute, may be left out by a reward of images. ``Settings`` may have an attribute or property
    ``sample_size``, the only (height, width) that the reward can score, and a method ``check_prompt(text, metadata)``, which says
    what is wrong with a prompt. The further methods may be left out.
    """

    def score(self, samples: Sequence[RewardSample]) -> Mapping[SampleId, Score | float]:
        """Score each sample: one entry per ``sample.id``, no more and no less."""
        ...

    def self_test(self) -> tuple[Sequence[RewardSample], Sequence[RewardSample]] | None:
        """Good and bad samples; every good one must score above every bad one, or the run does not start.

        None skips the check (the default of user rewards that do not define it).
        """
        ...

    def take_retries(self) -> int:
        """Requests to a service that were repeated since this was last asked; a reward that asks none need not define it."""
        ...

    def to(self, device: Any) -> None:
        """Move the network to a torch device: to its own before scoring, and to the CPU after, where it is offloaded."""
        ...


@runtime_checkable
class GroupReward(Protocol):
    """A reward that compares the samples of a prompt: ``score_group`` stands in the place of ``score``."""

    def score_group(self, samples: Sequence[RewardSample]) -> Mapping[SampleId, Score | float]:
        """Score all samples of one prompt whose pictures are finite: one entry per ``sample.id``, no more and no less."""
        ...
