"""Checkpoints: complete or not there, verified before use, never unpickled."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from digenrl.errors import ConfigError, RunFailed
from digenrl.training import checkpoint
from digenrl.training.checkpoint import load_checkpoint, load_newest, save_checkpoint
from digenrl.training.digest import digests


def weights(value: float = 1.0) -> dict[str, dict[str, torch.Tensor]]:
    return {
        "parameters": {"a": torch.full((3, 2), value), "b.c": torch.arange(5.0)},
        "optimizer": {"exp_avg.a": torch.full((3, 2), value / 2), "step.a": torch.tensor(3.0)},
        "ema": {"a": torch.full((3, 2), value / 3)},
    }


def save(folder: Path, version: int, **changes: Any) -> Path:
    options = {"keep_last": 2, **changes}
    return save_checkpoint(folder, version, weights(version + 1.0), {"note": f"é {version}"}, **options)


def test_what_was_saved_comes_back_bit_for_bit(tmp_path: Path) -> None:
    path = save(tmp_path, 7)
    found = load_checkpoint(path)
    assert path.name == "step-000007"
    assert found.policy_version == 7
    assert found.state["note"] == "é 7"
    assert digests(found.weights) == digests(weights(8.0))


def test_only_the_newest_checkpoints_are_kept_and_the_newest_is_loaded(tmp_path: Path) -> None:
    for version in (1, 2, 9, 10, 1_000_000):
        save(tmp_path, version)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000010", "step-1000000"]
    assert load_newest(tmp_path)[0].policy_version == 1_000_000


def test_a_whole_checkpoint_of_the_same_version_is_kept_and_a_damaged_one_replaced(tmp_path: Path) -> None:
    path = save(tmp_path, 3)
    before = (path / "MANIFEST.json").stat().st_ino
    save(tmp_path, 3)
    assert (path / "MANIFEST.json").stat().st_ino == before
    (path / "ema.safetensors").write_bytes(b"")
    save(tmp_path, 3)
    assert load_checkpoint(path).policy_version == 3
    assert [p.name for p in tmp_path.iterdir()] == ["step-000003"]


def test_without_a_checkpoint_the_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no complete checkpoint"):
        load_newest(tmp_path / "missing")


def test_every_flipped_bit_and_every_truncation_is_refused_naming_the_file(tmp_path: Path) -> None:
    whole = save(tmp_path / "whole", 5)
    draw = random.Random(11)
    for attempt in range(200):
        copy = tmp_path / "copy" / whole.name
        shutil.copytree(whole, copy)
        path = draw.choice(sorted(copy.iterdir()))
        content = bytearray(path.read_bytes())
        if attempt % 4 == 0:
            content = content[: draw.randrange(len(content))]
        else:
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="step-000005") as caught:
            load_checkpoint(copy)
        assert path.name in caught.value.what or path.name == "MANIFEST.json", (path.name, caught.value.what)
        shutil.rmtree(tmp_path / "copy")


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(tmp_path: Path) -> None:
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    with (newest / "optimizer.safetensors").open("r+b") as file:
        file.truncate(20)
    found, refused = load_newest(tmp_path)
    assert found.policy_version == 1
    assert len(refused) == 1
    assert "step-000002/optimizer.safetensors" in refused[0]


def test_the_checkpoint_just_written_is_never_the_one_that_is_deleted(tmp_path: Path) -> None:
    save(tmp_path, 4)
    damaged = save(tmp_path, 6)
    (damaged / "ema.safetensors").write_bytes(b"")
    save(tmp_path, 5, keep_last=1)
    assert load_newest(tmp_path)[0].policy_version == 5


def test_a_newer_format_is_refused_by_name(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    manifest = json.loads((path / "MANIFEST.json").read_text())
    (path / "MANIFEST.json").write_text(json.dumps({**manifest, "version": 2}))
    with pytest.raises(ConfigError, match="of checkpoint format 2"):
        load_checkpoint(path)


@pytest.mark.parametrize("part", ["parameters", "ema", "state", "manifest", "rename"])
def test_a_disk_that_fills_up_leaves_the_older_checkpoint_loadable(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    full = OSError(errno.ENOSPC, "No space left on device")
    real_save, real_write, real_replace = checkpoint.save_file, Path.write_text, Path.replace

    def save_file(tensors: Any, path: Path) -> None:
        if path.stem == part:
            path.write_bytes(b"half")
            raise full
        real_save(tensors, path)

    def write_text(self: Path, *args: Any, **kwargs: Any) -> int:
        if part in self.name.lower():
            raise full
        return real_write(self, *args, **kwargs)

    def replace(self: Path, target: Path) -> Path:
        if part == "rename":
            raise full
        return real_replace(self, target)

    monkeypatch.setattr(checkpoint, "save_file", save_file)
    monkeypatch.setattr(Path, "write_text", write_text)
    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(RunFailed, match="No space left"):
        save(tmp_path, 2)
    monkeypatch.undo()
    assert load_newest(tmp_path)[0].policy_version == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"], "nothing half-written stays"


def test_a_read_only_folder_is_said_to_be_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    real_mkdir = Path.mkdir

    def mkdir(self: Path, *args: Any, **kwargs: Any) -> None:  # as root, who may write anywhere, is refused too
        if ".tmp-" in self.name:
            raise OSError(errno.EROFS, "Read-only file system")
        real_mkdir(self, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with pytest.raises(RunFailed, match="Read-only file system"):
        save(tmp_path, 2)
    assert load_newest(tmp_path)[0].policy_version == 1


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (os.environ["DIGENRL_TEST_MARKER"],))


@pytest.mark.parametrize("name", ["parameters.safetensors", "state.json", "MANIFEST.json"])
def test_a_pickle_in_place_of_a_file_never_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pickle

    marker = tmp_path / "ran"
    monkeypatch.setenv("DIGENRL_TEST_MARKER", str(marker))
    path = save(tmp_path / "run", 1)
    (path / name).write_bytes(pickle.dumps(Bomb()))
    if name != "MANIFEST.json":  # an attacker who can write the folder can write a fitting manifest
        manifest = json.loads((path / "MANIFEST.json").read_text())
        manifest["files"][name] = checkpoint._describe(path / name)
        (path / "MANIFEST.json").write_text(json.dumps(manifest))
    with pytest.raises(ConfigError):
        load_checkpoint(path)
    assert not marker.exists()


def test_the_package_runs_no_pickle_anywhere() -> None:
    package = Path(checkpoint.__file__).parents[1]
    published = package / "rewards" / "neural.py"  # of rewards that are published as .pt alone, tensors and nothing else
    forbidden = ("pickle.load", "weights_only=False", "yaml.load(", "yaml.unsafe_load", "allow_pickle=True", "torch.load(")
    texts = {path: path.read_text() for path in package.rglob("*.py")}
    texts[published] = texts[published].replace('torch.load(file, map_location="cpu", weights_only=True)', "")
    assert [f"{path.name}: {word}" for path, text in texts.items() for word in forbidden if word in text] == []
