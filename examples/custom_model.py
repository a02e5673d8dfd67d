"""A model of your own in one file: a small transformer that paints pixels, without a VAE and without a text encoder.

Use it from the folder that holds this file (or install it):

    python custom_model.py my_model              # make its weights, at random
    digenrl train custom_model.yaml              # says: model: {type: "custom_model:PixelPainter", path: my_model}
"""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Sequence

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.loaders import PeftAdapterMixin
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from digenrl.config.schema import Recipe
from digenrl.diffusion.noise_schedule import NoiseSchedule
from digenrl.errors import ConfigError
from digenrl.models.base import ALL_PARTS, Conditioning, Guidance, Part, part_not_loaded

PATCH, WORDS = 4, 64


class Block(nn.Module):
    """Attention and a feed-forward layer, shifted and scaled by time and text."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.modulation = nn.Linear(width, 4 * width)
        self.to_qkv, self.to_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.ff_in, self.ff_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """x: [B, tokens, width]; condition: [B, width]."""
        shift, scale, shift_2, scale_2 = self.modulation(condition)[:, None].chunk(4, dim=-1)
        q, k, v = (y[:, None] for y in self.to_qkv(_normed(x) * (1 + scale) + shift).chunk(3, dim=-1))
        x = x + self.to_out(nn.functional.scaled_dot_product_attention(q, k, v)[:, 0])
        return x + self.ff_out(nn.functional.gelu(self.ff_in(_normed(x) * (1 + scale_2) + shift_2)))


class PixelTransformer(ModelMixin, ConfigMixin, PeftAdapterMixin):
    """The network. From diffusers' base classes come reading and writing of weights, LoRA and gradient checkpointing."""

    _supports_gradient_checkpointing = True

    @register_to_config
    def __init__(self, width: int = 32, num_layers: int = 2) -> None:
        super().__init__()
        self.patch_in, self.text_in, self.time_in = (nn.Linear(size, width) for size in (3 * PATCH**2, WORDS, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_layers))
        self.patch_out = nn.Linear(width, 3 * PATCH**2)
        self.gradient_checkpointing = False

    def forward(self, pixels: Tensor, sigma: Tensor, text: Tensor) -> Tensor:
        """Velocity of pixels [B, 3, height, width] at sigma [B], with text [B, WORDS]."""
        tokens = nn.functional.pixel_unshuffle(pixels, PATCH)  # [B, 3 * PATCH^2, rows, columns]
        rows, columns = tokens.shape[2:]
        width = self.config.width
        places = torch.cat([_waves(torch.arange(side, device=pixels.device), width // 2) for side in (rows, columns)], dim=0)
        grid = torch.cat([places[:rows, None].expand(-1, columns, -1), places[None, rows:].expand(rows, -1, -1)], dim=-1).flatten(
            0, 1
        )
        x = self.patch_in(tokens.flatten(2).transpose(1, 2)) + grid
        condition = self.time_in(_waves(1000 * sigma, width)) + self.text_in(text)
        for block in self.blocks:
            recompute = self.gradient_checkpointing and torch.is_grad_enabled()
            x = self._gradient_checkpointing_func(block, x, condition) if recompute else block(x, condition)
        return nn.functional.pixel_shuffle(self.patch_out(_normed(x)).transpose(1, 2).unflatten(2, (rows, columns)), PATCH)


class PixelPainter:
    """The adapter: what DigenRL asks of a model. `digenrl.testing.check_model` checks it."""

    class Settings(BaseModel):
        """Keys beside ``type`` in the recipe's ``model``; unknown ones are refused."""

        model_config = ConfigDict(frozen=True, extra="forbid")

        flow_shift: float = Field(default=1.0, gt=0, description="Shift of the sigma schedule; 1 is none.")

    default_lora_targets = ("to_qkv", "to_out")
    sharded_blocks = ("Block",)

    def __init__(self, network: PixelTransformer | None, recipe: Recipe, device: torch.device, parts: frozenset[Part]) -> None:
        self.device = device
        self.truncated_prompts: set[str] = set()
        self._network, self._parts = network, parts
        self._shift = recipe.model.settings.flow_shift
        self._dtype = torch.bfloat16 if recipe.model.dtype == "bfloat16" else torch.float32

    @classmethod
    def load(cls, recipe: Recipe, device: torch.device, parts: frozenset[Part] = ALL_PARTS) -> PixelPainter:
        """Frozen and in eval mode; no weights are read where only prompts are encoded or pictures decoded."""
        for side in (recipe.rollout.height, recipe.rollout.width):
            if side % PATCH:
                raise ConfigError(f"rollout: {side} pixels are not a multiple of {PATCH}.", fix=f"Use {side // PATCH * PATCH}.")
        network = None
        if "transformer" in parts:
            network = PixelTransformer.from_pretrained(recipe.model.path, use_safetensors=True).to(device)
            network.requires_grad_(False).eval()
            if recipe.model.gradient_checkpointing:
                network.enable_gradient_checkpointing()
        return cls(network, recipe, device, parts)

    @property
    def transformer(self) -> nn.Module:
        """The network that is trained."""
        if self._network is None:
            raise part_not_loaded("transformer", self._parts, needed_for="denoising and training")
        return self._network

    @transformer.setter
    def transformer(self, network: nn.Module) -> None:
        self._network = network

    def encode_prompts(self, prompts: Sequence[str], negative_prompts: Sequence[str]) -> Conditioning:
        """How often each of 64 kinds of words is in a prompt; the first dimension of every tensor is the prompt."""
        if "text_encoders" not in self._parts:
            raise part_not_loaded("text_encoders", self._parts, needed_for="encoding prompts")
        texts = {"words": prompts, "negative_words": negative_prompts}
        return Conditioning({name: torch.stack([_words(text) for text in each]).to(self.device) for name, each in texts.items()})

    def latent_shape(self, height: int, width: int, num_frames: int = 1) -> tuple[int, ...]:
        """Pixels are the latents."""
        return (3, height, width)

    def noise_schedule(self, num_inference_steps: int, height: int, width: int) -> NoiseSchedule:
        """Evenly spaced from 1 to 0, then shifted; the network is given sigma itself."""
        sigmas = torch.linspace(1.0, 0.0, num_inference_steps + 1)
        sigmas = self._shift * sigmas / (1 + (self._shift - 1) * sigmas)
        return NoiseSchedule(sigmas=sigmas, timesteps=sigmas[:-1].clone())

    def predict(self, latents: Tensor, timesteps: Tensor, conditioning: Conditioning, guidance: Guidance) -> Tensor:
        """Velocity, float32, whatever it is computed in."""
        with torch.autocast(self.device.type, self._dtype, enabled=self._dtype != torch.float32):
            velocity = self.transformer(latents, timesteps, conditioning.tensors["words"])
            if guidance.true_cfg_scale > 1:
                negative = self.transformer(latents, timesteps, conditioning.tensors["negative_words"])
                velocity = negative + guidance.true_cfg_scale * (velocity - negative)
        return velocity.float()

    def decode(self, latents: Tensor) -> Tensor:
        """Pixels in [0, 1]."""
        if "vae" not in self._parts:
            raise part_not_loaded("vae", self._parts, needed_for="decoding latents")
        return (latents * 0.5 + 0.5).clamp(0, 1)


def _words(text: str) -> Tensor:
    counts = torch.zeros(WORDS)
    for word in text.split():
        counts[zlib.crc32(word.encode()) % WORDS] += 1.0
    return counts


def _normed(x: Tensor) -> Tensor:
    return nn.functional.layer_norm(x, x.shape[-1:])


def _waves(numbers: Tensor, width: int) -> Tensor:
    """Sines and cosines of numbers [N]. Returns [N, width]."""
    frequencies = torch.exp(-math.log(10_000) * torch.arange(width // 2, device=numbers.device) / (width // 2))
    angles = numbers[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


if __name__ == "__main__":
    torch.manual_seed(0)
    PixelTransformer().save_pretrained(sys.argv[1])
