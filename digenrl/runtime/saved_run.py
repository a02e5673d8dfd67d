"""A run folder or a bare model, opened as one thing: a policy with the weights that were asked for, and its settings.

Invariants: averaged weights where the run has them, unless raw ones are asked for, and what was taken is said; weights come
from a checkpoint that is whole, or not at all; nothing in the source is written to or unpickled.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from digenrl.config.builtin import PREFIX
from digenrl.config.checks import looks_like_hub_id
from digenrl.config.loader import load_recipe, recipe_from_plain
from digenrl.config.registry import component_class
from digenrl.config.schema import EvalSection, Recipe
from digenrl.config.text import expand_home
from digenrl.errors import ConfigError
from digenrl.models.base import ModelAdapter
from digenrl.runtime.build import choose_device
from digenrl.runtime.model_recipe import family_of, pipeline_config, recipe_of_model
from digenrl.training.checkpoint import Checkpoint, load_newest
from digenrl.training.policy import Policy

WeightsChoice = Literal["ema", "raw"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenOptions:
    """What may be changed when something is opened; None keeps what its recipe says."""

    weights: WeightsChoice | None = None
    """None: averaged ones where the run has them."""
    judge: Recipe | None = None
    """Recipe whose rewards and eval settings are used; of a bare model it gives the size and the family's keys, too."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """New values by dotted key of the recipe, such as ``eval.seed`` or ``rollout.height``; None changes nothing."""
    device: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedModel:
    """What was found, before anything large is loaded."""

    source: str
    """As the user named it."""
    run: Path | None
    """The run's folder; None for a bare model."""
    recipe: Recipe
    """With the changes, and always with an eval section."""
    held_out: str | None
    """Prompt file to evaluate on; None where no recipe names one."""
    weights: Literal["ema", "raw", "base"]
    policy_version: int
    tensors: Mapping[str, Tensor] | None
    """Trained weights by name; None for a bare model."""
    device: torch.device
    warnings: tuple[str, ...]
    """Damaged newer checkpoints that were passed over."""

    @property
    def name(self) -> str:
        """For files and titles: the last part of the path."""
        return Path(os.path.abspath(self.source)).name.removeprefix(PREFIX)

    @property
    def section(self) -> EvalSection:
        """How to sample."""
        assert self.recipe.eval is not None, "find_model gives every recipe an eval section"
        return self.recipe.eval

    @property
    def description(self) -> str:
        """In words, for the console and captions."""
        kinds = {"ema": "averaged weights", "raw": "raw weights", "base": "as published"}
        version = "" if self.run is None else f", version {self.policy_version}"
        return f"{self.source}{version}, {kinds[self.weights]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedModel:
    """A saved model in memory, ready to draw."""

    saved: SavedModel
    policy: Policy

    @property
    def recipe(self) -> Recipe:
        """See SavedModel.recipe."""
        return self.saved.recipe

    @property
    def adapter(self) -> ModelAdapter:
        """The loaded model."""
        return self.policy.adapter


def open_model(source: str, options: OpenOptions | None = None) -> OpenedModel:
    """Find and load a run folder, a model folder, a hub id or builtin:shapes. Raises ConfigError naming what is missing."""
    return load_model(find_model(source, options))


def find_model(source: str, options: OpenOptions | None = None) -> SavedModel:
    """Read the recipe and the newest whole checkpoint of a run, or the configs of a bare model; the model is not loaded."""
    options = options or OpenOptions()
    if not is_run(source):
        return _found_model(source, options)
    folder = expand_home(source, where="run")
    recipe = load_recipe(folder / "recipe.yaml")
    checkpoint, refused = load_newest(folder / "checkpoints")
    weights, tensors = _choose(checkpoint, options.weights, source)
    if options.judge is not None:
        judge = options.judge
        recipe = recipe.model_copy(update={"rewards": judge.rewards, "eval": judge.eval})
    return SavedModel(
        source=source,
        run=folder,
        recipe=_changed(recipe, options),
        held_out=options.changes.get("eval.prompts") or (recipe.eval.prompts if recipe.eval else None),
        weights=weights,
        policy_version=checkpoint.policy_version,
        tensors=tensors,
        device=_device(recipe, options.device),
        warnings=refused,
    )


