"""Rewards of a CLIP model: a tiny one with random weights, its formula worked out anew, and its preparation by hand."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from digenrl.config.loader import load_reward
from digenrl.config.settings.clip import PickScoreSettings
from digenrl.errors import ConfigError
from digenrl.rewards.base import RewardSample
from digenrl.rewards.clip import PickScoreReward, Preparation
from digenrl.rewards.compose import WeightedRewards
from tests.rewards.services import pictures
from tests.rewards.tiny_networks import CLIP_CONFIG, CLIP_SCALE, make_clip

SAMPLES = pictures(5, size=40)


@pytest.fixture(scope="module")
def tiny_clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clip")
    make_clip(folder)
    return folder


def rewards(name: str, folder: Path, *more: str) -> WeightedRewards:
    changes = [f"path={folder}", "device=cpu", "self_test=false", "tokenizer_path=null", *more]
    return WeightedRewards.from_recipe([load_reward(name, changes)])


def cosine(folder: Path, sample: RewardSample) -> float:
    """One sample alone, by transformers' own forward pass of the whole model."""
    from transformers import AutoTokenizer, CLIPModel

    text = AutoTokenizer.from_pretrained(folder)([sample.prompt], padding="max_length", max_length=16, return_tensors="pt")
    pixels = Preparation.from_json(json.dumps(CLIP_CONFIG)).pixels(sample.image)[None]
    model: Any = CLIPModel.from_pretrained(folder).eval()
    with torch.no_grad():
        return float(model(**text, pixel_values=pixels).logits_per_image[0, 0] / np.exp(CLIP_SCALE))


def test_the_scores_are_those_of_the_papers_formulas(tiny_clip: Path) -> None:
    picked = rewards("pickscore", tiny_clip).score(SAMPLES).totals
    clip = rewards("clip_score", tiny_clip).score(SAMPLES).totals
    wanted = np.array([cosine(tiny_clip, sample) for sample in SAMPLES])
    np.testing.assert_allclose(picked, np.exp(CLIP_SCALE) * wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(clip, 100 * np.maximum(wanted, 0), rtol=1e-5, atol=1e-4)
    assert picked.std() > 0


def test_a_score_does_not_depend_on_the_samples_beside_it(tiny_clip: Path) -> None:
    reward = rewards("pickscore", tiny_clip, "forward_batch_size=4")
    together = reward.score(SAMPLES).totals
    assert [reward.score([sample]).totals[0] for sample in SAMPLES] == together.tolist()


def test_prompt_and_image_both_count(tiny_clip: Path) -> None:
    reward = rewards("pickscore", tiny_clip)
    first, second = reward.score([SAMPLES[0], replace(SAMPLES[0], id=SAMPLES[1].id, prompt="two blue squares")]).totals
    assert first != second


def test_pixels_are_cut_at_the_centre_and_normalized() -> None:
    image = np.zeros((32, 64, 3), dtype=np.uint8)
    image[:, 16:48] = (255, 102, 51)
    pixels = Preparation.from_json(json.dumps(CLIP_CONFIG)).pixels(image)
    assert pixels.shape == (3, 32, 32)
    for channel, value in enumerate(((1 - 0.5) / 0.25, (0.4 - 0.4) / 0.5, (0.2 - 0.3) / 0.2)):
        np.testing.assert_allclose(pixels[channel].numpy(), value, atol=1e-6)
    old = {**CLIP_CONFIG, "crop_size": 32, "size": 32}
    assert torch.equal(Preparation.from_json(json.dumps(old)).pixels(image), pixels)
    tall = Preparation.from_json(json.dumps(CLIP_CONFIG)).pixels(np.full((130, 70, 3), 255, dtype=np.uint8))
    np.testing.assert_allclose(tall[0].numpy(), 2, atol=1e-6)


def test_weights_that_are_not_there_are_refused_and_the_error_says_what_to_fetch(tiny_clip: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        rewards("pickscore", Path("nobody/no-such-clip"))
    assert "hf download nobody/no-such-clip" in caught.value.fix
    shutil.copytree(tiny_clip, tmp_path / "clip")
    (tmp_path / "clip" / "model.safetensors").rename(tmp_path / "clip" / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        rewards("clip_score", tmp_path / "clip")


@pytest.mark.parametrize("name", ["clip_score", "pickscore"])
def test_an_offloaded_model_scores_as_one_that_stays(name: str, tiny_clip: Path) -> None:
    there = rewards(name, tiny_clip).score(SAMPLES).totals.tolist()
    assert rewards(name, tiny_clip, "offload=true").score(SAMPLES).totals.tolist() == there


def test_the_network_is_asked_where_it_was_moved_to(tiny_clip: Path) -> None:
    reward = PickScoreReward(PickScoreSettings(path=str(tiny_clip), tokenizer_path=None, device="cpu"))
    reward.to("meta")
    with pytest.raises(NotImplementedError, match="meta"):
        reward.score(SAMPLES)
