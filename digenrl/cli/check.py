"""``digenrl check``: everything that can be known about a recipe without loading a model."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass

from digenrl.config.arithmetic import padding_advice, step_arithmetic
from digenrl.config.builtin import resolve
from digenrl.config.checks import check_recipe
from digenrl.config.loader import load_recipe
from digenrl.config.model_folder import ModelFolder
from digenrl.config.schema import Recipe
from digenrl.data.prompts import load_prompts
from digenrl.data.sampler import PromptSampler
from digenrl.scheduling.micro_batches import cut_into_micro_batches, idle_share, spread_over_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """What a recipe comes to."""

    folder: ModelFolder | None
    """None where the model is fetched when the run starts, or is of a family of the user's own."""
    prompts: int
    """Prompts in the training file."""
    warnings: tuple[str, ...]


def run(path: str, overrides: Sequence[str], *, as_json: bool) -> None:
    """Print the arithmetic of a step, or raise ConfigError."""
    recipe = load_recipe(path, overrides)
    found = inspect(recipe)
    sums, advice = step_arithmetic(recipe), padding_advice(recipe)
    if as_json:
        plain = dataclasses.asdict(sums) | {"prompts_in_file": found.prompts, "warnings": found.warnings, "advice": advice}
        print(json.dumps(plain, indent=2))
        return
    where = str(found.folder.path) if found.folder is not None else f"{recipe.model.path}, loaded when the run starts"
    what = "full fine-tuning" if recipe.model.lora is None else f"LoRA of rank {recipe.model.lora.rank}"
    print(f"model: {recipe.model.type} ({where}), {what}, {recipe.model.dtype}")
    print(f"data: {found.prompts} prompts, {recipe.train.steps} steps")
    for line in (*sums.lines(), *_spread_lines(recipe)):
        print(line)
    for warning in found.warnings:
        print(f"warning: {warning}")
    if advice:
        print(f"advice: {advice}")
    print("ok")


def inspect(recipe: Recipe) -> Inspection:
    """Everything that a recipe names, looked at without loading weights. Raises ConfigError for what cannot work."""
    folder = check_recipe(recipe)
    loaded = load_prompts(resolve(recipe.data.prompts, where="data.prompts"))
    sampler = PromptSampler(
        loaded.prompts,
        prompts_per_step=recipe.rollout.prompts_per_step,
        seed=recipe.run.seed,
        stratify_by=recipe.data.stratify_by,
    )
    warnings = list(sampler.warnings)
    if loaded.blank_lines:
        warnings.append(f"{loaded.blank_lines} blank lines of {recipe.data.prompts} are skipped")
    if recipe.eval is not None:
        held_out = load_prompts(resolve(recipe.eval.prompts, where="eval.prompts")).prompts
        both = {prompt.text for prompt in held_out} & {prompt.text for prompt in loaded.prompts}
        if both:
            warnings.append(f"{len(both)} prompts of eval.prompts are also trained on, for example {min(both)!r}")
    pairs, rows = step_arithmetic(recipe).timestep_batch_size, recipe.rollout.forward_batch_size
    if recipe.model.dtype == "bfloat16" and pairs != rows:
        warnings.append(
            f"in bfloat16, forward passes of {rows} samples in rollout and {pairs} pairs in training differ by more than a clip "
            "of the importance ratio: give rollout.forward_batch_size and train.timestep_batch_size one value"
        )
    return Inspection(folder=folder, prompts=len(loaded.prompts), warnings=tuple(warnings))


def _spread_lines(recipe: Recipe) -> list[str]:
    """How the samples of full and last micro-batches fall onto the ranks of each pool of replicas, and what unevenness costs."""
    if recipe.cluster.placement == "inline":
        return []
    axis, samples = recipe.schedule.micro_batching, recipe.rollout.num_generations
    cut = cut_into_micro_batches(recipe.rollout.prompts_per_step, recipe.groups_in_micro_batch)
    lines = []
    for pool in recipe.cluster.generators:
        for name, micro_batch in {len(m.prompts): (n, m) for n, m in (("last", cut[-1]), ("full", cut[0]))}.values():
            shares = [len(share) for share in spread_over_ranks(micro_batch, samples, pool.ranks, axis)]
            idle = idle_share(micro_batch, samples, pool.ranks, axis)
            each = f"{max(shares)}" if min(shares) == max(shares) else f"{min(shares)} to {max(shares)}"
            lines.append(
                f"{pool.replicas} replicas of {pool.ranks} ranks: {sum(shares)} samples of a {name} micro-batch, "
                f"{each} a rank, ranks idle {idle:.0%}".replace("%", " %")
            )
    return lines
