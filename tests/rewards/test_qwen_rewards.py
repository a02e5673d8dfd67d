"""HPSv3 and VideoReward: tiny networks under the published names, against each sample asked alone, step by step."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from digenrl.config.loader import load_reward
from digenrl.config.settings.qwen_rewards import VideoAlignSettings
from digenrl.errors import ConfigError
from digenrl.rewards.base import RewardSample
from digenrl.rewards.compose import WeightedRewards
from digenrl.rewards.qwen_vl import QwenVlInputs, fitting
from digenrl.rewards.video_align import Checkpoint
from digenrl.testing import check_reward
from tests.rewards.services import pictures
from tests.rewards.tiny_networks import make_qwen_vl

IMAGES = [replace(sample, prompt="y" * 40 * number) for number, sample in enumerate(pictures(4, size=64))]
TEMPLATE = "Rate this!\n{text_prompt}\n"
WORDS = {"hpsv3": ["<|Reward|>"], "video_align": ["<|VQ_reward|>", "<|MQ_reward|>", "<|TA_reward|>"]}
NORMS = {"VQ_mean": 0.5, "VQ_std": 2.0, "MQ_mean": -0.25, "MQ_std": 0.5, "TA_mean": 0.125, "TA_std": 4.0}
DATA = {"fps": 2.0, "num_frames": None, "max_frame_pixels": 128 * 28 * 28, "sample_type": "uniform"}


@dataclass
class Made:
    """A base model's folder, its tokenizer and network with more tokens, and a head."""

    base: Path
    template: Path
    tokenizer: Any
    network: Any
    head: nn.Module

    def values(self, ids: Tensor, pixels: Tensor, grids: Tensor, mark: str, words: list[str]) -> Tensor:
        """As the authors' forward pass: pictures are embedded, and positions simply count on."""
        inner = self.network.model
        with torch.no_grad():
            embedded = inner.language_model.embed_tokens(ids[None])
            seen = inner.visual(pixels, grid_thw=grids).pooler_output
            embedded[0, ids == self.tokenizer.convert_tokens_to_ids(mark)] = seen
            positions = torch.arange(len(ids)).expand(3, 1, -1)
            hidden = inner.language_model(inputs_embeds=embedded, position_ids=positions).last_hidden_state[0]
            read = [hidden[ids.tolist().index(self.tokenizer.convert_tokens_to_ids(word))] for word in words]
            return self.head(torch.stack(read))


def make(folder: Path, name: str, head: nn.Module) -> Made:
    network = make_qwen_vl(folder / "base", "qwen2_vl")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    tokenizer.add_tokens(WORDS[name], special_tokens=True)
    torch.manual_seed(2)
    network.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    template = folder / "template.txt"
    template.write_text(TEMPLATE + " and\n".join(WORDS[name]))
    return Made(base=folder / "base", template=template, tokenizer=tokenizer, network=network, head=head.eval())


def head_of_hpsv3() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(32, 1024), nn.ReLU(), nn.Dropout(0.05), nn.Linear(1024, 16), nn.ReLU(), nn.Linear(16, 2))


