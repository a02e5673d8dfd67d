"""What is known of a built-in model family without its code: strings and numbers, for checks that load nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family on top of a diffusers pipeline."""

    pipeline: str
    """diffusers' class."""
    required: tuple[str, ...]
    """Components that it cannot do without."""
    text_widths: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    """Keys of the transformer's config -> text encoders, each with the key of its config, whose sizes make it up together."""
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
    samples_on_euler: bool = False
    """Whether samples are drawn on the flow-match Euler grid where published folders name another solver."""
    default_size: int | None = None
    """Pixels per side that the family was trained at, where the transformer's config does not say it."""


_THREE = ("transformer", "vae", "scheduler")

FAMILIES = {
    "sd3": Family(
        pipeline="StableDiffusion3Pipeline",
        required=(*_THREE, "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"),
        text_widths={
            "joint_attention_dim": (("text_encoder_3", "d_model"),),
            "pooled_projection_dim": (("text_encoder", "projection_dim"), ("text_encoder_2", "projection_dim")),
        },
        cfg_argument="guidance_scale",
    ),
    "flux": Family(
        pipeline="FluxPipeline",
        required=(*_THREE, "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"),
        text_widths={
            "joint_attention_dim": (("text_encoder_2", "d_model"),),
            "pooled_projection_dim": (("text_encoder", "hidden_size"),),
        },
        packing=2,
        embedded_guidance=3.5,
        default_size=1024,
    ),
    "qwen_image": Family(
        pipeline="QwenImagePipeline",
        required=(*_THREE, "text_encoder", "tokenizer"),
        text_widths={"joint_attention_dim": (("text_encoder", "hidden_size"),)},
        packing=2,
        text_by_length=True,
        default_size=1024,
    ),
    "wan": Family(
        pipeline="WanPipeline",
        required=(*_THREE, "text_encoder", "tokenizer"),
        text_widths={"text_dim": (("text_encoder", "d_model"),)},
        cfg_argument="guidance_scale",
        samples_on_euler=True,
        default_size=480,
    ),
    "hunyuan_video": Family(
        pipeline="HunyuanVideoPipeline",
        required=(*_THREE, "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"),
        text_widths={
            "text_embed_dim": (("text_encoder", "hidden_size"),),
            "pooled_projection_dim": (("text_encoder_2", "hidden_size"),),
        },
        embedded_guidance=6.0,
        guidance_embeds=True,
        default_size=480,
    ),
}
"""By model.type."""
