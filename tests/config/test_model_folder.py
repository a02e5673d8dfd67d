"""What can be known of a model folder from its JSON files alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from digenrl.config.builtin import resolve
from digenrl.config.families import Family
from digenrl.config.model_folder import ModelFolder, inspect_model_folder
from digenrl.errors import ConfigError

PIPELINE = "StableDiffusion3Pipeline"
REQUIRED = ("transformer", "vae", "scheduler")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder as diffusers writes it, without weights."""
    index = {
        "_class_name": PIPELINE,
        "_diffusers_version": "0.42",
        "transformer": ["diffusers", "SD3Transformer2DModel"],
        "vae": ["diffusers", "AutoencoderKL"],
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "CLIPTextModelWithProjection"],
        "text_encoder_3": [None, None],
        "_ignored": ["a", "b"],
        "force_zeros": True,
    }
    for name in ("transformer", "vae", "scheduler", "text_encoder"):
        (tmp_path / name).mkdir()
    write(tmp_path / "scheduler" / "scheduler_config.json", {})
    write(tmp_path / "model_index.json", index)
    write(tmp_path / "vae" / "config.json", {"block_out_channels": [4, 8, 16]})
    write(tmp_path / "transformer" / "config.json", {"patch_size": 2})
    return tmp_path


def write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def change(path: Path, edit: Callable[[Any], object]) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    edit(content)
    write(path, content)


def inspect(path: Path) -> ModelFolder:
    return inspect_model_folder(path, Family(pipeline=PIPELINE, required=REQUIRED))


def refused(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        inspect(path)
    assert caught.value.what.startswith("model.path: ")
    assert caught.value.fix
    return caught.value.what


def test_a_folder_is_known_by_its_json_files(folder: Path) -> None:
    found = inspect(folder)
    assert found.components == ("transformer", "vae", "scheduler", "text_encoder")
    assert found.absent == ("text_encoder_3",)
    assert (found.vae_scale_factor, found.patch_size, found.pixel_multiple) == (4, 2, 8)


def test_the_shipped_model_is_whole() -> None:
    found = inspect(resolve("builtin:shapes", where="model.path"))
    assert set(REQUIRED) < set(found.components)
    assert {"text_encoder_3", "tokenizer_3"} < set(found.components)


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    assert "there is no folder" in refused(tmp_path / "nothing")


def test_a_file_is_no_folder(folder: Path) -> None:
    assert "there is no folder" in refused(folder / "model_index.json")


def test_a_folder_without_an_index_is_refused(tmp_path: Path) -> None:
    assert "has no model_index.json" in refused(tmp_path)


@pytest.mark.parametrize("name", ["FluxPipeline", None])
def test_another_pipeline_is_refused_by_name(folder: Path, name: str | None) -> None:
    change(folder / "model_index.json", lambda index: index.update(_class_name=name))
    what = refused(folder)
    assert f"holds a {name}, and model.type needs a {PIPELINE}" in what


@pytest.mark.parametrize("component", ["transformer", "vae", "scheduler", "text_encoder"])
def test_a_component_whose_folder_is_missing_is_refused(folder: Path, component: str) -> None:
    for file in (folder / component).iterdir():
        file.unlink()
    (folder / component).rmdir()
    assert f"has no component {component!r}" in refused(folder)


@pytest.mark.parametrize("component", REQUIRED)
def test_a_needed_component_cannot_be_left_out(folder: Path, component: str) -> None:
    change(folder / "model_index.json", lambda index: index.update({component: [None, None]}))
    assert f"has no component {component!r}" in refused(folder)
    change(folder / "model_index.json", lambda index: index.pop(component))
    assert f"has no component {component!r}" in refused(folder)


@pytest.mark.parametrize("component", ["vae", "transformer"])
def test_a_component_without_its_config_is_refused(folder: Path, component: str) -> None:
    (folder / component / "config.json").unlink()
    assert f"{component}' has no config.json" in refused(folder)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "cannot be used"),
        (b"{", "cannot be used"),
        (b"\xff\xfe", "cannot be used"),
        (b"[" * 100_000, "cannot be used"),
        (b"[1]", "it is not a JSON object"),
        (b"null", "it is not a JSON object"),
    ],
)
@pytest.mark.parametrize("file", ["model_index.json", "vae/config.json", "transformer/config.json"])
def test_a_damaged_json_file_is_named(folder: Path, file: str, content: bytes, says: str) -> None:
    (folder / file).write_bytes(content)
    what = refused(folder)
    assert file.rpartition("/")[2] in what
    assert says in what


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("vae/config.json", "block_out_channels", 4),
        ("vae/config.json", "block_out_channels", []),
        ("transformer/config.json", "patch_size", 0),
        ("transformer/config.json", "patch_size", "2"),
        ("transformer/config.json", "patch_size", None),
    ],
)
def test_a_config_from_which_no_size_follows_is_refused(folder: Path, file: str, key: str, value: object) -> None:
    change(folder / file, lambda config: config.update({key: value}))
    assert f"{key} is {value!r}" in refused(folder)


def test_sizes_that_a_config_leaves_out_are_diffusers_defaults(folder: Path) -> None:
    write(folder / "vae" / "config.json", {})
    write(folder / "transformer" / "config.json", {})
    assert inspect(folder).pixel_multiple == 8


def test_an_index_with_an_empty_entry_is_no_crash(folder: Path) -> None:
    change(folder / "model_index.json", lambda index: index.update(safety_checker=[]))
    assert "safety_checker" not in inspect(folder).components


def test_paths_are_relative_to_the_working_directory_or_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("a/b.txt", where="x") == Path("a/b.txt")
    assert resolve("~/b.txt", where="x") == tmp_path / "b.txt"
    assert resolve("builtin:shapes/train.jsonl", where="x").is_file()
    with pytest.raises(ConfigError, match=r"data\.prompts: 'builtin:nothing\.txt' is not shipped"):
        resolve("builtin:nothing.txt", where="data.prompts")
