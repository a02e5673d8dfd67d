"""Tiny, randomly initialised models of videos in diffusers' format, as tiny_pipelines.py has them of images."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from digenrl.models.loading import quiet_libraries
from digenrl.testing.tiny_text import clip_encoder, clip_tokenizer, strengthened, t5_tokenizer, umt5_encoder

LATENT_CHANNELS = 4


def build_wan(
    folder: str | Path, *, noise_scheduler: Literal["unipc", "euler"] = "unipc", seed: int = 0, **transformer: Any
) -> Path:
    """Save a Wan2.1 of about 0.1 million weights in ``folder`` and return the folder.

    Sides are multiples of 16 pixels, frames 1 more than a multiple of 4. ``noise_scheduler``: the one that the folder names,
    as published (UniPC) or the one that RL samples with. ``transformer``: changes to WanTransformer3DModel's arguments.
    """
    quiet_libraries()
    from diffusers import (
        AutoencoderKLWan,
        FlowMatchEulerDiscreteScheduler,
        UniPCMultistepScheduler,
        WanPipeline,
        WanTransformer3DModel,
    )

    arguments: dict[str, Any] = {
        "patch_size": (1, 2, 2),
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "in_channels": LATENT_CHANNELS,
        "out_channels": LATENT_CHANNELS,
        "text_dim": 32,
        "freq_dim": 64,
        "ffn_dim": 64,
        "num_layers": 2,
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "rope_max_seq_len": 16,
    } | transformer
    published: Any = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0, num_train_timesteps=1000
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        vae = AutoencoderKLWan(
            base_dim=4,
            z_dim=LATENT_CHANNELS,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
            latents_mean=[0.1, -0.2, 0.0, 0.3],
            latents_std=[1.5, 0.8, 1.0, 1.2],
        )
        pipeline = WanPipeline(
            transformer=strengthened(WanTransformer3DModel(**arguments)),
            vae=vae,
            scheduler=published if noise_scheduler == "unipc" else FlowMatchEulerDiscreteScheduler(shift=3.0),
            text_encoder=umt5_encoder(arguments["text_dim"]),
            tokenizer=t5_tokenizer(),
        )
    pipeline.save_pretrained(str(folder), safe_serialization=True)
    return Path(folder)


def build_hunyuan_video(folder: str | Path, *, seed: int = 0, **transformer: Any) -> Path:
    """Save a HunyuanVideo of about 0.3 million weights in ``folder`` and return the folder. Sizes are as of ``build_wan``.

    ``transformer``: changes to HunyuanVideoTransformer3DModel's arguments.
    """
    quiet_libraries()
    from diffusers import (
        AutoencoderKLHunyuanVideo,
        FlowMatchEulerDiscreteScheduler,
        HunyuanVideoPipeline,
        HunyuanVideoTransformer3DModel,
    )

    arguments: dict[str, Any] = {
        "in_channels": LATENT_CHANNELS,
        "out_channels": LATENT_CHANNELS,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_layers": 1,
        "num_single_layers": 1,
        "num_refiner_layers": 1,
        "patch_size": 2,
        "patch_size_t": 1,
        "guidance_embeds": True,
        "text_embed_dim": 32,
        "pooled_projection_dim": 32,
        "rope_axes_dim": (4, 6, 6),
    } | transformer
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        vae = AutoencoderKLHunyuanVideo(
            latent_channels=LATENT_CHANNELS,
            down_block_types=("HunyuanVideoDownBlock3D",) * 4,
            up_block_types=("HunyuanVideoUpBlock3D",) * 4,
            block_out_channels=(8, 8, 8, 8),
            layers_per_block=1,
            norm_num_groups=4,
            scaling_factor=0.476986,
        )
        pipeline = HunyuanVideoPipeline(
            transformer=strengthened(HunyuanVideoTransformer3DModel(**arguments)),
            vae=vae,
            scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
            text_encoder=_llama(arguments["text_embed_dim"]),
            tokenizer=llama_tokenizer(),
            text_encoder_2=clip_encoder(projected=False),
            tokenizer_2=clip_tokenizer(),
        )
    pipeline.save_pretrained(str(folder), safe_serialization=True)
    return Path(folder)


def llama_tokenizer() -> Any:
    """A byte-level tokenizer like Llama 3's, in which HunyuanVideo's instructions are 95 tokens, as they are in Llama 3's.

    So that the prompt begins where the pipeline looks for it; single bytes would be several times as many.
    """
    from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE as FRAME
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    marks = ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<pad>"]
    vocabulary = {piece: number for number, piece in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), *marks])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    first = marks[0]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{first} $A", special_tokens=[(first, vocabulary[first])])
    tokenizer.add_special_tokens(marks)
    before = str(FRAME["template"]).partition("{}")[0]
    surplus = len(tokenizer.encode(before).ids) - int(FRAME["crop_start"])
    body = before.partition("\n\n")[2]
    tokenizer.add_tokens([body[: surplus + 1]])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=first,
        eos_token="<|eot_id|>",
        pad_token="<pad>",
        padding_side="right",
        model_max_length=4096,
    )


def _llama(width: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=264,
        hidden_size=width,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        pad_token_id=260,
        bos_token_id=256,
        eos_token_id=257,
        max_position_embeddings=1024,
    )
    return strengthened(LlamaModel(config))
