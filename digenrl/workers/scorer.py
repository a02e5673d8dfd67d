"""The scorer: latents to images to rewards.

Invariants: every image carries its sample's id into the rewards; an image of non-finite latents or pixels never reaches a
reward, and its sample is invalid; the pixels that are scored are the pixels that are saved, so nobody may write to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    """[B, H, W, 3], read-only; black where latents or the decoder's result were not finite."""
    rewards: Rewards


class Scorer:
    """Decodes and scores."""

    def __init__(self, adapter: ModelAdapter, rewards: WeightedRewards, *, forward_batch_size: int) -> None:
        self._adapter = adapter
        self._rewards = rewards
        self._forward_batch_size = forward_batch_size

    def score(self, samples: Sequence[SampleId], prompts: Sequence[Prompt], final_latents: Tensor) -> ScoredBatch:
        """Score B samples. prompts: one per sample. final_latents: [B, *latent]."""
        images, finite = self._decode(final_latents)
        shown = [
            RewardSample(id=sample, prompt=prompt.text, metadata=prompt.metadata, image=image)
            for sample, prompt, image, ok in zip(samples, prompts, images, finite, strict=True)
            if ok
        ]
        scored = self._rewards.score(shown)
        return ScoredBatch(
            images=images,
            rewards=Rewards(
                totals=_spread(scored.totals, finite),
                parts={name: _spread(values, finite) for name, values in scored.parts.items()},
            ),
        )

    @torch.no_grad()
    def _decode(self, latents: Tensor) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
        size, parts = self._forward_batch_size, []
        for batch in row_batches(len(latents), size):
            parts.append(self._adapter.decode(latents[batch.rows.to(latents.device)])[: batch.count].cpu())
        decoded = torch.cat(parts)
        # Latents too: a decoder that clamps turns infinity into white, which a reward may like.
        finite = torch.isfinite(decoded).flatten(1).all(1) & torch.isfinite(latents).flatten(1).all(1).cpu()
        decoded = torch.where(finite.view(-1, 1, 1, 1), decoded, 0.0)
        images = (decoded * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()
        images.setflags(write=False)
        return images, finite.numpy()


def _spread(values: NDArray[np.float64], finite: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Values of the finite samples in their places, NaN elsewhere."""
    result = np.full(len(finite), np.nan)
    result[finite] = values
    return result
