"""The scorer: latents to images or videos to rewards.

Invariants: every image carries its sample's id into the rewards; an image of non-finite latents or pixels never reaches a
reward, and its sample is invalid; the pixels that are scored are the pixels that are saved, so nobody may write to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from digenrl.data.prompts import Prompt
from digenrl.diffusion.batching import row_batches
from digenrl.ids import SampleId
from digenrl.models.base import ModelAdapter
from digenrl.rewards.base import RewardSample
from digenrl.rewards.compose import Rewards, WeightedRewards


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredBatch:
    """Images and rewards of B samples."""

    images: NDArray[np.uint8]
    """[B, H, W, 3], of videos [B, F, H, W, 3]; read-only; black where latents or the decoder's result were not finite."""
    rewards: Rewards


class Scorer:
    """Decodes and scores."""

    def __init__(
        self, adapter: ModelAdapter, rewards: WeightedRewards, *, forward_batch_size: int, fps: float | None = None
    ) -> None:
        """fps: frames per second of videos, which rewards are told."""
        self._adapter = adapter
        self._fps = fps
        self._rewards = rewards
        self._forward_batch_size = forward_batch_size

    @property
    def compares_groups(self) -> bool:
        """Whether a reward has to see all samples of a prompt at once."""
        return self._rewards.needs.compares_groups

    def score(self, samples: Sequence[SampleId], prompts: Sequence[Prompt], final_latents: Tensor) -> ScoredBatch:
        """Score B samples. prompts: one per sample. final_latents: [B, *latent]."""
        images, finite = self._decode(final_latents)
        fps = self._fps if images.ndim == 5 else None
        shown = [
            RewardSample(id=sample, prompt=prompt.text, metadata=prompt.metadata, image=image, fps=fps)
            for sample, prompt, image, ok in zip(samples, prompts, images, finite, strict=True)
            if ok
        ]
        scored = self._rewards.score(shown)
        return ScoredBatch(
            images=images,
            rewards=replace(
                scored,
                totals=_spread(scored.totals, finite),
                parts={name: _spread(values, finite) for name, values in scored.parts.items()},
            ),
        )

    @torch.no_grad()
    def _decode(self, latents: Tensor) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
        size, images, finite = self._forward_batch_size, [], []
        for batch in row_batches(len(latents), size):
            rows = batch.rows.to(latents.device)
            # Batch by batch: a video in float32 is four times as large as in bytes.
            decoded = self._adapter.decode(latents[rows])[: batch.count].cpu()
            # Latents too: a decoder that clamps turns infinity into white, which a reward may like.
            of_latents = torch.isfinite(latents[rows][: batch.count]).flatten(1).all(1).cpu()
            good = torch.isfinite(decoded).flatten(1).all(1) & of_latents
            decoded = torch.where(good.view(-1, *(1 for _ in decoded.shape[1:])), decoded, 0.0)
            images.append((decoded * 255).round().to(torch.uint8).movedim(-3, -1).contiguous().numpy())
            finite.append(good.numpy())
        joined = np.concatenate(images)
        joined.setflags(write=False)
        return joined, np.concatenate(finite)


def _spread(values: NDArray[np.float64], finite: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Values of the finite samples in their places, NaN elsewhere."""
    result = np.full(len(finite), np.nan)
    result[finite] = values
    return result
