"""What rewards with a network share: published files are read by name, and as tensors alone."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from digenrl.config.loader import load_reward
from digenrl.errors import ConfigError
from digenrl.rewards.compose import WeightedRewards
from digenrl.rewards.neural import by_row, linear_head, load_exactly, read_tensors, reading
from tests.rewards.tiny_networks import TOKENIZER, make_clip, make_qwen_vl

ONE, TWO = {"a.weight": torch.ones(2)}, {"a.weight": torch.full((2,), 2.0)}


def test_the_first_name_that_a_folder_has_counts_and_a_file_is_taken_as_it_is(tmp_path: Path) -> None:
    torch.save(ONE, tmp_path / "b.pt")
    names = ("b.safetensors", "b.pt")
    assert read_tensors(str(tmp_path), names)["a.weight"].tolist() == [1, 1]
    save_file(TWO, tmp_path / "b.safetensors")
    assert read_tensors(str(tmp_path), names)["a.weight"].tolist() == [2, 2]
    assert read_tensors(str(tmp_path / "b.pt"), names)["a.weight"].tolist() == [1, 1]


def test_what_wraps_the_tensors_is_taken_off(tmp_path: Path) -> None:
    torch.save({"epoch": 3, "state_dict": {f"module.{name}": value for name, value in ONE.items()}}, tmp_path / "b.pt")
    assert list(read_tensors(str(tmp_path), ("b.pt",))) == ["a.weight"]


def test_a_network_takes_all_of_its_tensors_and_no_other() -> None:
    layer = torch.nn.Linear(3, 2)
    good = {"weight": torch.ones(2, 3, dtype=torch.float16), "bias": torch.zeros(2, dtype=torch.float16)}
    load_exactly(layer, good)
    assert layer.weight.dtype == torch.float32 and layer(torch.ones(1, 3)).tolist() == [[3, 3]]
    with pytest.raises(ValueError, match=r"1 tensors are missing \['bias'\]"):
        load_exactly(layer, {"weight": good["weight"]})
    with pytest.raises(ValueError, match=r"1 are not the network's \['scale'\]"):
        load_exactly(layer, {**good, "scale": torch.ones(1)})


def test_a_head_answers_a_row_as_if_it_were_alone() -> None:
    head, rows = linear_head(33), torch.randn(7, 33, generator=torch.Generator().manual_seed(0))
    assert torch.equal(by_row(head, rows)[3:4], by_row(head, rows[3:4]))
    torch.testing.assert_close(by_row(head, rows), head(rows))


def test_a_network_that_is_made_while_reading_leaves_no_trace_in_the_random_state() -> None:
    before = torch.get_rng_state()
    with reading("A", needs="B", fix="C"):
        torch.nn.Linear(3, 2)
    assert torch.equal(torch.get_rng_state(), before)


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (os.environ["DIGENRL_TEST_MARKER"],))


def hpsv2(folder: Path, bomb: Callable[[str], None]) -> list[str]:
    bomb("HPS_v2.1_compressed.pt")
    return [f"path={folder}", f"tokenizer_path={TOKENIZER}"]


def image_reward(folder: Path, bomb: Callable[[str], None]) -> list[str]:
    bomb("ImageReward.pt")
    return [f"path={folder}", f"tokenizer_path={TOKENIZER}"]


def aesthetic(folder: Path, bomb: Callable[[str], None]) -> list[str]:
    make_clip(folder / "clip")
    bomb("aesthetic-model.pth")
    return [f"path={folder}", f"clip_path={folder / 'clip'}"]


def video_align(folder: Path, bomb: Callable[[str], None]) -> list[str]:
    make_qwen_vl(folder / "base", "qwen2_vl")
    (folder / "checkpoint-1").mkdir()
    bomb("checkpoint-1/model.pth")
    data, model = '{"max_frame_pixels": 100352}', '{"use_special_tokens": true, "output_dim": 1}'
    (folder / "model_config.json").write_text(f'{{"data_config": {data}, "model_config": {model}}}')
    (folder / "template.txt").write_text("{text_prompt}<|VQ_reward|><|MQ_reward|><|TA_reward|>")
    return [f"path={folder}", f"base_path={folder / 'base'}", f"template_path={folder / 'template.txt'}"]


@pytest.mark.parametrize("prepare", [hpsv2, image_reward, aesthetic, video_align], ids=lambda prepare: prepare.__name__)
@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_in_the_place_of_weights_never_runs(
    prepare: Callable[[Path, Callable[[str], None]], list[str]], zipped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIGENRL_TEST_MARKER", str(tmp_path / "ran"))

    def bomb(name: str) -> None:
        content = {"state_dict": {"a": torch.ones(1), "b": Bomb()}}
        torch.save(content, tmp_path / name) if zipped else (tmp_path / name).write_bytes(pickle.dumps(content))

    settings = prepare(tmp_path, bomb)
    with pytest.raises(ConfigError, match="cannot be loaded"):
        WeightedRewards.from_recipe([load_reward(prepare.__name__, [*settings, "device=cpu", "self_test=false"])])
    assert not (tmp_path / "ran").exists()
