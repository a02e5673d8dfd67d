"""A run folder made without training: the recipe, two evaluations and one checkpoint whose weights were moved at random."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from digenrl.config.registry import component_class
from digenrl.config.schema import Recipe
from digenrl.diffusion.noise import Purpose, generator
from digenrl.runtime.run_folder import RunFolder
from digenrl.training.checkpoint import save_checkpoint
from digenrl.training.policy import Policy


def build_run(folder: Path, recipe: Recipe, *, policy_version: int = 3, moved_by: float = 0.05) -> Path:
    """Write a run of ``recipe`` into ``folder`` as if it had trained ``policy_version`` steps, and return the folder.

    Raw and averaged weights (where the recipe has train.ema) are the starting ones plus two different noises of this size.
    """
    adapter = component_class("model", recipe.model.type, where="model.type").load(recipe, torch.device("cpu"))
    policy = Policy(adapter, recipe, needs_reference=False)

    def moved(number: int) -> dict[str, Tensor]:
        noise = generator(recipe.run.seed, Purpose.EVALUATION, number)
        return {n: p.detach() + moved_by * torch.randn(p.shape, generator=noise) for n, p in policy.parameters.items()}

    with ExitStack() as stack:
        RunFolder.create(folder, recipe, stack)
    weights = {"parameters": moved(0), "optimizer": {}, "ema": moved(1) if recipe.train.ema is not None else {}}
    save_checkpoint(folder / "checkpoints", policy_version, weights, {"recipe": recipe.to_plain()}, keep_last=1)
    rewards = [reward.name for reward in recipe.rewards]
    with (folder / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for version, reward in ((0, 0.25), (policy_version, 0.5)):
            row = {"kind": "eval", "step": version, "reward": reward, "num_images": 4.0}
            file.write(json.dumps({**row, **{f"reward/{name}": reward for name in rewards}}) + "\n")
    return folder
