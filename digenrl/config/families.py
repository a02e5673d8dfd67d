"""What is known of a built-in model family without its code: strings and numbers, for checks that load nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family on top of a diffusers pipeline."""

    pipeline: str
    """diffusers' class."""
    required: tuple[str, ...]
    """Components that it cannot do without."""
    packing: int = 1
    """Latents per side that the pipeline packs into one token; 1 where the transformer cuts patches, of its own size."""
    cfg_argument: Literal["guidance_scale", "true_cfg_scale"] = "true_cfg_scale"
    """What diffusers calls classifier-free guidance with a second pass in this pipeline."""
    embedded_guidance: float | None = None
    """diffusers' default of the guidance that distilled members of the family are given; None where there are no such members."""
    guidance_embeds: bool = False
    """Whether a transformer whose config does not say so is distilled for guidance."""
    text_by_length: bool = False
    """Whether a pass computes no more text than its longest prompt has, so that prompts that share one change each other's last
    bits."""
    default_size: int | None = None
    """Pixels per side that the family was trained at, where the transformer's config does not say it."""


_THREE = ("transformer", "vae", "scheduler")

FAMILIES = {
    "sd3": Family(
        pipeline="StableDiffusion3Pipeline",
        required=(*_THREE, "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"),
        cfg_argument="guidance_scale",
    ),
    "flux": Family(
        pipeline="FluxPipeline",
        required=(*_THREE, "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"),
        packing=2,
        embedded_guidance=3.5,
        default_size=1024,
    ),
    "qwen_image": Family(
        pipeline="QwenImagePipeline",
        required=(*_THREE, "text_encoder", "tokenizer"),
        packing=2,
        text_by_length=True,
        default_size=1024,
    ),
    "wan": Family(
        pipeline="WanPipeline",
        required=(*_THREE, "text_encoder", "tokenizer"),
        cfg_argument="guidance_scale",
        default_size=480,
    ),
    "hunyuan_video": Family(
        pipeline="HunyuanVideoPipeline",
        required=(*_THREE, "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"),
        embedded_guidance=6.0,
        guidance_embeds=True,
        default_size=480,
    ),
}
"""By model.type."""
