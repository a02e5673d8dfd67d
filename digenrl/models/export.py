"""Trained weights in the formats that diffusers and peft read: an adapter file, or a whole pipeline.

Invariants: what diffusers loads back computes what the trainer's network computes, alpha included (raw peft keys would load
without an error and without an effect, and a file without its header with the wrong alpha); safetensors alone are written;
no path of this machine is written along.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from digenrl.config.schema import Recipe
from digenrl.models.loading import load_pipeline

LORA_FILE = "pytorch_lora_weights.safetensors"
_PEFT_PREFIX = "base_model.model."
"""What peft puts before the names of the modules that it wraps."""


def export_lora(transformer: nn.Module, pipeline_class: Any, folder: Path, *, base: str) -> None:
    """Write the adapters for ``load_lora_weights``, and beside them peft's own adapter_config.json and adapter_model file.

    ``base``: name of the base model, for peft's config.
    """
    from peft import get_peft_model_state_dict

    network: Any = transformer
    config = copy.copy(network.peft_config["default"])
    config.base_model_name_or_path = base
    config.inference_mode = True
    config.target_modules = sorted(config.target_modules)
    layers = {name: _plain(tensor) for name, tensor in get_peft_model_state_dict(network).items()}
    # The header is diffusers' own _collate_lora_metadata; without it the loader takes the rank for alpha.
    pipeline_class.save_lora_weights(
        str(folder),
        transformer_lora_layers=dict(layers),
        transformer_lora_adapter_metadata=config.to_dict(),
        weight_name=LORA_FILE,
    )
    config.save_pretrained(str(folder))
    peft_layers = {f"{_PEFT_PREFIX}{name}": tensor for name, tensor in layers.items()}
    save_file(peft_layers, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def export_pipeline(
    transformer: nn.Module, pipeline_class: Any, folder: Path, *, recipe: Recipe, absent: tuple[str, ...]
) -> None:
    """Write the base model's pipeline with this transformer, in float32, for ``from_pretrained``.

    ``absent``: components that the base leaves out. The sigma shift of the recipe, where it has one, goes into the scheduler.
    """
    pipeline = load_pipeline(pipeline_class, recipe.model.path, absent=absent)
    pipeline.register_modules(transformer=transformer.cpu())
    shift = flow_shift(recipe)
    if shift is not None:
        scheduler = pipeline.scheduler
        # UniPC, which Wan's folders name, has a word of its own for it.
        changes = {"flow_shift": shift} if "flow_shift" in scheduler.config else {"shift": shift, "use_dynamic_shifting": False}
        pipeline.register_modules(scheduler=scheduler.from_config(scheduler.config, **changes))
    for component in pipeline.components.values():
        if isinstance(component, nn.Module):
            component.to(torch.float32)
    pipeline.save_pretrained(str(folder), safe_serialization=True)
    for path in folder.rglob("*.json"):
        _forget_origin(path)


def flow_shift(recipe: Recipe) -> float | None:
    """``model.flow_shift`` where the family has that key and the recipe sets it."""
    value = recipe.model.settings.model_dump().get("flow_shift")
    return None if value is None else float(value)


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float32).contiguous().clone()


def _forget_origin(path: Path) -> None:
    """Drop ``_name_or_path``, in which diffusers keeps the folder that a component was loaded from."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(content, dict) and content.pop("_name_or_path", None) is not None:
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
