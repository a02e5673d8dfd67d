"""Small files of other trainers' formats become prompt files of ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from digenrl.cli.data_import import run
from digenrl.data.prompts import load_prompts
from digenrl.errors import ConfigError

GENEVAL = {"tag": "counting", "include": [{"class": "dog", "count": 2}], "prompt": "two dogs"}


def imported(kind: str, file: Path) -> list[tuple[str, dict[str, Any]]]:
    out = file.parent / "out.jsonl"
    run(kind, str(file), str(out))
    return [(prompt.text, dict(prompt.metadata)) for prompt in load_prompts(out).prompts]


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("kind", ["flow_grpo", "flow_factory", "dance_grpo"])
def test_a_prompt_a_line(kind: str, tmp_path: Path) -> None:
    file = write(tmp_path / "train.txt", 'a sign "OPEN"\n\n李明 at night\n')
    assert imported(kind, file) == [('a sign "OPEN"', {}), ("李明 at night", {})]


@pytest.mark.parametrize("kind", ["flow_grpo", "flow_factory"])
def test_jsonl_keeps_its_fields(kind: str, tmp_path: Path) -> None:
    lines = [GENEVAL, {"prompt": "a cat", "negative_prompt": "blurry", "image": "cat.png"}]
    file = write(tmp_path / "train.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    got = imported(kind, file)
    assert got == [("two dogs", {k: v for k, v in GENEVAL.items() if k != "prompt"}), ("a cat", {"image": "cat.png"})]
    assert load_prompts(tmp_path / "out.jsonl").prompts[1].negative == "blurry"


def test_captions_of_dance_grpo_lose_their_embeddings_alone(tmp_path: Path) -> None:
    embeddings = ("prompt_embed_path", "pooled_prompt_embeds_path", "prompt_attention_mask", "text_ids", "latent_path")
    rows = [{**dict.fromkeys(embeddings, "0.pt"), "caption": "a cat", "length": 1, "image_path": "cat.png"}]
    file = write(tmp_path / "videos2caption.json", json.dumps(rows))
    assert imported("dance_grpo", file) == [("a cat", {"length": 1, "image_path": "cat.png"})]


def test_chats_of_verl_become_prompts_with_their_ground_truth(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    rows = [
        {
            "data_source": "ocr",
            "prompt": [{"role": "system", "content": "draw"}, {"role": "user", "content": "a sign"}],
            "negative_prompt": [{"role": "user", "content": "blurry"}],
            "reward_model": {"style": "rule", "ground_truth": "OPEN"},
            "extra_info": {"index": 3},
        },
        {"data_source": "ocr", "prompt": [{"role": "user", "content": "a cat"}], "reward_model": None, "extra_info": None},
    ]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    assert imported("verl", tmp_path / "train.parquet") == [
        ("a sign", {"data_source": "ocr", "extra_info": {"index": 3}, "ground_truth": "OPEN"}),
        ("a cat", {"data_source": "ocr"}),
    ]
    assert [prompt.negative for prompt in load_prompts(tmp_path / "out.jsonl").prompts] == ["blurry", ""]


@pytest.mark.parametrize(
    ("kind", "name", "text", "detail"),
    [
        ("verl", "x.parquet", "not parquet", "is not a parquet file"),
        ("dance_grpo", "x.json", '[{"caption": 3}]', "row 0 (from 0) has no text in `caption`"),
        ("dance_grpo", "x.json", '[{"caption": "a dog", "prompt": "a cat"}]', "another `prompt` beside its `caption`"),
        ("dance_grpo", "x.json", "{}", "is not a list"),
        ("dance_grpo", "x.json", "[]", "holds no prompts"),
        ("flow_grpo", "x.jsonl", '{"text": "a"}', "has no `prompt`"),
        ("flow_gpo", "x.txt", "a", "no format 'flow_gpo'"),
        ("dance_grpo", "x.json", '[{"caption": "a"}, {"caption": "\\u0000"}]', "out.jsonl:2: the prompt holds a NUL"),
    ],
)
def test_a_file_that_is_none_of_its_format_is_refused(kind: str, name: str, text: str, detail: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        imported(kind, write(tmp_path / name, text))
    assert detail in str(caught.value)
    assert not (tmp_path / "out.jsonl").exists()


def test_nothing_is_written_over(tmp_path: Path) -> None:
    file = write(tmp_path / "train.txt", "a\n")
    write(tmp_path / "out.jsonl", "mine")
    with pytest.raises(ConfigError, match="Cannot write"):
        imported("flow_grpo", file)
    assert (tmp_path / "out.jsonl").read_text() == "mine"
