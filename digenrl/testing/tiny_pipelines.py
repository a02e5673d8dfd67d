"""Tiny, randomly initialised model folders in diffusers' format: built offline in a second, to try things out.

They draw noise, not pictures; but text, timestep and every layer matter in them, so training and syncing show an effect.
Invariant: the same arguments give the same weights, and no global random state is changed.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

from digenrl.models.loading import quiet_libraries


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
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        pipeline = StableDiffusion3Pipeline(
            transformer=_strengthened(SD3Transformer2DModel(**arguments)),
            vae=_vae(AutoencoderKL, arguments["in_channels"]),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            text_encoder=_clip_encoder(),
            tokenizer=clip_tokenizer(),
            text_encoder_2=_clip_encoder(),
            tokenizer_2=clip_tokenizer(),
            text_encoder_3=_t5_encoder(arguments["joint_attention_dim"]) if with_t5 else None,
            tokenizer_3=t5_tokenizer() if with_t5 else None,
        )
    pipeline.save_pretrained(str(folder), safe_serialization=True)
    return Path(folder)


def clip_tokenizer(max_length: int = 77) -> Any:
    """A CLIP tokenizer whose tokens are single bytes: any text, no vocabulary file."""
    from transformers import CLIPTokenizer

    symbols = _byte_symbols()
    pieces = [*symbols, *(f"{symbol}</w>" for symbol in symbols), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], model_max_length=max_length)


def t5_tokenizer(max_length: int = 512) -> Any:
    """A T5 tokenizer whose tokens are single ASCII characters; others are unknown to it."""
    from transformers import T5TokenizerFast

    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0)]
    letters = [(chr(code), -3.0) for code in range(33, 127)]
    return T5TokenizerFast(vocab=special + letters, extra_ids=0, model_max_length=max_length)


def _clip_encoder() -> nn.Module:
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=514,
        hidden_size=32,
        intermediate_size=64,
        projection_dim=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=77,
        bos_token_id=512,
        eos_token_id=513,
        pad_token_id=513,
    )
    return _strengthened(CLIPTextModelWithProjection(config))


def _t5_encoder(width: int) -> nn.Module:
    from transformers import T5Config, T5EncoderModel

    config = T5Config(
        vocab_size=98,
        d_model=width,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
    )
    return _strengthened(T5EncoderModel(config))


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


def _strengthened(module: nn.Module) -> nn.Module:
    """Weights that keep activations near size 1: initial values are made for training, and let text and gates vanish."""
    with torch.no_grad():
        for part in module.modules():
            if isinstance(part, nn.Linear):
                part.weight.normal_(std=1 / math.sqrt(part.in_features))
            elif isinstance(part, nn.Embedding):
                part.weight.normal_(std=1.0)
    return module


def _byte_symbols() -> list[str]:
    """A printable character for every byte, the way CLIP's and GPT-2's byte-level vocabularies spell them."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    symbols = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(rest)}
    return [symbols[byte] for byte in range(256)]
