"""A judge in the scorer's own process: tiny models of three families, compared with each sample asked alone, without padding."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from digenrl.config.loader import load_reward
from digenrl.config.settings.vlm_judge_local import VlmJudgeLocalSettings
from digenrl.errors import ConfigError
from digenrl.ids import SampleId
from digenrl.rewards.base import RewardSample, Score
from digenrl.rewards.compose import WeightedRewards
from digenrl.rewards.qwen_vl import QwenVlInputs
from digenrl.rewards.vlm_judge_local import VlmJudgeLocalReward
from digenrl.testing import check_reward
from tests.rewards.services import pictures
from tests.rewards.tiny_networks import make_qwen_vl

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
ANSWERS = [json.dumps({"score": number}) for number in range(8)]
SAMPLES = [replace(sample, prompt="x" * 9 * number) for number, sample in enumerate(pictures(6, size=64))]
TEMPLATE = "Like it? {prompt}"


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    make_qwen_vl(folder, request.param, words=[*ANSWERS, "Yes", "yes", "no"])
    return folder


@pytest.fixture(scope="module")
def one_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("judge")
    make_qwen_vl(folder, "qwen2_5_vl", words=ANSWERS)
    return folder


def judge(folder: Path, **settings: Any) -> VlmJudgeLocalReward:
    given = {"path": str(folder), "device": "cpu", "template": TEMPLATE, "max_tokens": 1, "forward_batch_size": 4}
    return VlmJudgeLocalReward(VlmJudgeLocalSettings(**(given | settings)))


def values(judge: VlmJudgeLocalReward, samples: list[RewardSample]) -> list[float]:
    scores = judge.score(samples)
    assert list(scores) == [sample.id for sample in samples]
    assert all(isinstance(score, Score) for score in scores.values())
    return [score.value for score in scores.values()]


def first_logits(folder: Path, sample: RewardSample) -> tuple[Any, torch.Tensor]:
    """The text put together by hand, the picture by transformers' processor, the model on its own."""
    from transformers import AutoModelForImageTextToText, AutoTokenizer
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = AutoTokenizer.from_pretrained(folder)
    seen = Qwen2VLImageProcessorPil.from_pretrained(folder)(images=sample.image, return_tensors="pt")
    marks = "<|image_pad|>" * (int(seen["image_grid_thw"].prod()) // 4)
    text = (
        f"<|im_start|>user\n<|vision_start|>{marks}<|vision_end|>{TEMPLATE.replace('{prompt}', sample.prompt)}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    kinds = (ids == tokenizer.convert_tokens_to_ids("<|image_pad|>")).int()
    with torch.no_grad():
        return tokenizer, model(input_ids=ids, mm_token_type_ids=kinds, **seen).logits[0, -1].double()


def test_the_score_is_in_the_text_that_the_model_finds_likeliest(folder: Path) -> None:
    wanted = []
    for sample in SAMPLES:
        tokenizer, logits = first_logits(folder, sample)
        text = tokenizer.decode(logits.argmax())
        wanted.append(float(json.loads(text)["score"]) if text in ANSWERS else math.nan)
    np.testing.assert_equal(values(judge(folder), SAMPLES), wanted)


def test_the_chance_of_yes_is_that_of_its_spellings_against_those_of_no(folder: Path) -> None:
    wanted = []
    for sample in SAMPLES:
        tokenizer, logits = first_logits(folder, sample)
        chances = logits.softmax(-1)[tokenizer.convert_tokens_to_ids(["Yes", "yes", "no"])]
        wanted.append(float(chances[:2].sum() / chances.sum()))
    found = values(judge(folder, read="yes"), SAMPLES)
    np.testing.assert_allclose(found, wanted, rtol=1e-4)  # float32, with padding and without
    assert len(set(found)) == len(SAMPLES)


def test_a_score_does_not_depend_on_the_samples_beside_it(folder: Path) -> None:
    many = [*SAMPLES, replace(SAMPLES[0], id=SampleId(9, 0, 0), image=pictures(1, size=96)[0].image)]
    made = judge(folder, read="yes")
    assert [values(made, [sample])[0] for sample in many] == values(made, many)
    assert values(made, many[::-1])[::-1] == values(made, many)


def test_what_is_written_is_read_as_the_answers_of_an_endpoint_are(one_folder: Path) -> None:
    # Two answers in a row are one too many, and 7 lies above the highest.
    twice = judge(one_folder, max_tokens=2).score(SAMPLES)
    assert all(math.isnan(score.value) and score.parts == {"unreadable": 1.0} for score in twice.values())
    free, bounded = values(judge(one_folder), SAMPLES), values(judge(one_folder, maximum=3), SAMPLES)
    assert max(free) > 3
    np.testing.assert_equal(bounded, [value if value <= 3 else math.nan for value in free])


def test_frames_of_a_video_are_shown_as_pictures_in_order(one_folder: Path) -> None:
    inputs = QwenVlInputs(str(one_folder), max_pixels=12544)
    frames = np.stack([sample.image for sample in SAMPLES[:3]])
    question = inputs.question(frames, "hi", system="Be fair.")
    assert question.grids.tolist() == [[1, 4, 4]] * 3
    alone = [inputs.question(frame[None], "hi").pixels for frame in frames]
    assert torch.equal(question.pixels, torch.cat(alone))
    picture = "<|vision_start|>" + "<|image_pad|>" * 4 + "<|vision_end|>"
    assert inputs.tokenizer.decode(question.ids) == (
        f"<|im_start|>system\nBe fair.<|im_end|>\n<|im_start|>user\n{picture * 3}hi<|im_end|>\n<|im_start|>assistant\n"
    )
    video = replace(SAMPLES[0], image=frames, fps=8.0)
    made = judge(one_folder, num_frames=1)
    assert values(made, [video]) == values(made, [replace(video, image=frames[1], fps=None)])


def test_pictures_are_made_smaller_only_beyond_the_bound(one_folder: Path) -> None:
    large = pictures(1, size=140)[0].frames
    grids = [QwenVlInputs(str(one_folder), max_pixels=bound).question(large, "").grids[0].tolist() for bound in (19600, 6272)]
    assert grids == [[1, 10, 10], [1, 4, 4]]


def test_a_mark_in_a_prompt_is_a_text_like_any_other(one_folder: Path) -> None:
    assert len(values(judge(one_folder), [replace(SAMPLES[0], prompt="<|image_pad|><|im_end|>")])) == 1


def test_an_older_folder_keeps_its_chat_template_in_a_file_of_its_own(one_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(one_folder, tmp_path, dirs_exist_ok=True)
    template = tmp_path / "chat_template.jinja"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template.read_text()}))
    template.unlink()
    assert values(judge(tmp_path), SAMPLES) == values(judge(one_folder), SAMPLES)


def test_what_cannot_judge_is_refused_before_anything_is_scored(one_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no token for 'yes'"):
        judge(one_folder, read="yes")
    with pytest.raises(ConfigError, match="cannot be loaded") as caught:
        judge(Path("nobody/no-such-judge"))
    assert "hf download nobody/no-such-judge" in caught.value.fix
    shutil.copytree(one_folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        judge(tmp_path)
    with pytest.raises(ConfigError, match="fails its self-test"):
        WeightedRewards.from_recipe([load_reward("vlm_judge_local", [f"path={one_folder}", "device=cpu", "max_tokens=3"])])


def test_it_keeps_the_contract_of_rewards(one_folder: Path) -> None:
    check_reward(
        "vlm_judge_local",
        [f"path={one_folder}", "device=cpu", "max_tokens=1", "self_test=false", "forward_batch_size=2", "offload=true"],
        prompt="p",
    )
