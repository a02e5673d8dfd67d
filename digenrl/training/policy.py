"""The policy in training: the network's trainable weights, and the starting model as reference.

Invariant: inside ``reference()`` the network is the starting model, and afterwards the policy is exactly what it was.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from digenrl.config.schema import Recipe
from digenrl.errors import ConfigError
from digenrl.models.base import ModelAdapter
from digenrl.models.lora import add_lora
from digenrl.training.group import ALONE, TrainerGroup, forget_passes, free_gathered, shard_module, write_whole


class Policy:
    """Trainable weights of one adapter: low-rank adapters, or all of the transformer."""

    def __init__(self, adapter: ModelAdapter, recipe: Recipe, *, needs_reference: bool, group: TrainerGroup = ALONE) -> None:
        """group: the ranks that the weights are spread over, where there are several."""
        self.adapter = adapter
        self.version = 0
        """Version of the weights that the network holds now."""
        self._lora = recipe.model.lora is not None
        self._frozen: nn.Module | None = None
        if group.mesh is None:
            adapter.transformer.to(adapter.device)
        if recipe.model.lora is not None:
            add_lora(adapter.transformer, recipe.model.lora, adapter.default_lora_targets, seed=recipe.run.seed)
        else:
            if needs_reference:
                self._frozen = copy.deepcopy(adapter.transformer).requires_grad_(False)
            adapter.transformer.requires_grad_(True)
        if group.mesh is not None:
            # From the CPU, block by block: the device may have no room for the whole of it.
            for network in (adapter.transformer, *((self._frozen,) if self._frozen is not None else ())):
                shard_module(network, group, adapter.sharded_blocks)
        self.parameters: dict[str, nn.Parameter] = {
            name: parameter for name, parameter in adapter.transformer.named_parameters() if parameter.requires_grad
        }
        """Trained weights by name, float32; DTensors where they are spread over ranks."""

    @property
    def num_parameters(self) -> int:
        """Trained numbers."""
        return sum(parameter.numel() for parameter in self.parameters.values())

    @contextmanager
    def reference(self) -> Iterator[None]:
        """The starting model, in place of the policy."""
        network: Any = self.adapter.transformer
        if self._lora:
            network.disable_adapters()
            try:
                yield
            finally:
                network.enable_adapters()
            return
        assert self._frozen is not None, "a reference was not asked for when the policy was made"
        self.adapter.transformer = self._frozen
        try:
            yield
        finally:
            self.adapter.transformer = network
            forget_passes(self._frozen)

    def weights_changed(self) -> None:
        """Have the next pass see the parameters as they are now; to be called by whoever writes into them between passes."""
        free_gathered(self.adapter.transformer)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], *, source: str) -> None:
        """Take over weights by name, bit for bit. Raises ConfigError unless names and shapes are exactly the trained ones."""
        wanted = {name: tuple(parameter.shape) for name, parameter in self.parameters.items()}
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if wanted != found:
            odd = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
            raise ConfigError(
                f"{source} holds weights of another model: {len(odd)} of {len(wanted)} differ, for example {odd[0]!r}.",
                why="Weights are loaded completely or not at all.",
                fix="Use the recipe and the base model that the run was made with.",
            )
        for name, parameter in self.parameters.items():
            write_whole(parameter, tensors[name])
        self.weights_changed()
