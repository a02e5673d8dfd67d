"""Tiny, randomly initialised model folders in diffusers' format: built offline in a second, to try things out.

They draw noise, not pictures; but text, timestep and every layer matter in them, so training and syncing show an effect.
Invariant: the same arguments give the same weights, and no global random state is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from digenrl.models.loading import quiet_libraries
from digenrl.testing.tiny_text import (
    clip_encoder,
    clip_tokenizer,
    qwen_tokenizer,
    qwen_vl_encoder,
    strengthened,
    t5_encoder,
    t5_tokenizer,
)
from digenrl.testing.tiny_videos import build_hunyuan_video, build_wan


def build_sd3(folder: str | Path, *, with_t5: bool = True, seed: int = 0, **transformer: Any) -> Path:
    """Save a Stable Diffusion 3 of about 0.1 million weights in ``folder`` and return the folder.

    Images are multiples of 16 pixels (VAE factor 8, patches of 2), at most 256. ``with_t5``: with the third text encoder,
    or with its place left empty, as many downloads have it. ``transformer``: changes to SD3Transformer2DModel's arguments.
    """
    quiet_libraries()
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        SD3Transformer2DModel,
        StableDiffusion3Pipeline,
    )

    arguments: dict[str, Any] = {
        "sample_size": 8,
        "patch_size": 2,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 8,
        "num_attention_heads": 4,
        "caption_projection_dim": 32,
        "joint_attention_dim": 64,  # at least the width of the two CLIP encoders together, or diffusers crops their text
        "pooled_projection_dim": 64,
        "pos_embed_max_size": 16,
        "qk_norm": "rms_norm",
        "dual_attention_layers": (0,),
    } | transformer
    with _seeded(seed):
        pipeline = StableDiffusion3Pipeline(
            transformer=strengthened(SD3Transformer2DModel(**arguments)),
            vae=_vae(AutoencoderKL, arguments["in_channels"]),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            text_encoder=clip_encoder(),
            tokenizer=clip_tokenizer(),
            text_encoder_2=clip_encoder(),
            tokenizer_2=clip_tokenizer(),
            text_encoder_3=t5_encoder(arguments["joint_attention_dim"]) if with_t5 else None,
            tokenizer_3=t5_tokenizer() if with_t5 else None,
        )
    pipeline.save_pretrained(str(folder), safe_serialization=True)
    return Path(folder)


def build_flux(folder: str | Path, *, distilled: bool = True, seed: int = 0, **transformer: Any) -> Path:
    """Save a FLUX.1 of about 0.2 million weights in ``folder`` and return the folder.

    Images are multiples of 16 pixels (VAE factor 8, latents packed 2 x 2). ``distilled``: like FLUX.1-dev, with embedded
    guidance and a sigma shift that grows with the image, or like schnell, without both. ``transformer``: changes to
    FluxTransformer2DModel's arguments.
    """
    quiet_libraries()
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    arguments: dict[str, Any] = {
        "in_channels": 16,
        "num_layers": 2,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 32,
        "pooled_projection_dim": 32,
        "axes_dims_rope": (4, 4, 8),
        "guidance_embeds": distilled,
    } | transformer
    with _seeded(seed):
        pipeline = FluxPipeline(
            transformer=strengthened(FluxTransformer2DModel(**arguments)),
            vae=_vae(AutoencoderKL, arguments["in_channels"] // 4),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0 if distilled else 1.0, use_dynamic_shifting=distilled),
            text_encoder=clip_encoder(projected=False),
            tokenizer=clip_tokenizer(),
            text_encoder_2=t5_encoder(arguments["joint_attention_dim"]),
            tokenizer_2=t5_tokenizer(),
        )
    pipeline.save_pretrained(str(folder), safe_serialization=True)
    return Path(folder)


def build_flux_schnell(folder: str | Path, *, seed: int = 0) -> Path:
    """A FLUX.1 like schnell: see ``build_flux``."""
    return build_flux(folder, distilled=False, seed=seed)


def build_qwen_image(folder: str | Path, *, seed: int = 0, **transformer: Any) -> Path:
    """Save a Qwen-Image of about 0.4 million weights in ``folder`` and return the folder.

    Images are multiples of 16 pixels (VAE factor 8, latents packed 2 x 2). ``transformer``: changes to
    QwenImageTransformer2DModel's arguments.
    """
    quiet_libraries()
    from diffusers import (
        AutoencoderKLQwenImage,
        FlowMatchEulerDiscreteScheduler,
        QwenImagePipeline,
        QwenImageTransformer2DModel,
    )

    arguments: dict[str, Any] = {
        "in_channels": 16,
        "out_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 32,
        "axes_dims_rope": (4, 6, 6),
    } | transformer
    with _seeded(seed):
        pipeline = QwenImagePipeline(
            transformer=strengthened(QwenImageTransformer2DModel(**arguments)),
            vae=AutoencoderKLQwenImage(
                base_dim=8,
                z_dim=arguments["in_channels"] // 4,
                dim_mult=[1, 2, 2, 2],
                num_res_blocks=1,
                temperal_downsample=[False, True, True],
                latents_mean=[0.1, -0.2, 0.05, 0.3],
                latents_std=[1.2, 0.8, 1.1, 0.9],
            ),
            scheduler=FlowMatchEulerDiscreteScheduler(
                use_dynamic_shifting=True, max_image_seq_len=8192, max_shift=0.9, shift_terminal=0.02
            ),
            text_encoder=qwen_vl_encoder(arguments["joint_attention_dim"]),
            tokenizer=qwen_tokenizer(),
        )
    pipeline.save_pretrained(str(folder), safe_serialization=True)
    return Path(folder)


BUILDERS: dict[str, Callable[..., Path]] = {
    "sd3": build_sd3,
    "flux": build_flux,
    "flux_schnell": build_flux_schnell,
    "qwen_image": build_qwen_image,
    "wan": build_wan,
    "hunyuan_video": build_hunyuan_video,
}
"""By the name that ``python -m digenrl.testing`` takes."""


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Inside, torch's CPU generator begins at ``seed``; afterwards it is where it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def _vae(autoencoder: Any, latent_channels: int) -> nn.Module:
    vae: nn.Module = autoencoder(
        sample_size=64,
        in_channels=3,
        out_channels=3,
        block_out_channels=(4, 4, 4, 4),
        layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=latent_channels,
        norm_num_groups=1,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=1.5305,
        shift_factor=0.0609,
    )
    return vae
