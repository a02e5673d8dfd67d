"""Latents [B, C, H, W] as the tokens [B, H/2 * W/2, 4 C] that FLUX and Qwen-Image take, and back.

Everywhere else latents keep their own shape, from which their size can be read; step arithmetic is element by element, and so
the same in both.
"""

from __future__ import annotations

from torch import Tensor


def pack(latents: Tensor) -> Tensor:
    """Every 2 x 2 latents become one token, row by row; a token is ordered by channel, then place."""
    count, channels, height, width = latents.shape
    blocks = latents.view(count, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return blocks.reshape(count, (height // 2) * (width // 2), channels * 4)


def unpack(tokens: Tensor, height: int, width: int) -> Tensor:
    """The other way; height, width: of the latents."""
    count, _, channels = tokens.shape
    blocks = tokens.view(count, height // 2, width // 2, channels // 4, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return blocks.reshape(count, channels // 4, height, width)
