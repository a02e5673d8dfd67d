"""Low-rank adapters (peft): added before anything else happens to the network, checked to have bound what was named."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from digenrl.config.schema import LoraSection
from digenrl.diffusion.noise import Purpose, key
from digenrl.errors import ConfigError


def add_lora(transformer: nn.Module, lora: LoraSection, default_targets: tuple[str, ...], *, seed: int) -> None:
    """Add float32 adapters to every module whose name ends in one of the targets; the rest stays frozen.

    Raises ConfigError when one of the targets names no linear module: an adapter that binds nothing trains nothing.
    """
    from peft import LoraConfig

    targets = lora.target_modules or default_targets
    names = [name for name, module in transformer.named_modules() if isinstance(module, nn.Linear)]
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            raise ConfigError(
                f"model.lora.target_modules: {target!r} matches no linear layer of the model.",
                why="It would be trained nowhere. Names are matched by their end.",
                fix=f"Layers of the first block: {', '.join(n for n in names if '.0.' in n)[:400]}.",
            )
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=list(targets), init_lora_weights=True)
    network: Any = transformer
    with torch.random.fork_rng(devices=[]):
        # peft draws the initial A matrices from the CPU's global generator: keyed here, and put back afterwards.
        # Not torch.manual_seed, which would seed the GPUs' generators too and leave them so.
        torch.default_generator.manual_seed(key(seed, Purpose.LORA_INIT))
        network.add_adapter(config)
    for parameter in transformer.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
