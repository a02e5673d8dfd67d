"""Folders with tiny networks of random weights, laid out as the published ones are."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from digenrl.testing.tiny_text import qwen_tokenizer, strengthened
from tests.rewards.services import ROOT

TOKENIZER = ROOT / "tests" / "rewards" / "golden" / "tokenizer"
"""Of CLIP's kind, with one token a word; golden numbers depend on its ids."""
CLIP_CONFIG = {
    "crop_size": {"height": 32, "width": 32},
    "size": {"shortest_edge": 32},
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.25, 0.5, 0.2],
}
CLIP_SCALE = 3.25
CLIP_WIDTH = 24
HEAD_PLACES = (0, 2, 4, 6, 7)


def make_clip(folder: Path) -> Any:
    """A CLIP in transformers' format, with its tokenizer; returned in float32."""
    from transformers import CLIPConfig, CLIPModel

    shutil.copytree(TOKENIZER, folder, dirs_exist_ok=True)
    (folder / "preprocessor_config.json").write_text(json.dumps(CLIP_CONFIG))
    vocabulary = len(json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"])
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = CLIPConfig(
        text_config={**small, "vocab_size": vocabulary, "max_position_embeddings": 16, "eos_token_id": vocabulary - 1},
        vision_config={**small, "image_size": 32, "patch_size": 8},
        projection_dim=CLIP_WIDTH,
        logit_scale_init_value=CLIP_SCALE,
    )
    torch.manual_seed(0)
    model = CLIPModel(config).eval()
    model.save_pretrained(folder)
    return model


def make_head(width: int) -> dict[str, Tensor]:
    """The five linear layers of the aesthetic predictor and of ImageReward."""
    random = torch.Generator().manual_seed(0)
    tensors = {}
    sizes = (width, 1024, 128, 64, 16, 1)
    for place, inputs, outputs in zip(HEAD_PLACES, sizes[:-1], sizes[1:], strict=True):
        tensors[f"layers.{place}.weight"] = torch.randn(outputs, inputs, generator=random) / inputs**0.5
        tensors[f"layers.{place}.bias"] = torch.randn(outputs, generator=random)
    return tensors


def head_by_hand(head: dict[str, Tensor], value: Tensor) -> float:
    """Its answer to one embedding [width], in float64."""
    value = value.double()
    for place in HEAD_PLACES:
        value = head[f"layers.{place}.weight"].double() @ value + head[f"layers.{place}.bias"].double()
    return float(value)


CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}<|im_start|>assistant{{ '\\n' }}"
)


def make_qwen_vl(folder: Path, family: str, *, words: Sequence[str] = ()) -> Any:
    """A model of qwen2_vl, qwen2_5_vl or qwen3_vl with its tokenizer and its picture processor.

    words: tokens beside the single bytes; where there are some, the model's likeliest token is one of them.
    """
    import transformers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = qwen_tokenizer()
    marks = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", *marks]})
    tokenizer.add_tokens(list(words))
    tokenizer.pad_token = "<|endoftext|>"
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    # Qwen3-VL's patches have 16 pixels, those of the others 14.
    patch = 16 if family == "qwen3_vl" else 14
    size = {"shortest_edge": 4 * patch * patch, "longest_edge": 64 * patch * patch}
    Qwen2VLImageProcessorPil(patch_size=patch, size=size).save_pretrained(folder)
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
        "max_position_embeddings": 4096,
        "bos_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>"),
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {"depth": 2, "patch_size": patch, "num_heads": 2}
    if family == "qwen2_vl":
        vision |= {"embed_dim": 32, "hidden_size": 32}
    else:
        vision |= {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 32}
        vision |= {"deepstack_visual_indexes": [0]} if family == "qwen3_vl" else {"fullatt_block_indexes": [1]}
    name = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}[family]
    ids = dict(
        zip(
            ["vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id"],
            tokenizer.convert_tokens_to_ids(marks),
            strict=True,
        )
    )
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision, **ids)
    torch.manual_seed(0)
    model = strengthened(getattr(transformers, f"{name}ForConditionalGeneration")(config)).eval()
    if words:
        with torch.no_grad():
            said = torch.zeros(len(tokenizer), 1)
            said[tokenizer.convert_tokens_to_ids(list(words))] = 1
            model.lm_head.weight.mul_(said)
    model.save_pretrained(folder)
    return model


def make_detector(folder: Path, family: str, *, classes: Sequence[str] = ("person", "stop sign", "remote")) -> None:
    """A Mask2Former or a DETR of 5 queries, with its picture processor."""
    from transformers import (
        DetrConfig,
        DetrForObjectDetection,
        Mask2FormerConfig,
        Mask2FormerForUniversalSegmentation,
        ResNetConfig,
        SwinConfig,
    )
    from transformers.models.detr.image_processing_pil_detr import DetrImageProcessorPil
    from transformers.models.mask2former.image_processing_pil_mask2former import Mask2FormerImageProcessorPil

    names = {"id2label": dict(enumerate(classes)), "label2id": {name: number for number, name in enumerate(classes)}}
    small = {"encoder_layers": 1, "decoder_layers": 2, "num_queries": 5}
    size = {"height": 64, "width": 64}
    torch.manual_seed(0)
    if family == "mask2former":
        stages = [f"stage{number}" for number in range(1, 5)]
        tiny = {"embed_dim": 8, "depths": [1] * 4, "num_heads": [1] * 4, "window_size": 2, "out_features": stages}
        widths = {"feature_size": 32, "mask_feature_size": 32, "hidden_dim": 32, "encoder_feedforward_dim": 16}
        config = Mask2FormerConfig(
            backbone_config=SwinConfig(image_size=32, **tiny),
            num_attention_heads=2,
            dim_feedforward=16,
            **widths,
            **small,
            **names,
        )
        strengthened(Mask2FormerForUniversalSegmentation(config)).eval().save_pretrained(folder)
        Mask2FormerImageProcessorPil(size=size).save_pretrained(folder)
        return
    backbone = ResNetConfig(embedding_size=8, hidden_sizes=[8] * 4, depths=[1] * 4, out_features=["stage4"])
    config = DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=backbone,
        d_model=16,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        **small,
        **names,
    )
    strengthened(DetrForObjectDetection(config)).eval().save_pretrained(folder)
    DetrImageProcessorPil(size=size).save_pretrained(folder)
