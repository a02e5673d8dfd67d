"""ImageReward: a tiny network under the published names, against BLIP's equations written out in float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, unfold

from digenrl.config.loader import load_reward
from digenrl.errors import ConfigError
from digenrl.rewards.base import RewardSample
from digenrl.rewards.clip import Preparation
from digenrl.rewards.compose import WeightedRewards
from digenrl.testing import check_reward
from tests.rewards.services import pictures
from tests.rewards.tiny_networks import head_by_hand, make_head

SAMPLES = [replace(sample, prompt=f"a red {number} " + "x" * number) for number, sample in enumerate(pictures(5, size=40))]
VISION, TEXT, SIDE, PATCH = 32, 24, 32, 16
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import BertTokenizer

    letters = [chr(code) for code in range(33, 127)]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    folder = tmp_path_factory.mktemp("bert")
    BertTokenizer(vocab={piece: number for number, piece in enumerate(pieces)}).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    """A ViT of 2 blocks, a text encoder of 2 layers, and what the published file has beside them."""
    random = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random) / shape[-1] ** 0.5

    made = {
        "blip.visual_encoder.cls_token": drawn(1, 1, VISION),
        "blip.visual_encoder.pos_embed": drawn(1, (SIDE // PATCH) ** 2 + 1, VISION),
        "blip.visual_encoder.patch_embed.proj.weight": drawn(VISION, 3, PATCH, PATCH),
        "blip.visual_encoder.patch_embed.proj.bias": drawn(VISION),
        "blip.text_encoder.embeddings.position_ids": torch.arange(64)[None],
        "blip.text_encoder.embeddings.word_embeddings.weight": drawn(200, TEXT),
        "blip.text_encoder.embeddings.position_embeddings.weight": drawn(64, TEXT),
        "blip.vision_proj.weight": drawn(8, VISION),
        "blip.text_proj.weight": drawn(8, TEXT),
    }

    def linear(name: str, outputs: int, inputs: int) -> None:
        made[f"blip.{name}.weight"], made[f"blip.{name}.bias"] = drawn(outputs, inputs), drawn(outputs)

    def norm(name: str, width: int) -> None:
        made[f"blip.{name}.weight"], made[f"blip.{name}.bias"] = 1 + drawn(width), drawn(width)

    norm("visual_encoder.norm", VISION)
    norm("text_encoder.embeddings.LayerNorm", TEXT)
    for number in range(2):
        block, layer = f"visual_encoder.blocks.{number}", f"text_encoder.encoder.layer.{number}"
        norm(f"{block}.norm1", VISION)
        norm(f"{block}.norm2", VISION)
        linear(f"{block}.attn.qkv", 3 * VISION, VISION)
        linear(f"{block}.attn.proj", VISION, VISION)
        linear(f"{block}.mlp.fc1", 64, VISION)
        linear(f"{block}.mlp.fc2", VISION, 64)
        for attention, width in (("attention", TEXT), ("crossattention", VISION)):
            linear(f"{layer}.{attention}.self.query", TEXT, TEXT)
            linear(f"{layer}.{attention}.self.key", TEXT, width)
            linear(f"{layer}.{attention}.self.value", TEXT, width)
            linear(f"{layer}.{attention}.output.dense", TEXT, TEXT)
            norm(f"{layer}.{attention}.output.LayerNorm", TEXT)
        linear(f"{layer}.intermediate.dense", 48, TEXT)
        linear(f"{layer}.output.dense", TEXT, 48)
        norm(f"{layer}.output.LayerNorm", TEXT)
    made |= {f"mlp.{name}": value for name, value in make_head(TEXT).items()}
    return made


def by_hand(tensors: dict[str, Tensor], folder: Path, sample: RewardSample) -> float:
    from transformers import AutoTokenizer

    plain = {name: value.double() for name, value in tensors.items()}

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ plain[f"blip.{name}.weight"].T + plain[f"blip.{name}.bias"]

    def norm(name: str, x: Tensor, eps: float) -> Tensor:
        return layer_norm(x, x.shape[-1:], plain[f"blip.{name}.weight"], plain[f"blip.{name}.bias"], eps)

    def attend(query: Tensor, key: Tensor, value: Tensor, heads: int) -> Tensor:
        q, k, v = (x.unflatten(-1, (heads, -1)).transpose(0, 1) for x in (query, key, value))
        weights = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).softmax(-1)
        return (weights @ v).transpose(0, 1).flatten(1)

    pixels = Preparation(shorter_side=SIDE, crop=SIDE, mean=MEAN, std=STD).pixels(sample.image).double()
    patches = unfold(pixels[None], PATCH, stride=PATCH)[0].T
    encoder = "blip.visual_encoder"
    x = patches @ plain[f"{encoder}.patch_embed.proj.weight"].flatten(1).T + plain[f"{encoder}.patch_embed.proj.bias"]
    x = torch.cat([plain[f"{encoder}.cls_token"][0], x]) + plain[f"{encoder}.pos_embed"][0]
    for number in range(2):
        block = f"visual_encoder.blocks.{number}"
        q, k, v = linear(f"{block}.attn.qkv", norm(f"{block}.norm1", x, 1e-6)).chunk(3, -1)
        x = x + linear(f"{block}.attn.proj", attend(q, k, v, 16))
        x = x + linear(f"{block}.mlp.fc2", gelu(linear(f"{block}.mlp.fc1", norm(f"{block}.norm2", x, 1e-6))))
    seen = norm("visual_encoder.norm", x, 1e-6)

    ids = torch.tensor(AutoTokenizer.from_pretrained(folder)(sample.prompt, truncation=True, max_length=35)["input_ids"])
    table = "blip.text_encoder.embeddings"
    y = plain[f"{table}.word_embeddings.weight"][ids] + plain[f"{table}.position_embeddings.weight"][: len(ids)]
    y = norm("text_encoder.embeddings.LayerNorm", y, 1e-12)
    for number in range(2):
        layer = f"text_encoder.encoder.layer.{number}"
        for attention, other in (("attention", None), ("crossattention", seen)):
            source, name = (y if other is None else other), f"{layer}.{attention}"
            mixed = attend(
                linear(f"{name}.self.query", y), linear(f"{name}.self.key", source), linear(f"{name}.self.value", source), 12
            )
            y = norm(f"{name}.output.LayerNorm", linear(f"{name}.output.dense", mixed) + y, 1e-12)
        inner = linear(f"{layer}.output.dense", gelu(linear(f"{layer}.intermediate.dense", y)))
        y = norm(f"{layer}.output.LayerNorm", inner + y, 1e-12)
    head = {name.removeprefix("mlp."): value for name, value in tensors.items() if name.startswith("mlp.")}
    return (head_by_hand(head, y[0]) - 0.16717362830052426) / 1.0333394966054072


def reward(path: Path, folder: Path, *more: str) -> WeightedRewards:
    changes = [f"path={path}", f"tokenizer_path={folder}", "device=cpu", "self_test=false", *more]
    return WeightedRewards.from_recipe([load_reward("image_reward", changes)])


@pytest.mark.parametrize("name", ["ImageReward.pt", "ImageReward.safetensors"])
def test_the_score_is_that_of_blips_equations_and_the_published_standardisation(
    name: str, tensors: dict[str, Tensor], tokenizer_folder: Path, tmp_path: Path
) -> None:
    save_file(tensors, tmp_path / name) if name.endswith("safetensors") else torch.save(tensors, tmp_path / name)
    samples = [*SAMPLES, replace(SAMPLES[0], id=replace(SAMPLES[0].id, step=9), prompt="long " * 30)]
    found = reward(tmp_path, tokenizer_folder).score(samples).totals
    wanted = [by_hand(tensors, tokenizer_folder, sample) for sample in samples]
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)  # float32 against float64
    assert len(set(found.round(4))) == len(samples)


def test_a_score_does_not_depend_on_the_samples_beside_it(
    tensors: dict[str, Tensor], tokenizer_folder: Path, tmp_path: Path
) -> None:
    save_file(tensors, tmp_path / "weights.safetensors")
    made = reward(tmp_path / "weights.safetensors", tokenizer_folder, "forward_batch_size=4")
    assert [made.score([sample]).totals[0] for sample in SAMPLES] == made.score(SAMPLES).totals.tolist()


def test_it_keeps_the_contract_of_rewards(tensors: dict[str, Tensor], tokenizer_folder: Path, tmp_path: Path) -> None:
    save_file(tensors, tmp_path / "weights.safetensors")
    given = [f"path={tmp_path / 'weights.safetensors'}", f"tokenizer_path={tokenizer_folder}", "device=cpu", "self_test=false"]
    check_reward("image_reward", [*given, "offload=true"])


def test_weights_that_are_not_imagerewards_are_refused(
    tensors: dict[str, Tensor], tokenizer_folder: Path, tmp_path: Path
) -> None:
    def refused(changed: dict[str, Any]) -> str:
        save_file(changed, tmp_path / "ImageReward.safetensors")
        with pytest.raises(ConfigError) as caught:
            reward(tmp_path, tokenizer_folder)
        return str(caught.value)

    with pytest.raises(ConfigError, match="has none of ImageReward") as caught:
        reward(tmp_path, tokenizer_folder)
    assert "hf download THUDM/ImageReward ImageReward.pt" in caught.value.fix
    lacking = "blip.text_encoder.encoder.layer.1.crossattention.self.key.bias"
    assert "text.encoder.layer.1.crossattention.self.key.bias" in refused({k: v for k, v in tensors.items() if k != lacking})
    assert "vision.encoder.layers.1.gate.bias" in refused({**tensors, "blip.visual_encoder.blocks.1.gate.bias": torch.zeros(3)})
