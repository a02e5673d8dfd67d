"""What a model folder in diffusers' format holds, read from its JSON files alone: no torch, no weights.

So that a missing component or an image size that the model cannot draw is found in a second, before anything is loaded.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from digenrl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """The components that ``model_index.json`` names; absent ones (null there) are left out."""

    path: Path
    components: tuple[str, ...]
    """Present components, for example transformer, vae, scheduler, text_encoder."""
    absent: tuple[str, ...]
    """Components that the pipeline has a place for and the folder leaves out."""
    vae_scale_factor: int
    """Pixels per latent, per side."""
    patch_size: int
    """Latents per image token, per side."""
    positions: int | None
    """Image tokens that the transformer knows per side; None where it has no such limit."""

    @property
    def pixel_multiple(self) -> int:
        """Height and width must be multiples of this."""
        return self.vae_scale_factor * self.patch_size


def inspect_model_folder(path: Path, *, pipeline: str, required: tuple[str, ...]) -> ModelFolder:
    """Read ``model_index.json`` and the configs beside it.

    Raises ConfigError when the folder is missing, belongs to another pipeline, or lacks one of ``required``.
    """
    if not os.path.isdir(path):  # unlike Path.is_dir, False for every path that cannot exist, too
        raise ConfigError(
            f"model.path: there is no folder {str(path)!r}.",
            why="A path of this form is taken as a local folder; a hub id looks like owner/name.",
            fix="Give a folder in diffusers' format (it has a model_index.json), a hub id, or builtin:shapes.",
        )
    index = _read_json(path / "model_index.json")
    found = index.get("_class_name")
    if found != pipeline:
        raise ConfigError(
            f"model.path: {str(path)!r} holds a {found}, and model.type needs a {pipeline}.",
            fix="Choose the model.type of that family, or another folder.",
        )
    named = {k: v for k, v in index.items() if isinstance(v, list) and v and not k.startswith("_")}
    present = tuple(k for k, v in named.items() if v[0] is not None)
    absent = tuple(k for k, v in named.items() if v[0] is None)
    for component in (*required, *present):
        if component not in present or not (path / component).is_dir():
            raise ConfigError(
                f"model.path: {str(path)!r} has no component {component!r}.",
                why=f"The pipeline needs {', '.join(required)}, and model_index.json must match the folders beside it.",
                fix=f"Copy the folder {component}/ of the original model there, or download the model again.",
            )
    vae, transformer = path / "vae" / "config.json", path / "transformer" / "config.json"
    levels = _read_json(vae).get("block_out_channels", [0] * 4)
    config = _read_json(transformer)
    patch_size, positions = config.get("patch_size", 1), config.get("pos_embed_max_size")
    if not isinstance(levels, list) or not levels:
        raise _damaged(vae, f"block_out_channels is {levels!r}, not a list of channels")
    if not isinstance(patch_size, int) or patch_size < 1:
        raise _damaged(transformer, f"patch_size is {patch_size!r}, not a positive number")
    if positions is not None and (not isinstance(positions, int) or positions < 1):
        raise _damaged(transformer, f"pos_embed_max_size is {positions!r}, not a positive number")
    return ModelFolder(
        path=path,
        components=present,
        absent=absent,
        vae_scale_factor=2 ** (len(levels) - 1),
        patch_size=patch_size,
        positions=positions,
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(
            f"model.path: {str(path.parent)!r} has no {path.name}.",
            why="A model folder in diffusers' format has one.",
            fix="Check model.path, or download the model again.",
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(content, dict):
        raise _damaged(path, "it is not a JSON object")
    return content


def _damaged(path: Path, what: str) -> ConfigError:
    return ConfigError(f"model.path: {str(path)!r} cannot be used: {what}.", fix="Download the model again.")