def old_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As transformers before 4.52 named them."""
    return {name.replace("model.visual.", "visual.").replace("language_model.", ""): value for name, value in tensors.items()}


@pytest.fixture(scope="module")
def hpsv3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Made, Path]:
    folder = tmp_path_factory.mktemp("hpsv3")
    made = make(folder, "hpsv3", head_of_hpsv3())
    head = {f"rm_head.{name}": value for name, value in made.head.state_dict().items()}
    save_file(old_names(made.network.state_dict()) | head, folder / "HPSv3.safetensors")
    return made, folder


@pytest.fixture(scope="module")
def video_align(tmp_path_factory: pytest.TempPathFactory) -> tuple[Made, Path]:
    """Saved as the authors saved it: with an adapter of PEFT's beside the weights."""
    from peft import LoraConfig, get_peft_model

    folder = tmp_path_factory.mktemp("video_align")
    torch.manual_seed(4)
    made = make(folder, "video_align", nn.Linear(32, 1, bias=False))
    made.network.rm_head = made.head
    targets = [name for name, part in made.network.named_modules() if isinstance(part, nn.Linear) and "layers" in name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT asks transformers for a property that has another name by now
        adapted = get_peft_model(made.network, LoraConfig(r=4, lora_alpha=6, target_modules=targets, init_lora_weights=False))
    (folder / "checkpoint-20").mkdir()
    (folder / "checkpoint-9").mkdir()
    tensors = {name: value.clone() for name, value in adapted.eval().state_dict().items()}
    torch.save(old_names(tensors), folder / "checkpoint-20" / "model.pth")
    plain = {"data_config": DATA, "model_config": {"use_special_tokens": True, "output_dim": 1}}
    lora = {"lora_enable": True, "lora_r": 4, "lora_alpha": 6, "use_rslora": False}
    (folder / "model_config.json").write_text(json.dumps({**plain, "inference_config": NORMS, "peft_lora_config": lora}))
    return made, folder


def settings(made: Made, path: Path, *more: str) -> list[str]:
    given = [f"path={path}", f"base_path={made.base}", f"template_path={made.template}"]
    return [*given, "device=cpu", "self_test=false", "forward_batch_size=2", *more]


def reward(name: str, made: Made, path: Path, *more: str) -> WeightedRewards:
    return WeightedRewards.from_recipe([load_reward(name, settings(made, path, *more))])


def ids_by_hand(made: Made, prompt: str, mark: str, count: int) -> Tensor:
    asked = made.template.read_text().replace("{text_prompt}", prompt)
    text = f"<|im_start|>user\n<|vision_start|>{mark * count}<|vision_end|>{asked}<|im_end|>\n<|im_start|>assistant\n"
    return torch.tensor(made.tokenizer(text)["input_ids"])


def test_hpsv3_is_the_mean_that_its_head_reads_at_its_token(hpsv3: tuple[Made, Path]) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    made, path = hpsv3
    wanted = []
    for sample in IMAGES:
        # 256 * 28 * 28 pixels: 448 a side, in patches of 14, of which 4 make a token.
        picture = Image.fromarray(sample.image).resize((448, 448), Image.Resampling.BICUBIC)
        bounds = {"shortest_edge": 3136, "longest_edge": 10**6}
        seen = Qwen2VLImageProcessorPil.from_pretrained(made.base)(images=picture, size=bounds, return_tensors="pt")
        ids = ids_by_hand(made, sample.prompt, "<|image_pad|>", 256)
        values = made.values(ids, seen["pixel_values"], seen["image_grid_thw"], "<|image_pad|>", WORDS["hpsv3"])
        wanted.append(float(values[0, 0]))
    found = reward("hpsv3", made, path).score(IMAGES).totals
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)  # float32, padded and not
    assert len(set(found)) == len(IMAGES)
    assert reward("hpsv3", made, path, "dtype=bfloat16").score(IMAGES).totals == pytest.approx(wanted, abs=0.1)


def videos() -> list[RewardSample]:
    random = np.random.default_rng(0)
    sizes = ((9, 40, 80), (24, 56, 56), (5, 56, 56))
    made = []
    for number, (sample, size) in enumerate(zip(pictures(3), sizes, strict=True)):
        frames = random.integers(0, 256, size=(*size, 3), dtype=np.uint8)
        made.append(replace(sample, image=frames, fps=8.0, prompt="z" * number))
    return made


