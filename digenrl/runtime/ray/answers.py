"""What workers answer with that driver and workers both know. Imports no torch: emulated workers know nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from digenrl.data.prompts import Prompt
from digenrl.ids import SampleId
from digenrl.rewards.compose import Rewards


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """What a worker says of itself once it is loaded."""

    pid: int
    device: str
    num_parameters: int
    """Trained numbers; 0 where it holds no policy."""
    num_buckets: int
    """Parts that its weights are published in."""
    compares_groups: bool = False
    """Whether a reward of it has to see all samples of a prompt at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """Rewards of the samples of one call, and the pictures that were asked for."""

    rewards: Rewards
    pictures: NDArray[np.uint8]
    """[n, H, W, 3], of videos [n, F, H, W, 3]."""


class ScoringHost(Protocol):
    """Whoever decodes and scores: a worker's host, or the driver's own."""

    def score(self, samples: Sequence[SampleId], prompts: Sequence[Prompt], picture_rows: Sequence[int], *latents: Any) -> Pieces:
        """See WorkerHost.score."""
        ...

    def score_held_out(
        self, samples: Sequence[SampleId], prompts: Sequence[Prompt], picture_rows: Sequence[int], latents: Any, /
    ) -> Pieces:
        """See WorkerHost.score_held_out."""
        ...

    def hello(self) -> Hello:
        """Who is here."""
        ...
