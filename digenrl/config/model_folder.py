"""What a model folder in diffusers' format holds, read from its JSON files alone: no torch, no weights.

So that a missing component or an image size that the model cannot draw is found in a second, before anything is loaded.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from digenrl.config.families import Family
from digenrl.config.model_fit import check_fit
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
    vae_temporal_factor: int
    """Frames per latent frame after the first; 1 for VAEs of images."""
    patch_size: int
    """Latents per image token, per side."""
    positions: int | None
    """Image tokens that the transformer knows per side; None where it has no such limit."""
    guidance_embeds: bool
    """Whether the transformer is distilled for guidance."""
    shift_terminal: float | None
    """Sigma that the noise scheduler stretches its schedule to end at, before 0."""

    @property
    def pixel_multiple(self) -> int:
        """Height and width must be multiples of this."""
        return self.vae_scale_factor * self.patch_size


_TEMPORAL_FACTORS = {  # by class of the VAE: the key, 4 where an older folder does not say
    "AutoencoderKLWan": "scale_factor_temporal",
    "AutoencoderKLHunyuanVideo": "temporal_compression_ratio",
}


def inspect_model_folder(path: Path, family: Family) -> ModelFolder:
    """Read ``model_index.json`` and the configs beside it.

    Raises ConfigError when the folder is missing, belongs to another pipeline, lacks a component that the family needs, or
    holds components that do not fit one another.
    """
    pipeline, required = family.pipeline, family.required
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
    vae_config, config = _read_json(vae), _read_json(transformer)
    positions = config.get("pos_embed_max_size")
    if positions is not None and (not isinstance(positions, int) or positions < 1):
        raise _damaged(transformer, f"pos_embed_max_size is {positions!r}, not a positive number")

    def text_encoder(name: str) -> dict[str, Any] | None:
        return _read_json(path / name / "config.json") if name in present else None

    check_fit(config, vae_config, text_encoder, family)
    return ModelFolder(
        path=path,
        components=present,
        absent=absent,
        vae_scale_factor=_scale_factor(vae, vae_config),
        vae_temporal_factor=_temporal_factor(vae, vae_config),
        patch_size=family.packing if family.packing > 1 else _patch_size(transformer, config),
        positions=positions,
        guidance_embeds=bool(config.get("guidance_embeds", family.guidance_embeds)),
        shift_terminal=_read_json(path / "scheduler" / "scheduler_config.json").get("shift_terminal"),
    )


def _scale_factor(file: Path, vae: dict[str, Any]) -> int:
    """Pixels per latent: as many halvings as the VAE has levels beside the first, or as it lists (causal video VAEs)."""
    if "temperal_downsample" in vae:
        halvings = vae["temperal_downsample"]
        if not isinstance(halvings, list):
            raise _damaged(file, f"temperal_downsample is {halvings!r}, not a list")
        return int(2 ** len(halvings))
    levels = vae.get("block_out_channels", [0] * 4)
    if not isinstance(levels, list) or not levels:
        raise _damaged(file, f"block_out_channels is {levels!r}, not a list of channels")
    return int(2 ** (len(levels) - 1))


def _patch_size(file: Path, transformer: dict[str, Any]) -> int:
    """Latents per side in one patch; the last of several sizes is the width's."""
    found = transformer.get("patch_size", 1)
    size = found[-1] if isinstance(found, list) and found else found
    if not isinstance(size, int) or size < 1:
        raise _damaged(file, f"patch_size is {found!r}, not a positive number")
    return size


def _temporal_factor(file: Path, vae: dict[str, Any]) -> int:
    """Frames per latent frame."""
    key = _TEMPORAL_FACTORS.get(str(vae.get("_class_name")))
    factor = 1 if key is None else vae.get(key, 4)
    if not isinstance(factor, int) or factor < 1:
        raise _damaged(file, f"{key} is {factor!r}, not a positive number")
    return factor


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
