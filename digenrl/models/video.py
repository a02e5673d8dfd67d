"""What families of videos share: latents with frames, and the VAE's frames in the order that scorers take."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def latent_shape(pipeline: Any, height: int, width: int, num_frames: int) -> tuple[int, ...]:
    """(channels, frames, height, width) of one video's latents: the first frame has a latent frame of its own."""
    space, time = pipeline.vae_scale_factor_spatial, pipeline.vae_scale_factor_temporal
    channels = pipeline.transformer.config.in_channels
    return (channels, (num_frames - 1) // time + 1, height // space, width // space)


def frames_first(decoded: Tensor) -> Tensor:
    """[B, 3, F, height, width] as [B, F, 3, height, width]; as images [B, 3, height, width] where there is one frame."""
    frames = decoded.transpose(1, 2)
    return frames[:, 0] if frames.shape[1] == 1 else frames
