"""Loading a diffusers pipeline from a folder or the hub, quietly and with errors that say what to do.

Invariants: only safetensors are read, for a pickled weight file can run code; no weight is ever made up where a file lacks
it (diffusers and transformers only log that); no weight of a component that is not wanted is read, and the sizes that the
pipeline derives from such a component's config are the same as with it; no global random state is changed.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from digenrl.config.builtin import resolve
from digenrl.errors import ConfigError

_SMALLEST_VOCABULARY = 16


def quiet_libraries() -> None:
    """No progress bars and no notes of diffusers and transformers: our own checks say what matters."""
    import diffusers
    import transformers

    for library in (diffusers, transformers):
        library.utils.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()
    # Norms of float32 weights under autocast, as full fine-tuning in bfloat16 has them, and torch would tell once a process.
    warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")


@dataclass(frozen=True, slots=True)
class ConfigOnly:
    """In the place of one of diffusers' models that is not loaded: what a pipeline asks for besides running it."""

    config: Any
    """Mapping with the keys as attributes too, as a loaded model has it."""

    def __getattr__(self, name: str) -> Any:
        """What some models repeat of their config as attributes of their own, and their pipelines read there."""
        if name != "config" and name in self.config:
            return self.config[name]
        raise AttributeError(f"{name!r} is not in the config of a model that is not loaded")


def load_pipeline(pipeline_class: Any, path: str, *, absent: tuple[str, ...], without: Collection[str] = ()) -> Any:
    """Load a pipeline in float32. ``absent``: components that the folder leaves out, which diffusers wants named.

    ``without``: components that the folder has and this process does not want. A model of diffusers' becomes a ConfigOnly,
    a text encoder or a tokenizer None. Raises ConfigError when a component cannot be read or lacks weights.
    """
    quiet_libraries()
    folder = resolve(path, where="model.path")
    source = str(folder) if folder.exists() else path
    try:
        with torch.random.fork_rng(devices=[]):
            named = _named_components(pipeline_class.load_config(source))
            unwanted = {name: entry for name, entry in named.items() if name in without}
            configs = {name: _config_only(source, name, entry) for name, entry in unwanted.items() if entry[0] != "transformers"}
            encoders = _text_encoders({name: entry for name, entry in named.items() if name not in without}, source)
            nothing = dict.fromkeys((*absent, *unwanted))
            pipeline = pipeline_class.from_pretrained(source, use_safetensors=True, **encoders, **nothing)
            if configs:
                # Made again, for a pipeline derives sizes from its components and guesses where it has none: a factor of 8
                # for the VAE. from_pretrained itself would not take a ConfigOnly.
                made_with = {name: value for name, value in pipeline.config.items() if not name.startswith("_")}
                pipeline = pipeline_class(**(made_with | pipeline.components | configs))
    except ConfigError:
        raise
    except Exception as error:  # safetensors, tokenizers and the hub's client each raise classes of their own
        raise ConfigError(
            f"model.path: {path!r} could not be loaded as a {pipeline_class.__name__}: {_first_line(error)}",
            why="A folder must hold all of the pipeline's components as safetensors; a hub id needs network access.",
            fix="Check the folder, or download the model first: hf download OWNER/NAME --local-dir FOLDER.",
        ) from error
    for name, component in pipeline.components.items():
        if isinstance(component, nn.Module):
            _refuse_missing(name, [key for key, tensor in component.state_dict().items() if tensor.is_meta])
        elif name.startswith("tokenizer") and component is not None and len(component) < _SMALLEST_VOCABULARY:
            raise ConfigError(
                f"model.path: {name} knows {len(component)} tokens; its vocabulary file is missing.",
                why="transformers then makes an empty vocabulary, and every prompt looks the same to the model.",
                fix=f"Copy the folder {name}/ of the original model there.",
            )
    return pipeline


def own_memory(module: nn.Module) -> None:
    """Give every parameter fresh, aligned memory.

    Memory-mapped safetensors sit at odd addresses, which changes the last bits of matrix products; so do weights that
    came another way (a sync, a checkpoint). Fresh memory makes results independent of how the weights arrived.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = tensor.data.clone()


def _named_components(index: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Library and class of every component that ``model_index.json`` names, but for those that are null there."""
    pairs = {name: entry for name, entry in index.items() if isinstance(entry, list | tuple) and len(entry) == 2}
    return {name: (library, class_name) for name, (library, class_name) in pairs.items() if library is not None}


def _config_only(source: str, name: str, entry: tuple[str, str]) -> ConfigOnly:
    """The config that the component would have, had it been loaded."""
    import diffusers
    from diffusers.configuration_utils import FrozenDict

    model_class: Any = getattr(diffusers, entry[1])
    parameters = inspect.signature(model_class.__init__).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}  # the file may be older than a parameter
    return ConfigOnly(FrozenDict(defaults | model_class.load_config(source, subfolder=name)))


def _text_encoders(components: Mapping[str, tuple[str, str]], source: str) -> dict[str, nn.Module]:
    """The transformers models of a pipeline. Loaded here because only so transformers tells which weights it made up."""
    import transformers

    encoders: dict[str, nn.Module] = {}
    for name, (library, class_name) in components.items():
        if library != "transformers":
            continue
        model_class: Any = getattr(transformers, class_name, None)
        is_model = isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)
        if is_model:
            # A folder is named in full, so that an error names the component; on the hub it is a part of the repository.
            place, part = (str(Path(source) / name), "") if Path(source).exists() else (source, name)
            encoders[name], info = model_class.from_pretrained(
                place, subfolder=part, dtype=torch.float32, use_safetensors=True, output_loading_info=True
            )
            _refuse_missing(name, sorted(info["missing_keys"]))
    return encoders


def _refuse_missing(component: str, missing: list[str]) -> None:
    if missing:
        raise ConfigError(
            f"model.path: {component} lacks {len(missing)} of its weights, for example {missing[0]}.",
            why="They would be random, and the model would not be the one that was meant.",
            fix=f"Copy the folder {component}/ of the original model there, or merge adapters into the weights before saving.",
        )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
