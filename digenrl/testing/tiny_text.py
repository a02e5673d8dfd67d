"""Tokenizers and text encoders of the tiny models: any text, no vocabulary file, random weights."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn


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


def clip_encoder(*, projected: bool = True) -> nn.Module:
    """A CLIP text encoder of width 32. projected: with the projection of its pooled vector, which SD3 reads and FLUX does not."""
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

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
    return strengthened(CLIPTextModelWithProjection(config) if projected else CLIPTextModel(config))


def t5_encoder(width: int) -> nn.Module:
    """A T5 encoder."""
    from transformers import T5Config, T5EncoderModel

    return _t5_like(T5Config, T5EncoderModel, width)


def umt5_encoder(width: int) -> nn.Module:
    """A UMT5 encoder."""
    from transformers import UMT5Config, UMT5EncoderModel

    return _t5_like(UMT5Config, UMT5EncoderModel, width)


def _t5_like(config_class: Any, model_class: Any, width: int) -> nn.Module:
    config = config_class(
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
    return strengthened(model_class(config))


def qwen_tokenizer() -> Any:
    """A Qwen2 tokenizer whose tokens are single bytes, and the words of the template that Qwen-Image puts around a prompt.

    So that the template begins with 34 tokens, as with the real vocabulary, which the pipeline cuts off.
    """
    from transformers import Qwen2Tokenizer

    pieces = [*_byte_symbols(), "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Qwen2Tokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], model_max_length=4096)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    words = "the image by detailing color shape size texture quantity text spatial relationships of objects and background"
    tokenizer.add_tokens(["system", "Describe", "user", "assistant", *(f" {word}" for word in words.split())])
    return tokenizer


def qwen_vl_encoder(width: int) -> nn.Module:
    """A Qwen2.5-VL, of which pipelines use the text half."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = {
        "vocab_size": 300,
        "hidden_size": width,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
        "max_position_embeddings": 4096,
        "bos_token_id": 256,
        "eos_token_id": 256,
        "pad_token_id": 256,
    }
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": width,
        "patch_size": 14,
        "fullatt_block_indexes": [0],
    }
    special = {"image_token_id": 297, "video_token_id": 298, "vision_start_token_id": 295, "vision_end_token_id": 296}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **special)
    return strengthened(Qwen2_5_VLForConditionalGeneration(config))


def strengthened(module: nn.Module) -> nn.Module:
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
