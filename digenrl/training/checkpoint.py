"""Checkpoints: safetensors and JSON in a folder that is complete or not there at all.

    checkpoints/step-000123/{parameters,optimizer,ema}.safetensors  state.json  MANIFEST.json

Invariants: a folder appears under its name only when every byte of it is on the disk (written under a temporary name, the
manifest with sizes and digests last, fsync, rename), and older ones are deleted only after that; what is loaded is what
the manifest says, or an error that names the file; nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from digenrl.errors import ConfigError, RunFailed

FORMAT, VERSION = "digenrl-checkpoint", 1
MANIFEST, STATE = "MANIFEST.json", "state.json"
PARTS = ("parameters", "optimizer", "ema")
PREVIOUS = "previous"
"""Trained weights of the version before, only where trajectories made with them may still be trained on."""
_NAME = re.compile(r"step-(\d{6,})")

Weights = Mapping[str, Mapping[str, Tensor]]
"""Tensors by part (PARTS, and PREVIOUS where it is not empty) and name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One checkpoint in memory."""

    path: Path
    policy_version: int
    """Completed RL steps."""
    state: dict[str, Any]
    """Counters and the recipe, as JSON has them."""
    weights: dict[str, dict[str, Tensor]]
    """On the CPU, by part and name."""


def save_checkpoint(folder: Path, policy_version: int, weights: Weights, state: Mapping[str, Any], *, keep_last: int) -> Path:
    """Write one checkpoint into ``folder`` and delete all but the newest ``keep_last``.

    A whole checkpoint of the same version is kept as it is: the same version has the same weights. Raises RunFailed when it
    cannot be written (a full disk, a folder that is read-only); complete older ones are then untouched.
    """
    target = folder / f"step-{policy_version:06d}"
    if target.exists() and _is_whole(target):
        return target
    draft = folder / f"{target.name}.tmp-{uuid.uuid4().hex}"
    try:
        draft.mkdir(parents=True)
        for part in (*PARTS, *((PREVIOUS,) if weights.get(PREVIOUS) else ())):
            tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights[part].items()}
            save_file(tensors, draft / f"{part}.safetensors")
        (draft / STATE).write_text(json.dumps({**state, "policy_version": policy_version}, indent=1), encoding="utf-8")
        files = {path.name: _describe(path) for path in sorted(draft.iterdir())}
        manifest = {"format": FORMAT, "version": VERSION, "policy_version": policy_version, "files": files}
        (draft / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        for path in (*draft.iterdir(), draft):
            _flush(path)
        if target.exists():
            # Damaged, or it would have been kept: moved aside in one step, so that no moment has fewer whole checkpoints.
            target.replace(folder / f"{target.name}.tmp-{uuid.uuid4().hex}")
        draft.replace(target)
        for path in (folder, folder.parent):
            _flush(path)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise RunFailed(
            f"The checkpoint of version {policy_version} could not be written to {str(folder)!r}: {error}.",
            why="The disk may be full, or the folder read-only. Complete older checkpoints are untouched.",
            fix="Make room and continue with `digenrl train --resume RUN`.",
        ) from error
    _delete_old(folder, policy_version, keep_last)
    return target


def load_checkpoint(path: Path) -> Checkpoint:
    """Load and verify one checkpoint. Raises ConfigError naming the file that is missing, damaged or of a newer format."""
    manifest = _json(path / MANIFEST)
    if manifest.get("format") != FORMAT or not isinstance(manifest.get("files"), dict):
        raise _damaged(path / MANIFEST, "it is not the manifest of a DigenRL checkpoint")
    if manifest.get("version") != VERSION:
        raise ConfigError(
            f"{str(path / MANIFEST)!r} is of checkpoint format {manifest.get('version')}, and this DigenRL reads {VERSION}.",
            fix="Use the DigenRL that wrote it.",
        )
    parts = [*PARTS, *((PREVIOUS,) if f"{PREVIOUS}.safetensors" in manifest["files"] else ())]
    wanted = {STATE, *(f"{part}.safetensors" for part in parts)}
    for name in sorted(wanted):
        if manifest["files"].get(name) != _describe_or_none(path / name):
            raise _damaged(path / name, "its size or digest is not what the manifest says")
    state = _json(path / STATE)
    if state.get("policy_version") != manifest.get("policy_version"):
        raise _damaged(path / MANIFEST, "its policy version is not the one of state.json")
    weights = {part: _tensors(path / f"{part}.safetensors") for part in parts}
    return Checkpoint(path=path, policy_version=int(state["policy_version"]), state=state, weights=weights)


def has_checkpoint(folder: Path) -> bool:
    """Whether a checkpoint was ever completed in a run's ``checkpoints`` folder."""
    return bool(_complete(folder))


def load_newest(folder: Path) -> tuple[Checkpoint, tuple[str, ...]]:
    """The newest whole checkpoint of a run's ``checkpoints`` folder, and what is wrong with newer ones that were passed over.

    Raises ConfigError when there is none, naming the damaged file where there is one.
    """
    refused: list[ConfigError] = []
    for path in _complete(folder):
        try:
            return load_checkpoint(path), tuple(error.what for error in refused)
        except ConfigError as error:
            refused.append(error)
    if refused:
        raise refused[0]
    raise ConfigError(
        f"{str(folder)!r} holds no complete checkpoint.",
        why="A run writes one every train.save_freq steps and when it ends.",
        fix="Name the folder of a run that has one.",
    )


def _complete(folder: Path) -> list[Path]:
    """Checkpoints whose manifest, the last thing written, is there; the newest first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and (path / MANIFEST).is_file()]
    return sorted(found, key=_version, reverse=True)


def _is_whole(path: Path) -> bool:
    try:
        load_checkpoint(path)
    except ConfigError:
        return False
    return True


def _delete_old(folder: Path, policy_version: int, keep_last: int) -> None:
    """Delete all but ``keep_last`` checkpoints up to the one just written; later ones are damaged, or it would not be written."""
    later = [path for path in _complete(folder) if _version(path) > policy_version]
    earlier = [path for path in _complete(folder) if _version(path) <= policy_version]
    drafts = [path for path in folder.iterdir() if ".tmp-" in path.name]
    for path in (*later, *earlier[keep_last:], *drafts):
        shutil.rmtree(path, ignore_errors=True)


def _version(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _describe(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return {"size": path.stat().st_size, "sha256": digest.hexdigest()}


def _describe_or_none(path: Path) -> dict[str, Any] | None:
    try:
        return _describe(path)
    except OSError:
        return None


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _tensors(path: Path) -> dict[str, Tensor]:
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise _damaged(path, str(error)) from error
    return tensors


def _json(path: Path) -> dict[str, Any]:
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(plain, dict):
        raise _damaged(path, "it is not a JSON object")
    return plain


def _damaged(path: Path, detail: str) -> ConfigError:
    return ConfigError(
        f"{str(path)!r} is damaged: {detail}.",
        why="A checkpoint is used as a whole or not at all.",
        fix=f"Delete the folder {path.parent.name!r}, and the one before it is used.",
    )
