"""A recipe for a bare model: what a run's recipe.yaml would say, read from the JSON files of a folder or of the hub.

Invariants: no weight is read, and no code of the folder is run; what the files do not say is asked for, not guessed.
"""

from __future__ import annotations

import json
from typing import Any

from digenrl.config.builtin import PREFIX, resolve
from digenrl.config.families import FAMILIES
from digenrl.config.loader import recipe_from_plain
from digenrl.config.schema import Recipe
from digenrl.config.settings.models import SD3Settings
from digenrl.errors import ConfigError
from digenrl.models.loading import quiet_libraries


def recipe_of_model(source: str, *, height: int | None, width: int | None) -> Recipe:
    """The smallest recipe that draws with ``source``: a folder in diffusers' format, a hub id, or builtin:shapes.

    height, width: pixels; by default the size that the transformer was trained at. The reward and the training prompts are
    placeholders. Raises ConfigError when the model cannot be read or is of no family that DigenRL knows.
    """
    index = pipeline_config(source)
    family = family_of(source, index)
    default = (FAMILIES[family].default_size or _trained_size(source, index)) if height is None or width is None else None
    model: dict[str, Any] = {"type": family, "path": source}
    if family == "sd3" and not _is_present(index.get("text_encoder_3")):
        model["max_sequence_length"] = 0
    elif family == "sd3" and (limit := _shortest_text(source)) is not None:
        model["max_sequence_length"] = limit
    return recipe_from_plain(
        {
            "run": {"name": "model"},
            "model": model,
            "data": {"prompts": "builtin:shapes/train.jsonl"},
            "rollout": {
                "prompts_per_step": 1,
                "num_generations": 2,
                "num_inference_steps": 20,
                "height": default if height is None else height,
                "width": default if width is None else width,
            },
            "algorithm": {"type": "flow_grpo"},
            "rewards": [{"type": "jpeg"}],
            "train": {"steps": 0},
        }
    )


def pipeline_config(source: str) -> dict[str, Any]:
    """``model_index.json`` of a model. Raises ConfigError when it cannot be read."""
    from diffusers import DiffusionPipeline

    return _config(DiffusionPipeline, source)


def family_of(source: str, index: dict[str, Any]) -> str:
    """The ``model.type`` of a model whose ``model_index.json`` is ``index``."""
    pipeline = index.get("_class_name")
    families = {family.pipeline: name for name, family in FAMILIES.items()}
    if pipeline not in families:
        raise ConfigError(
            f"{source!r} holds a {pipeline}, a pipeline of no model family that DigenRL knows.",
            why=f"Known are: {', '.join(sorted(families))}.",
            fix="Name a model of one of these (`digenrl show model`).",
        )
    return families[str(pipeline)]


def _trained_size(source: str, index: dict[str, Any]) -> int:
    """Pixels per side: the transformer's latents times the VAE's factor."""
    transformer, vae = (_config(_diffusers_class(source, index, part), source, part) for part in ("transformer", "vae"))
    size, levels = transformer.get("sample_size"), vae.get("block_out_channels")
    if not isinstance(size, int) or not isinstance(levels, list | tuple) or not levels:
        raise ConfigError(
            f"{source!r} does not say which image size it was trained at.",
            why="The transformer's config has no sample_size, or the VAE's no block_out_channels.",
            fix="Give the size: --height 512 --width 512.",
        )
    return int(size * 2 ** (len(levels) - 1))


def _shortest_text(source: str) -> int | None:
    """Tokens that a local model's T5 tokenizer asks for, where these are less than the usual 256."""
    path = resolve(source, where="model") / "tokenizer_3" / "tokenizer_config.json"
    try:
        limit = json.loads(path.read_text(encoding="utf-8")).get("model_max_length")
    except (OSError, ValueError):  # on the hub, or not to be read: loading will tell
        return None
    return limit if isinstance(limit, int) and 0 < limit < SD3Settings().max_sequence_length else None


def _diffusers_class(source: str, index: dict[str, Any], component: str) -> Any:
    import diffusers

    entry = index.get(component)
    if not isinstance(entry, list | tuple) or len(entry) != 2 or entry[0] != "diffusers" or not hasattr(diffusers, str(entry[1])):
        raise ConfigError(
            f"{source!r}: model_index.json names no {component} of diffusers.",
            why=f"It says {entry!r}.",
            fix="Use a complete model folder, or install the diffusers version that it was made with.",
        )
    return getattr(diffusers, str(entry[1]))


def _config(config_class: Any, source: str, subfolder: str | None = None) -> dict[str, Any]:
    quiet_libraries()
    folder = resolve(source, where="model")
    place = str(folder) if folder.exists() else source
    try:
        # The hub's client wants a subfolder; in a local folder it is a part of the path.
        config = config_class.load_config(place, **({} if subfolder is None else {"subfolder": subfolder}))
    except Exception as error:  # diffusers and the hub's client each raise classes of their own
        file = "model_index.json" if subfolder is None else f"{subfolder}/config.json"
        kind = "folder" if folder.exists() or source.startswith(PREFIX) else "folder, and on the hub no model that can be read,"
        what = f"{source!r} has no readable {file}" if folder.exists() else f"There is no {kind} {source!r}"
        raise ConfigError(
            f"{what}: {next(iter(str(error).splitlines()), type(error).__name__)}",
            why="A model is a folder in diffusers' format, a hub id (owner/name; needs network access), or builtin:shapes.",
            fix="Check the name, or download the model first: hf download OWNER/NAME --local-dir FOLDER.",
        ) from error
    assert isinstance(config, dict), "load_config returns the file's JSON object"
    return config


def _is_present(entry: object) -> bool:
    return isinstance(entry, list | tuple) and len(entry) == 2 and entry[0] is not None
