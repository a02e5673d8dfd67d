"""Folders with tiny networks of random weights, laid out as the published ones are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.rewards.services import ROOT

TOKENIZER = ROOT / "digenrl" / "assets" / "shapes" / "model" / "tokenizer"
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
