"""The LAION aesthetic predictor: its head on a tiny CLIP, worked out anew."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from digenrl.config.loader import load_reward
from digenrl.errors import ConfigError
from digenrl.rewards.compose import WeightedRewards
from digenrl.testing import check_reward
from tests.rewards.services import pictures
from tests.rewards.tiny_networks import CLIP_WIDTH, head_by_hand, make_clip, make_head

SAMPLES = pictures(5, size=40)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("aesthetic")
    make_clip(folder)
    return folder


@pytest.fixture(scope="module")
def head() -> dict[str, Tensor]:
    return make_head(CLIP_WIDTH)


def reward(folder: Path, path: Path, *more: str) -> WeightedRewards:
    changes = [f"path={path}", f"clip_path={folder}", "device=cpu", "self_test=false", *more]
    return WeightedRewards.from_recipe([load_reward("aesthetic", changes)])


def by_hand(folder: Path, head: dict[str, Tensor], image: Any) -> float:
    from transformers import CLIPImageProcessorPil, CLIPModel

    model: Any = CLIPModel.from_pretrained(folder).eval()
    pixels = CLIPImageProcessorPil.from_pretrained(folder)(image, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        value = model.get_image_features(pixel_values=pixels).pooler_output[0].double()
    value = value / value.square().sum().sqrt()
    return head_by_hand(head, value)


@pytest.mark.parametrize("name", ["aesthetic-model.pth", "sac+logos+ava1-l14-linearMSE.safetensors"])
def test_the_score_is_that_of_five_linear_layers_on_an_embedding_of_length_1(
    name: str, folder: Path, head: dict[str, Tensor], tmp_path: Path
) -> None:
    save_file(head, tmp_path / name) if name.endswith("safetensors") else torch.save(head, tmp_path / name)
    found = reward(folder, tmp_path).score(SAMPLES).totals
    wanted = [by_hand(folder, head, sample.image) for sample in SAMPLES]
    np.testing.assert_allclose(found, wanted, rtol=1e-4)  # float32 against float64
    assert found.std() > 1e-3


def test_neither_the_prompt_nor_the_samples_beside_it_change_a_score(
    folder: Path, head: dict[str, Tensor], tmp_path: Path
) -> None:
    save_file(head, tmp_path / "head.safetensors")
    made = reward(folder, tmp_path / "head.safetensors", "forward_batch_size=4")
    together = made.score(SAMPLES).totals.tolist()
    assert [made.score([replace(sample, prompt="other")]).totals[0] for sample in SAMPLES] == together


def test_it_keeps_the_contract_of_rewards(folder: Path, head: dict[str, Tensor], tmp_path: Path) -> None:
    save_file(head, tmp_path / "head.safetensors")
    paths = [f"path={tmp_path / 'head.safetensors'}", f"clip_path={folder}"]
    check_reward("aesthetic", [*paths, "device=cpu", "self_test=false", "offload=true"])


def test_a_head_of_another_size_and_one_that_is_not_there_are_refused(
    folder: Path, head: dict[str, Tensor], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="has none of") as caught:
        reward(folder, tmp_path)
    assert "hf download trl-lib/ddpo-aesthetic-predictor" in caught.value.fix
    save_file({**head, "layers.0.weight": torch.zeros(1024, 768)}, tmp_path / "head.safetensors")
    with pytest.raises(ConfigError, match="size mismatch"):
        reward(folder, tmp_path / "head.safetensors")
