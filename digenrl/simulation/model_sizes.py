"""Sizes of the published models, for estimates of memory without loading anything.

Parameters are those of diffusers' and transformers' classes with the configs that the models are published with. Bytes per token
were counted with torch's fake tensors, in bfloat16, one sample in a pass, fused attention: tensors alive at once inside a pass
beside weights and gradients, at two sizes, and the slope between them. tests/simulation/test_model_sizes.py counts again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from digenrl.config.builtin import PREFIX
from digenrl.config.schema import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """One published model."""

    name: str
    family: str
    """model.type."""
    hub: tuple[str, ...]
    """Ids on the hub."""
    layers: int
    """Repeated layers, of all kinds."""
    width: int
    transformer: int
    """Parameters, as all of these."""
    text_encoders: int
    vae: int
    lora_per_rank: int
    """Parameters of adapters of rank 1 on the family's default targets."""
    text_tokens: int
    """Of the sequence that the layers work on; 0 where text is only attended to."""
    pixels_per_token: int = 16
    """Per side."""
    frames_per_latent: int = 1
    train_bytes: int
    """Per token, in a training pass that keeps all activations, with the weights frozen but for adapters."""
    train_bytes_full: int
    """As well, with all weights trained: the inputs of every layer are kept too."""
    train_bytes_checkpointed: int
    """As well, with gradient checkpointing: the inputs of the blocks, and one block's activations."""
    generate_bytes: int
    """Per token, without gradients."""
    decode_bytes: int
    """Per pixel of the frames that the VAE's decoder works on at once, in float32."""
    decode_frames: int = 1
    """At most so many frames at once."""
    decode_tile: int = 256
    """Pixels per side of a tile, with ``model.vae_tiling``."""

    def tokens(self, height: int, width: int, num_frames: int) -> int:
        """Tokens of one sample. height, width: pixels."""
        frames = 1 + (num_frames - 1) // self.frames_per_latent
        return self.text_tokens + frames * (height // self.pixels_per_token) * (width // self.pixels_per_token)


def sizes_of(recipe: Recipe) -> ModelSizes | None:
    """The published model that a recipe names by its hub id, or whose layers its folder has; None for any other."""
    model = recipe.model
    shape = _shape(Path(model.path) / "transformer" / "config.json") if not model.path.startswith(PREFIX) else None
    for sizes in PUBLISHED:
        if sizes.family == model.type and (model.path in sizes.hub or shape == (sizes.layers, sizes.width)):
            return sizes
    return None


def _shape(config: Path) -> tuple[int, int] | None:
    """Layers and width of a transformer, by its config."""
    try:
        found = json.loads(config.read_text(encoding="utf-8"))
        layers = found["num_layers"] + found.get("num_single_layers", 0)
        return layers, found["num_attention_heads"] * found["attention_head_dim"]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # on the hub, or of another form; what is wrong with a folder, config/checks.py says


_WAN_VAE = 126_892_531
_KL_VAE = 83_819_683
_UMT5_XXL, _T5_XXL = 5_680_910_336, 4_762_310_656
_CLIP_L, _CLIP_L_PROJECTED, _CLIP_G_PROJECTED = 123_060_480, 123_650_304, 694_659_840
_LLAMA_8B, _QWEN25_VL_7B = 7_505_186_816, 8_292_166_656

PUBLISHED = (
    ModelSizes(
        name="SD3 Medium",
        family="sd3",
        hub=("stabilityai/stable-diffusion-3-medium-diffusers",),
        layers=24,
        width=1536,
        transformer=2_028_328_000,
        text_encoders=_CLIP_L_PROJECTED + _CLIP_G_PROJECTED + _T5_XXL,
        vae=_KL_VAE,
        lora_per_rank=586_752,
        text_tokens=333,
        train_bytes=1_070_000,
        train_bytes_full=1_560_000,
        train_bytes_checkpointed=142_000,
        generate_bytes=40_000,
        decode_bytes=3072,
        decode_tile=1024,
    ),
    ModelSizes(
        name="SD3.5 Medium",
        family="sd3",
        hub=("stabilityai/stable-diffusion-3.5-medium",),
        layers=24,
        width=1536,
        transformer=2_243_171_520,
        text_encoders=_CLIP_L_PROJECTED + _CLIP_G_PROJECTED + _T5_XXL,
        vae=_KL_VAE,
        lora_per_rank=586_752,
        text_tokens=333,
        train_bytes=2_080_000,
        train_bytes_full=2_980_000,
        train_bytes_checkpointed=171_000,
        generate_bytes=43_000,
        decode_bytes=3072,
        decode_tile=1024,
    ),
    ModelSizes(
        name="SD3.5 Large",
        family="sd3",
        hub=("stabilityai/stable-diffusion-3.5-large",),
        layers=38,
        width=2432,
        transformer=8_056_627_520,
        text_encoders=_CLIP_L_PROJECTED + _CLIP_G_PROJECTED + _T5_XXL,
        vae=_KL_VAE,
        lora_per_rank=1_473_792,
        text_tokens=333,
        train_bytes=3_760_000,
        train_bytes_full=5_760_000,
        train_bytes_checkpointed=322_000,
        generate_bytes=63_000,
        decode_bytes=3072,
        decode_tile=1024,
    ),
    ModelSizes(
        name="FLUX.1",
        family="flux",
        hub=("black-forest-labs/FLUX.1-dev", "black-forest-labs/FLUX.1-schnell"),
        layers=57,
        width=3072,
        transformer=11_901_408_320,
        text_encoders=_CLIP_L + _T5_XXL,
        vae=_KL_VAE,
        lora_per_rank=1_634_304,
        text_tokens=512,
        train_bytes=5_950_000,
        train_bytes_full=9_140_000,
        train_bytes_checkpointed=536_000,
        generate_bytes=106_000,
        decode_bytes=3072,
        decode_tile=1024,
    ),
    ModelSizes(
        name="Qwen-Image",
        family="qwen_image",
        hub=("Qwen/Qwen-Image",),
        layers=60,
        width=3072,
        transformer=20_430_401_088,
        text_encoders=_QWEN25_VL_7B,
        vae=_WAN_VAE,
        lora_per_rank=2_949_120,
        text_tokens=512,
        train_bytes=7_460_000,
        train_bytes_full=11_500_000,
        train_bytes_checkpointed=555_000,
        generate_bytes=93_000,
        decode_bytes=6_923,
    ),
    ModelSizes(
        name="Wan2.1 1.3B",
        family="wan",
        hub=("Wan-AI/Wan2.1-T2V-1.3B-Diffusers",),
        layers=30,
        width=1536,
        transformer=1_418_996_800,
        text_encoders=_UMT5_XXL,
        vae=_WAN_VAE,
        lora_per_rank=737_280,
        text_tokens=0,
        frames_per_latent=4,
        train_bytes=2_800_000,
        train_bytes_full=4_240_000,
        train_bytes_checkpointed=224_000,
        generate_bytes=49_000,
        decode_bytes=4_600,
        decode_frames=4,
    ),
    ModelSizes(
        name="Wan2.1 14B",
        family="wan",
        hub=("Wan-AI/Wan2.1-T2V-14B-Diffusers",),
        layers=40,
        width=5120,
        transformer=14_288_491_584,
        text_encoders=_UMT5_XXL,
        vae=_WAN_VAE,
        lora_per_rank=3_276_800,
        text_tokens=0,
        frames_per_latent=4,
        train_bytes=11_100_000,
        train_bytes_full=16_300_000,
        train_bytes_checkpointed=787_000,
        generate_bytes=114_000,
        decode_bytes=4_600,
        decode_frames=4,
    ),
    ModelSizes(
        name="HunyuanVideo",
        family="hunyuan_video",
        hub=("hunyuanvideo-community/HunyuanVideo",),
        layers=60,
        width=3072,
        transformer=12_821_012_544,
        text_encoders=_LLAMA_8B + _CLIP_L,
        vae=246_478_803,
        lora_per_rank=1_769_472,
        text_tokens=256,
        frames_per_latent=4,
        train_bytes=7_000_000,
        train_bytes_full=10_800_000,
        train_bytes_checkpointed=561_000,
        generate_bytes=112_000,
        decode_bytes=5_000,
        decode_frames=16,
    ),
)
