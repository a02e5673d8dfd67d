"""Loading a diffusers pipeline from a folder or the hub, quietly and with errors that say what to do."""

from __future__ import annotations

from typing import Any

from torch import nn

from digenrl.config.builtin import resolve
from digenrl.errors import ConfigError


def load_pipeline(pipeline_class: Any, path: str, *, absent: tuple[str, ...]) -> Any:
    """Load a pipeline in float32. ``absent``: components that the folder leaves out, which diffusers wants named."""
    import diffusers
    import transformers

    for library in (diffusers, transformers):
        library.utils.logging.set_verbosity_error()
        library.utils.logging.disable_progress_bar()
    folder = resolve(path, where="model.path")
    try:
        # Only safetensors: a pickled weight file could run code.
        return pipeline_class.from_pretrained(
            str(folder) if folder.exists() else path, use_safetensors=True, **dict.fromkeys(absent)
        )
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise ConfigError(
            f"model.path: {path!r} could not be loaded as a {pipeline_class.__name__}: {str(error).splitlines()[0]}",
            why="A folder must hold all of the pipeline's components as safetensors; a hub id needs network access.",
            fix="Check the folder, or download the model first: huggingface-cli download OWNER/NAME --local-dir FOLDER.",
        ) from error


def own_memory(module: nn.Module) -> None:
    """Give every parameter fresh, aligned memory.

    Memory-mapped safetensors sit at odd addresses, which changes the last bits of matrix products; so do weights that
    came another way (a sync, a checkpoint). Fresh memory makes results independent of how the weights arrived.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = tensor.data.clone()
