"""HPS v2.1: tensors under OpenCLIP's names, held to the numbers of OpenCLIP itself (see golden/README.md)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from digenrl.config.loader import load_reward
from digenrl.errors import ConfigError
from digenrl.ids import SampleId
from digenrl.rewards.base import RewardSample
from digenrl.rewards.compose import WeightedRewards
from digenrl.rewards.hpsv2 import clip_from_open_clip, whole_image
from digenrl.testing import check_reward
from tests.rewards.services import pictures
from tests.rewards.tiny_networks import TOKENIZER

GOLDEN = Path(__file__).parent / "golden" / "hpsv2.safetensors"
TENSORS = load_file(GOLDEN)
STATE = {name.removeprefix("state/"): value for name, value in TENSORS.items() if name.startswith("state/")}
IMAGES = [TENSORS[f"image/{number}"].numpy() for number in range(3)]


def samples() -> list[RewardSample]:
    with safe_open(GOLDEN, framework="pt") as file:
        prompts = json.loads(file.metadata()["prompts"])
    return [
        RewardSample(id=SampleId(0, 0, n), prompt=prompt, metadata={}, image=image)
        for n, (prompt, image) in enumerate(zip(prompts, IMAGES, strict=True))
    ]


def reward(path: Path, *more: str) -> WeightedRewards:
    changes = [f"path={path}", f"tokenizer_path={TOKENIZER}", "device=cpu", "self_test=false", *more]
    return WeightedRewards.from_recipe([load_reward("hpsv2", changes)])


@pytest.mark.parametrize("name", ["HPS_v2.1_compressed.pt", "HPS_v2.1_compressed.safetensors"])
def test_the_score_is_the_cosine_that_openclip_finds(name: str, tmp_path: Path) -> None:
    save_file(STATE, tmp_path / name) if name.endswith("safetensors") else torch.save({"state_dict": STATE}, tmp_path / name)
    found = reward(tmp_path).score(samples()).totals
    np.testing.assert_allclose(found, TENSORS["cosines"].numpy(), atol=2e-6)  # float32 sums in another order
    assert found.tolist() == reward(tmp_path / name).score(samples()).totals.tolist()


def test_all_of_an_image_is_seen_in_a_black_square() -> None:
    for image, wanted in zip(IMAGES, TENSORS["pixels"], strict=True):
        np.testing.assert_allclose(whole_image(image, 32), wanted, atol=1e-5)
    wide = whole_image(np.full((8, 32, 3), 255, dtype=np.uint8), 32)
    black, white = whole_image(np.zeros((32, 32, 3), dtype=np.uint8), 32), whole_image(np.full((32, 32, 3), 255, np.uint8), 32)
    assert torch.equal(wide[:, 12:20], white[:, 12:20])
    assert torch.equal(wide[:, :12], black[:, :12]) and torch.equal(wide[:, 20:], black[:, 20:])


def test_every_tensor_finds_its_place_in_a_transformers_model_and_none_is_left_over() -> None:
    model = clip_from_open_clip({**STATE, "attn_mask": torch.zeros(16, 16)}, heads=16)
    assert sum(value.numel() for value in STATE.values()) == sum(value.numel() for value in model.state_dict().values())
    lacking = {name: value for name, value in STATE.items() if name != "visual.ln_post.bias"}
    with pytest.raises(ValueError, match=r"vision_model\.post_layernorm\.bias"):
        clip_from_open_clip(lacking, heads=16)
    with pytest.raises(ValueError, match="score_predictor"):
        clip_from_open_clip({**STATE, "score_predictor.weight": torch.zeros(1)}, heads=16)


def test_a_score_does_not_depend_on_the_samples_beside_it(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "hps.safetensors")
    made = reward(tmp_path / "hps.safetensors", "forward_batch_size=4")
    many = pictures(6, size=40)
    assert [made.score([sample]).totals[0] for sample in many] == made.score(many).totals.tolist()


def test_it_keeps_the_contract_of_rewards(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "hps.safetensors")
    given = [f"path={tmp_path / 'hps.safetensors'}", f"tokenizer_path={TOKENIZER}", "device=cpu", "self_test=false"]
    check_reward("hpsv2", [*given, "offload=true"])


def test_weights_that_are_not_there_are_refused_and_the_error_says_what_to_fetch(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has none of HPS_v2\.1") as caught:
        reward(tmp_path)
    assert "hf download xswu/HPSv2 HPS_v2.1_compressed.pt" in caught.value.fix
    torch.save({"state_dict": {"epoch": 3}}, tmp_path / "HPS_v2.1_compressed.pt")
    with pytest.raises(ConfigError, match="named tensors"):
        reward(tmp_path)
