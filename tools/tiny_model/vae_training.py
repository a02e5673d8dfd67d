"""The autoencoder: trained to give pictures back from slightly noisy latents, then told the scale of its latents.

The noise makes the decoder smooth: small errors of the denoiser stay small in the picture.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from components import autoencoder
from diffusers import AutoencoderKL
from files import Table, save_folder
from pictures import Example, draw_examples
from progress import Deadline, Progress
from seeds import generator, weights_of
from torch import Tensor
from torch.nn import functional

DEFAULT_STEPS = 1600
_BATCH = 32
_PICTURES = 6000
_LEARNING_RATE = 2e-3
_LATENT_NOISE = 0.05


def train_autoencoder(output: Path, *, seed: int, steps: int, deadline: Deadline) -> AutoencoderKL | None:
    """Train, log each step's loss to ``vae_losses.csv`` and save to ``vae``; None where the deadline came first."""
    with weights_of(seed, "vae"):
        vae = autoencoder()
    pictures = pixels_of(draw_examples(_PICTURES, seed=seed))
    optimizer = torch.optim.AdamW(vae.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)
    losses = Table(output / "vae_losses.csv", ("step", "loss"), keep_below=0)
    progress = Progress("vae", total_images=steps * _BATCH)
    for step in range(steps):
        if deadline.passed():
            losses.close()
            return None
        random = generator(seed, "vae", step)
        optimizer.param_groups[0]["lr"] = _LEARNING_RATE * min(1, step / 50) * (1 - 0.97 * step / steps)
        batch = pictures[torch.randint(len(pictures), (_BATCH,), generator=random)]
        loss = _loss(vae, batch, random)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        losses.append(step, f"{loss.item():.6f}")
        progress.tell((step + 1) * _BATCH, loss.item())
    losses.close()
    vae.eval().requires_grad_(False)
    mean, std = latent_statistics(vae, pictures[:1000])
    vae.register_to_config(scaling_factor=1 / std, shift_factor=mean)
    save_folder(output / "vae", vae.save_pretrained)
    print(f"vae: PSNR {psnr(vae, pixels_of(draw_examples(1000, seed=seed + 1))):.1f} dB on new pictures", flush=True)
    return vae


def pixels_of(examples: list[Example]) -> Tensor:
    """Pictures as the autoencoder takes them: [B, 3, 32, 32] in [-1, 1]."""
    images = torch.from_numpy(np.stack([example.image for example in examples]))
    return images.permute(0, 3, 1, 2).float() / 127.5 - 1


@torch.no_grad()
def latent_statistics(vae: AutoencoderKL, pixels: Tensor) -> tuple[float, float]:
    """Mean and standard deviation over all elements of the latents of pictures [B, 3, H, W]."""
    latents = vae.encode(pixels).latent_dist.mean
    return latents.mean().item(), latents.std().item()


@torch.no_grad()
def psnr(vae: AutoencoderKL, pixels: Tensor) -> float:
    """Peak signal-to-noise ratio of reconstructions, in dB."""
    again = vae.decode(vae.encode(pixels).latent_dist.mean).sample
    return (10 * torch.log10(4 / functional.mse_loss(again, pixels))).item()


def _loss(vae: AutoencoderKL, pixels: Tensor, random: torch.Generator) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        latents = vae.encode(pixels).latent_dist.mean
        noise = torch.randn(latents.shape, generator=random)
        again = vae.decode(latents + _LATENT_NOISE * noise).sample
    again, latents = again.float(), latents.float()
    error = (again - pixels).abs().mean() + 2 * functional.mse_loss(again, pixels)
    return error + 1e-3 * latents.square().mean()
