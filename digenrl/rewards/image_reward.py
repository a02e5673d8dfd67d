"""The reward ``image_reward``: ImageReward 1.0 (arXiv 2304.05977), a BLIP with a head that has learned people's rankings.

The image (224 pixels, prepared as CLIP's) goes through a ViT-L/16, the prompt (35 tokens of BERT) through BERT's encoder with
cross-attention to the image; value = (head(h) - 0.16717362830052426) / 1.0333394966054072, where h is the encoder's output at the
first token and the head five linear layers (768, 1024, 128, 64, 16, 1). Usual values lie between -2.5 and 2.

The published file has the names of BLIP's own code; ``ImageRewardNetwork`` holds its tensors in transformers' BLIP classes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from digenrl.config.settings.image_reward import ImageRewardSettings
from digenrl.diffusion.batching import row_batches
from digenrl.ids import SampleId
from digenrl.rewards.base import RewardSample
from digenrl.rewards.clip import Preparation
from digenrl.rewards.neural import by_row, device_of, linear_head, load_exactly, read_tensors, reading
from digenrl.rewards.self_test import GoodAndBad, circle_and_noise

MEAN, STD = 0.16717362830052426, 1.0333394966054072
"""Of the head's values on the authors' data."""
_FILES = ("ImageReward.safetensors", "ImageReward.pt")
_NUM_TOKENS = 35
_VISION_HEADS, _TEXT_HEADS = 16, 12
"""Of ViT-L and BERT-base; the only sizes that the tensors do not tell."""
_VISION = {
    "cls_token": "embeddings.class_embedding",
    "pos_embed": "embeddings.position_embedding",
    "patch_embed.proj": "embeddings.patch_embedding",
    "norm": "post_layernorm",
}
_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)\.(weight|bias)")
_IN_BLOCK = {"norm1": "layer_norm1", "norm2": "layer_norm2", "attn.qkv": "self_attn.qkv", "attn.proj": "self_attn.projection"}


class ImageRewardReward:
    """How well people would rank an image for its prompt, standardised."""

    Settings = ImageRewardSettings

    def __init__(self, settings: ImageRewardSettings) -> None:
        """Raises ConfigError where the weights are not there."""
        from transformers import AutoTokenizer

        with reading(
            f"ImageReward {settings.path!r} (tokenizer: {settings.tokenizer_path!r})",
            needs=f"It needs one of {', '.join(_FILES)}, and BERT's uncased tokenizer; a hub id, a network.",
            fix="Fetch it where there is a network (hf download THUDM/ImageReward ImageReward.pt --local-dir FOLDER, and hf "
            'download google-bert/bert-base-uncased --include "*.json" "*.txt" --local-dir TOKENIZER), and set path=FOLDER and '
            "tokenizer_path=TOKENIZER.",
        ):
            self._network = ImageRewardNetwork.with_tensors(read_tensors(settings.path, _FILES)).eval().requires_grad_(False)
            self._tokenizer: Any = AutoTokenizer.from_pretrained(settings.tokenizer_path)
        side = self._network.image_size
        self._preparation = Preparation(
            shorter_side=side,
            crop=side,
            mean=(0.48145466, 0.4578275, 0.40821073),
            std=(0.26862954, 0.26130258, 0.27577711),
        )
        self._size = settings.forward_batch_size
        self._tests = settings.self_test
        self.to(device_of(settings.device))

    @torch.no_grad()
    def score(self, samples: Sequence[RewardSample]) -> Mapping[SampleId, float]:
        """One number for each image."""
        scores: list[float] = []
        for batch in row_batches(len(samples), self._size):
            rows = [samples[row] for row in batch.rows.tolist()]
            text = self._tokenizer(
                [sample.prompt for sample in rows],
                padding="max_length",
                truncation=True,
                max_length=_NUM_TOKENS,
                return_tensors="pt",
            ).to(self._device)
            pixels = torch.stack([self._preparation.pixels(sample.image) for sample in rows]).to(self._device)
            values = self._network(pixels, text["input_ids"], text["attention_mask"])[: batch.count]
            scores += ((values.double() - MEAN) / STD).tolist()
        return {sample.id: score for sample, score in zip(samples, scores, strict=True)}

    def self_test(self) -> GoodAndBad | None:
        """A drawn circle must beat noise."""
        return circle_and_noise() if self._tests else None

    def to(self, device: torch.device | str) -> None:
        """Move the network."""
        self._device = torch.device(device)
        self._network.to(self._device)


class ImageRewardNetwork(nn.Module):
    """Image encoder, text encoder with cross-attention, and head; in float32."""

    def __init__(self, vision: Any, text: Any) -> None:
        """vision, text: transformers' BlipVisionConfig and BlipTextConfig."""
        from transformers import BlipTextModel, BlipVisionModel

        super().__init__()
        self.image_size = int(vision.image_size)
        self.vision = BlipVisionModel(vision)
        self.text = BlipTextModel(text, add_pooling_layer=False)
        self.head = linear_head(text.hidden_size)

    @classmethod
    def with_tensors(cls, tensors: Mapping[str, Tensor]) -> ImageRewardNetwork:
        """From the published names. Raises KeyError or ValueError where they are not ImageReward's."""
        from transformers import BlipTextConfig, BlipVisionConfig

        vision_width, _, patch, _ = tensors["blip.visual_encoder.patch_embed.proj.weight"].shape
        vocabulary, text_width = tensors["blip.text_encoder.embeddings.word_embeddings.weight"].shape
        grid = round((tensors["blip.visual_encoder.pos_embed"].shape[1] - 1) ** 0.5)
        vision = BlipVisionConfig(
            hidden_size=vision_width,
            intermediate_size=len(tensors["blip.visual_encoder.blocks.0.mlp.fc1.bias"]),
            num_hidden_layers=_depth(tensors, r"blip\.visual_encoder\.blocks\.(\d+)\..+"),
            num_attention_heads=_VISION_HEADS,
            image_size=grid * patch,
            patch_size=patch,
            layer_norm_eps=1e-6,
        )
        text = BlipTextConfig(
            vocab_size=vocabulary,
            hidden_size=text_width,
            encoder_hidden_size=vision_width,
            intermediate_size=len(tensors["blip.text_encoder.encoder.layer.0.intermediate.dense.bias"]),
            num_hidden_layers=_depth(tensors, r"blip\.text_encoder\.encoder\.layer\.(\d+)\..+"),
            num_attention_heads=_TEXT_HEADS,
            max_position_embeddings=len(tensors["blip.text_encoder.embeddings.position_embeddings.weight"]),
            layer_norm_eps=1e-12,
        )
        network = cls(vision, text)
        load_exactly(network, _renamed(tensors))
        return network

    def forward(self, pixels: Tensor, ids: Tensor, attended: Tensor) -> Tensor:
        """pixels: [B, 3, side, side]. ids, attended: [B, tokens]. Returns [B]."""
        seen = self.vision(pixel_values=pixels).last_hidden_state
        read = self.text(
            input_ids=ids,
            attention_mask=attended,
            encoder_hidden_states=seen,
            encoder_attention_mask=torch.ones(seen.shape[:2], dtype=torch.long, device=seen.device),
            is_decoder=False,  # it reads the whole prompt at once, where a decoder would read up to each token
        ).last_hidden_state
        return by_row(self.head, read[:, 0])[:, 0]


def _renamed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Only the parts that score: the file also has projections that were used in training."""
    found: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if name.startswith("mlp."):
            found[f"head.{name.removeprefix('mlp.')}"] = value
        elif name.startswith("blip.text_encoder.") and not name.endswith("embeddings.position_ids"):
            found[f"text.{name.removeprefix('blip.text_encoder.')}"] = value
        elif name.startswith("blip.visual_encoder."):
            found[f"vision.{_vision_name(name.removeprefix('blip.visual_encoder.'))}"] = value
    return found


def _vision_name(name: str) -> str:
    block = _BLOCK.fullmatch(name)
    if block is not None:
        number, part, kind = block.groups()
        return f"encoder.layers.{number}.{_IN_BLOCK.get(part, part)}.{kind}"
    part, dot, kind = name.rpartition(".")
    return _VISION.get(name) or f"{_VISION.get(part, part)}{dot}{kind}"


def _depth(tensors: Mapping[str, Tensor], pattern: str) -> int:
    found = (re.fullmatch(pattern, name) for name in tensors)
    return 1 + max(int(match[1]) for match in found if match is not None)
