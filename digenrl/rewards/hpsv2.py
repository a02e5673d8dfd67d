"""The reward ``hpsv2``: Human Preference Score, version 2.1 (arXiv 2306.09341), a CLIP ViT-H/14 trained on what people chose.

value = i.t, the cosine of image and prompt, as the authors' own ``score`` returns it: about 0.2 to 0.35 (their tables show 100
times that). An image is resized (bicubic) until its longer side has 224 pixels, and black fills the square, so that nothing is
cut off. The published file has OpenCLIP's names, which ``clip_from_open_clip`` turns into those of transformers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from digenrl.config.settings.hpsv2 import HpsV2Settings
from digenrl.ids import SampleId
from digenrl.rewards.base import RewardSample
from digenrl.rewards.clip import Clip
from digenrl.rewards.neural import load_exactly, read_tensors, reading
from digenrl.rewards.self_test import GoodAndBad, circle_and_noise

_FILES = ("HPS_v2.1_compressed.safetensors", "HPS_v2.1_compressed.pt")
_MEAN = (0.48145466, 0.4578275, 0.40821073)
_STD = (0.26862954, 0.26130258, 0.27577711)
_HEADS = 16
"""Of both towers of ViT-H/14; the only size that the tensors do not tell."""
_BLOCK = re.compile(r"(visual\.)?transformer\.resblocks\.(\d+)\.(.+)")
_IN_BLOCK = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
_PLAIN = {
    "logit_scale": "logit_scale",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final.weight": "text_model.final_layer_norm.weight",
    "ln_final.bias": "text_model.final_layer_norm.bias",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.ln_pre.weight": "vision_model.pre_layrnorm.weight",
    "visual.ln_pre.bias": "vision_model.pre_layrnorm.bias",
    "visual.ln_post.weight": "vision_model.post_layernorm.weight",
    "visual.ln_post.bias": "vision_model.post_layernorm.bias",
}
_TRANSPOSED = {"text_projection": "text_projection.weight", "visual.proj": "visual_projection.weight"}


class HpsV2Reward:
    """Which of two images people would prefer for a prompt, as a cosine."""

    Settings = HpsV2Settings

    def __init__(self, settings: HpsV2Settings) -> None:
        """Raises ConfigError where the weights are not there."""
        from transformers import AutoTokenizer

        with reading(
            f"HPS v2.1 {settings.path!r} (tokenizer: {settings.tokenizer_path!r})",
            needs=f"It needs one of {', '.join(_FILES)}, and the tokenizer of a CLIP model; a hub id, a network.",
            fix="Fetch it where there is a network (hf download xswu/HPSv2 HPS_v2.1_compressed.pt --local-dir FOLDER, and hf "
            'download laion/CLIP-ViT-H-14-laion2B-s32B-b79K --include "*.json" "*.txt" --local-dir TOKENIZER), and set '
            "path=FOLDER and tokenizer_path=TOKENIZER.",
        ):
            model = clip_from_open_clip(read_tensors(settings.path, _FILES), heads=_HEADS)
            tokenizer = AutoTokenizer.from_pretrained(settings.tokenizer_path)
        side = model.config.vision_config.image_size
        self._clip = Clip(model, tokenizer, lambda image: whole_image(image, side), settings)
        self._tests = settings.self_test

    def score(self, samples: Sequence[RewardSample]) -> Mapping[SampleId, float]:
        """One number for each image."""
        return {sample.id: cosine for sample, cosine in zip(samples, self._clip.cosines(samples), strict=True)}

    def self_test(self) -> GoodAndBad | None:
        """A drawn circle must beat noise."""
        return circle_and_noise() if self._tests else None

    def to(self, device: torch.device | str) -> None:
        """Move the network."""
        self._clip.to(device)


def whole_image(image: NDArray[np.uint8], side: int) -> Tensor:
    """An image [H, W, 3] as [3, side, side] float32: all of it, in the middle of a black square, normalized."""
    pixels = torch.from_numpy(image.astype(np.float32) / 255).permute(2, 0, 1)
    height, width = image.shape[:2]
    longer = max(height, width)
    if longer != side:
        size = [max(1, round(length * side / longer)) for length in (height, width)]
        pixels = torch.nn.functional.interpolate(pixels[None], size, mode="bicubic", antialias=True)[0]
    below, right = side - pixels.shape[1], side - pixels.shape[2]
    pixels = torch.nn.functional.pad(pixels, (right // 2, right - right // 2, below // 2, below - below // 2))
    return (pixels - torch.tensor(_MEAN)[:, None, None]) / torch.tensor(_STD)[:, None, None]


def clip_from_open_clip(tensors: Mapping[str, Tensor], *, heads: int) -> Any:
    """Transformers' CLIPModel with the weights of an OpenCLIP model of two plain transformers with GELU.

    Raises KeyError or ValueError where the tensors are not those of one.
    """
    from transformers import CLIPConfig, CLIPModel

    vision_width, _, patch, _ = tensors["visual.conv1.weight"].shape
    vocabulary, text_width = tensors["token_embedding.weight"].shape
    grid = round((len(tensors["visual.positional_embedding"]) - 1) ** 0.5)
    both = {"hidden_act": "gelu", "num_attention_heads": heads, "layer_norm_eps": 1e-5}
    config = CLIPConfig(
        text_config={
            **both,
            "vocab_size": vocabulary,
            "hidden_size": text_width,
            "intermediate_size": len(tensors["transformer.resblocks.0.mlp.c_fc.bias"]),
            "num_hidden_layers": _depth(tensors, visual=False),
            "max_position_embeddings": len(tensors["positional_embedding"]),
            "eos_token_id": vocabulary - 1,
        },
        vision_config={
            **both,
            "hidden_size": vision_width,
            "intermediate_size": len(tensors["visual.transformer.resblocks.0.mlp.c_fc.bias"]),
            "num_hidden_layers": _depth(tensors, visual=True),
            "image_size": grid * patch,
            "patch_size": patch,
        },
        projection_dim=tensors["text_projection"].shape[1],
    )
    model = CLIPModel(config)
    load_exactly(model, _renamed(tensors))
    return model


def _renamed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, value in tensors.items():
        block = _BLOCK.fullmatch(name)
        if name in _PLAIN:
            found[_PLAIN[name]] = value
        elif name in _TRANSPOSED:
            found[_TRANSPOSED[name]] = value.T
        elif block is not None:
            tower, number, rest = block.groups()
            layer = f"{'vision' if tower else 'text'}_model.encoder.layers.{number}."
            part, _, kind = rest.rpartition(".")
            if rest in {"attn.in_proj_weight", "attn.in_proj_bias"}:
                kind = rest.removeprefix("attn.in_proj_")
                for projection, rows in zip("qkv", value.chunk(3), strict=True):
                    found[f"{layer}self_attn.{projection}_proj.{kind}"] = rows
            else:
                found[f"{layer}{_IN_BLOCK.get(part, part)}.{kind}"] = value
        elif name != "attn_mask":  # the causal mask, which old versions saved too
            found[name] = value
    return found


def _depth(tensors: Mapping[str, Tensor], *, visual: bool) -> int:
    blocks = (_BLOCK.fullmatch(name) for name in tensors)
    return 1 + max(int(block[2]) for block in blocks if block is not None and bool(block[1]) == visual)