def load_model(saved: SavedModel) -> OpenedModel:
    """Load the base model and put the trained weights into it."""
    recipe = saved.recipe
    # As in training, so that an evaluation here gives the numbers of the evaluation there.
    torch.set_num_threads(recipe.run.threads_per_worker)
    torch.use_deterministic_algorithms(recipe.train.deterministic)
    adapter = component_class("model", recipe.model.type, where="model.type").load(recipe, saved.device)
    policy = Policy(adapter, recipe, needs_reference=False)
    if saved.tensors is not None:
        policy.load(saved.tensors, source=f"The newest checkpoint of {saved.source!r}")
    policy.version = saved.policy_version
    return OpenedModel(saved=saved, policy=policy)


def is_run(source: str) -> bool:
    """Whether ``source`` is a run's folder rather than a model. Raises ConfigError when it is neither."""
    if source.startswith(PREFIX):
        return False
    folder = expand_home(source, where="run or model")
    if not os.path.isdir(folder):  # unlike Path.is_dir, False for every path that cannot exist, too
        if looks_like_hub_id(source) and not os.path.exists(folder):
            return False
        raise _neither(source, "it is not a folder" if os.path.exists(folder) else "there is no such folder")
    if (folder / "model_index.json").is_file():
        return False
    if (folder / "recipe.yaml").is_file():
        return True
    if (folder / "checkpoints").is_dir() or (folder / "metrics.jsonl").is_file():
        raise _neither(source, "it looks like a run, and its recipe.yaml is missing")
    if (folder / "pytorch_lora_weights.safetensors").is_file():
        raise _neither(source, "it is an exported adapter; name the run that it came from, or load it with diffusers")
    raise _neither(source, "it has no recipe.yaml and no model_index.json")


def _neither(source: str, detail: str) -> ConfigError:
    return ConfigError(
        f"{source!r} is neither a run nor a model: {detail}.",
        why="A run has recipe.yaml and checkpoints/, a model in diffusers' format model_index.json.",
        fix="Name the folder of a run, a model's folder, a hub id (owner/name), or builtin:shapes.",
    )


def _found_model(source: str, options: OpenOptions) -> SavedModel:
    if options.weights == "ema":
        raise ConfigError(
            f"{source!r} is a model, and only a run has averaged weights.", fix="Leave --weights out, or name the run's folder."
        )
    if options.judge is None:
        sizes = {side: options.changes.get(f"rollout.{side}") for side in ("height", "width")}
        recipe = recipe_of_model(source, **sizes)
    else:
        recipe = _judged(source, options.judge)
    held_out = options.changes.get("eval.prompts") or (recipe.eval.prompts if recipe.eval else None)
    return SavedModel(
        source=source,
        run=None,
        recipe=_changed(recipe, options),
        held_out=held_out,
        weights="base",
        policy_version=0,
        tensors=None,
        device=_device(recipe, options.device),
        warnings=(),
    )


def _judged(source: str, judge: Recipe) -> Recipe:
    """A recipe with another model in it, as it is, without adapters."""
    family = family_of(source, pipeline_config(source))
    if family != judge.model.type:
        raise ConfigError(
            f"The recipe is for a model of type {judge.model.type}, and {source!r} is of type {family}.",
            fix="Use a recipe of the model's own family.",
        )
    return judge.model_copy(update={"model": judge.model.model_copy(update={"path": source, "lora": None})})


def _choose(
    checkpoint: Checkpoint, asked: WeightsChoice | None, source: str
) -> tuple[Literal["ema", "raw"], Mapping[str, Tensor]]:
    average = checkpoint.weights["ema"]
    if asked == "ema" and not average:
        raise ConfigError(
            f"{source!r} has no averaged weights.", why="Its recipe has no train.ema.", fix="Leave --weights out, or use raw."
        )
    if asked != "raw" and average:
        return "ema", average
    return "raw", checkpoint.weights["parameters"]


def _changed(recipe: Recipe, options: OpenOptions) -> Recipe:
    """The recipe with an eval section and the changes, checked anew."""
    plain = recipe.to_plain()
    plain["eval"] = plain["eval"] or {"prompts": recipe.data.prompts}
    for key, value in options.changes.items():
        section, _, name = key.partition(".")
        if value is not None:
            plain[section][name] = value
    return recipe_from_plain(plain)


def _device(recipe: Recipe, asked: str | None) -> torch.device:
    """The device asked for; else the one of the run, or any where this machine does not have that one."""
    if asked is not None:
        return choose_device(asked)
    try:
        return choose_device(recipe.run.device)
    except ConfigError:
        return choose_device("auto")