def patches_by_hand(frames: list[np.ndarray[Any, Any]], processor: Any) -> Tensor:
    """One patch after another: two frames, three colours, 14 by 14; four neighbours of each token together."""
    mean, std = np.array(processor.image_mean, dtype=np.float32), np.array(processor.image_std, dtype=np.float32)
    normal = [(frame.astype(np.float32) / 255 - mean) / std for frame in frames]
    height, width = (side // 14 for side in frames[0].shape[:2])
    rows = []
    for time in range(0, len(normal), 2):
        for top in range(0, height, 2):
            for left in range(0, width, 2):
                for y, x in ((top, left), (top, left + 1), (top + 1, left), (top + 1, left + 1)):
                    cut = [f[y * 14 : y * 14 + 14, x * 14 : x * 14 + 14] for f in normal[time : time + 2]]
                    rows.append(np.stack([part[..., colour] for colour in range(3) for part in cut]).ravel())
    return torch.from_numpy(np.stack(rows))


def test_video_align_is_the_sum_of_three_standardised_answers(video_align: tuple[Made, Path]) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    made, path = video_align
    processor = Qwen2VLImageProcessorPil.from_pretrained(made.base)
    wanted = []
    # At 2 of 8 frames a second at least four are shown, and six of 24.
    for sample, shown, size in zip(
        videos(),
        ([0, 3, 5, 8], [0, 5, 9, 14, 18, 23], [0, 1, 3, 4]),
        ((224, 448), (336, 336), (336, 336)),
        strict=True,
    ):
        frames = [Image.fromarray(sample.image[place]).resize(size[::-1], Image.Resampling.BICUBIC) for place in shown]
        pixels = patches_by_hand([np.asarray(frame) for frame in frames], processor)
        grids = torch.tensor([[len(shown) // 2, size[0] // 14, size[1] // 14]])
        ids = ids_by_hand(made, sample.prompt, "<|video_pad|>", int(grids.prod()) // 4)
        values = made.values(ids, pixels, grids, "<|video_pad|>", WORDS["video_align"])[:, 0].double()
        wanted.append([(values[0] - 0.5) / 2, (values[1] + 0.25) / 0.5, (values[2] - 0.125) / 4])
    scored = reward("video_align", made, path).score(videos())
    for number, name in enumerate(("VQ", "MQ", "TA")):
        found = scored.parts[f"video_align/{name}"]
        np.testing.assert_allclose(found, [row[number] for row in wanted], rtol=1e-3, atol=1e-4)  # the adapter is added first
    np.testing.assert_allclose(scored.totals, np.sum([scored.parts[f"video_align/{n}"] for n in ("VQ", "MQ", "TA")], axis=0))
    weighted = reward("video_align", made, path, "vq_weight=0", "ta_weight=0", "mq_weight=2").score(videos())
    np.testing.assert_allclose(weighted.totals, 2 * scored.parts["video_align/MQ"])


@pytest.mark.parametrize("name", ["hpsv3", "video_align"])
def test_they_keep_the_contract_of_rewards(name: str, request: pytest.FixtureRequest) -> None:
    made, path = request.getfixturevalue(name)
    check_reward(name, settings(made, path, "offload=true"), prompt="p")


def test_a_video_of_one_frame_twice_is_the_picture(hpsv3: tuple[Made, Path]) -> None:
    inputs = QwenVlInputs(str(hpsv3[0].base), min_pixels=3136, max_pixels=12544)
    frame = IMAGES[0].frames
    for shown in (frame, np.concatenate([frame, frame])):
        video, picture = inputs.video_question(shown, "hi"), inputs.question(frame, "hi")
        torch.testing.assert_close(video.pixels, picture.pixels)
        assert torch.equal(video.grids, picture.grids)


@pytest.mark.parametrize(
    ("size", "wanted"),
    [
        ((480, 480), (448, 448)),
        ((480, 832), (336, 588)),
        ((40, 80), (224, 448)),
        ((448, 448), (448, 448)),
        ((10, 2000), (28, 4480)),
    ],
)
def test_sides_are_brought_between_the_bounds_and_divided_by_28(size: tuple[int, int], wanted: tuple[int, int]) -> None:
    assert fitting(*size, 28, shortest_edge=128 * 28 * 28, longest_edge=200704) == wanted


@pytest.mark.parametrize(
    ("frames", "fps", "count"), [(81, 16.0, 10), (17, 24.0, 4), (3, 8.0, 2), (1, 8.0, 1), (2000, 1.0, 768), (20, None, 20)]
)
def test_frames_are_counted_as_the_authors_count_them(frames: int, fps: float | None, count: int) -> None:
    made = Checkpoint.from_json(json.dumps({"data_config": DATA, "model_config": {"use_special_tokens": True, "output_dim": 1}}))
    video = replace(IMAGES[0], image=np.arange(frames).astype(np.uint8)[:, None, None, None] * np.ones((1, 1, 1, 3), np.uint8))
    shown = made.shown(replace(video, fps=fps))
    assert len(shown) == count
    if frames == 17:
        assert shown[:, 0, 0, 0].tolist() == [0, 5, 11, 16]
    assert made.means.tolist() == [0] * 3 and made.stds.tolist() == [1] * 3
    fixed = json.dumps({"data_config": {**DATA, "num_frames": 7}, "model_config": {"use_special_tokens": True, "output_dim": 1}})
    assert len(Checkpoint.from_json(fixed).shown(video)) == min(8, frames)


def changed(folder: Path, path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    plain = json.loads((path / "model_config.json").read_text())
    change(plain)
    (folder / "model_config.json").write_text(json.dumps(plain))
    (folder / "checkpoint-1").symlink_to(path / "checkpoint-20")
    return folder


def test_what_is_not_a_hpsv3_or_a_video_reward_is_refused(
    hpsv3: tuple[Made, Path], video_align: tuple[Made, Path], tmp_path: Path
) -> None:
    made, path = hpsv3
    for text, wrong in (("<|Reward|>", r"\{text_prompt\} once"), ("{text_prompt}", r"<\|Reward\|> once")):
        (tmp_path / "template.txt").write_text(text)
        with pytest.raises(ConfigError, match=wrong) as caught:
            reward("hpsv3", replace(made, template=tmp_path / "template.txt"), path)
    assert "hf download MizzenAI/HPSv3" in caught.value.fix
    with pytest.raises(ConfigError, match=r"has none of HPSv3\.safetensors"):
        reward("hpsv3", made, tmp_path)
    tensors = made.network.state_dict() | {f"rm_head.{name}": value for name, value in made.head.state_dict().items()}
    save_file({k: v for k, v in tensors.items() if k != "model.visual.merger.ln_q.bias"}, tmp_path / "HPSv3.safetensors")
    with pytest.raises(ConfigError, match=r"merger\.ln_q\.bias"):
        reward("hpsv3", made, tmp_path)
    save_file(tensors | {"rm_head.9.bias": torch.zeros(1)}, tmp_path / "HPSv3.safetensors")
    with pytest.raises(ConfigError, match="not the network's"):
        reward("hpsv3", made, tmp_path)
    short = tensors | {"model.language_model.embed_tokens.weight": torch.zeros(300, 32)}
    save_file(short, tmp_path / "HPSv3.safetensors")
    with pytest.raises(ConfigError, match="and the weights 300"):
        reward("hpsv3", made, tmp_path)

    made, path = video_align
    with pytest.raises(ConfigError, match="'multi_pts'"):
        reward("video_align", made, changed(tmp_path, path, lambda plain: plain["data_config"].update(sample_type="multi_pts")))
    (tmp_path / "checkpoint-1").unlink()
    (tmp_path / "model_config.json").write_text((path / "model_config.json").read_text())
    with pytest.raises(ConfigError, match="has no checkpoint-N"):
        reward("video_align", made, tmp_path)
    with pytest.raises(ValueError, match="are all 0"):
        VideoAlignSettings(path="a", template_path="b", vq_weight=0, mq_weight=0, ta_weight=0)
