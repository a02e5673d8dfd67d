"""``digenrl check``: everything that can be known about a recipe without loading a model."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from digenrl.cli.notes import note
from digenrl.cli.workers import worker_lines, workers_of
from digenrl.config.arithmetic import padding_advice, step_arithmetic
from digenrl.config.builtin import resolve
from digenrl.config.checks import MIXED_LENGTHS, check_recipe, mixes_prompt_lengths
from digenrl.config.loader import load_recipe
from digenrl.config.model_folder import ModelFolder
from digenrl.config.reward_checks import check_needs, held_out_samples, trained_samples
from digenrl.config.reward_list import RewardSpec
from digenrl.config.schema import Recipe
from digenrl.config.settings.remote_rewards import RemoteSettings
from digenrl.data.prompts import Prompt, load_prompts
from digenrl.data.sampler import PromptSampler
from digenrl.errors import ConfigError
from digenrl.scheduling.micro_batches import cut_into_micro_batches, idle_share, spread_over_ranks
from digenrl.scheduling.settings import stale_quota
from digenrl.simulation.memory import check_memory, holders, memory_lines, memory_of
from digenrl.simulation.model_sizes import sizes_of
from digenrl.simulation.run import simulate
from digenrl.simulation.source import load_source

_SERVICE_S = 2.0
"""How long a service may take to answer ``check``."""


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
    recipe = load_recipe(path, overrides, say=note)
    found = inspect(recipe)
    warnings = (*found.warnings, *service_warnings(recipe))
    sums, advice = step_arithmetic(recipe), padding_advice(recipe)
    if as_json:
        plain = dataclasses.asdict(sums) | {"prompts_in_file": found.prompts, "warnings": warnings, "advice": advice}
        if recipe.cluster.placement != "inline":
            plain["workers"] = [dataclasses.asdict(worker) for worker in workers_of(recipe)]
        if (sizes := sizes_of(recipe)) is not None:
            plain["memory_gib"] = {holder.name: memory_of(recipe, sizes, holder).gib for holder in holders(recipe)}
        print(json.dumps(plain, indent=2))
        return
    where = str(found.folder.path) if found.folder is not None else f"{recipe.model.path}, loaded when the run starts"
    what = "full fine-tuning" if recipe.model.lora is None else f"LoRA of rank {recipe.model.lora.rank}"
    print(f"model: {recipe.model.type} ({where}), {what}, {recipe.model.dtype}")
    print(f"data: {found.prompts} prompts, {recipe.train.steps} steps")
    if (emulate := recipe.cluster.emulate) is not None:
        print(f"EMULATION of {emulate.preset}: no picture is made, nothing is learned")
    lines = (*sums.lines(), *_spread_lines(recipe), *_held_lines(path, recipe, overrides), *worker_lines(recipe))
    for line in (*lines, *memory_lines(recipe)):
        print(line)
    for warning in warnings:
        print(f"warning: {warning}")
    if advice:
        print(f"advice: {advice}")
    print("ok")


def inspect(recipe: Recipe) -> Inspection:
    """Everything that a recipe names, looked at without loading weights. Raises ConfigError for what cannot work."""
    folder = check_recipe(recipe)
    check_memory(recipe)
    if recipe.cluster.emulate is not None:
        from digenrl.cli.emulation import emulation_of

        emulation_of(recipe)  # its preset and workers are there
    loaded = load_prompts(resolve(recipe.data.prompts, where="data.prompts"))
    sampler = PromptSampler(
        loaded.prompts,
        prompts_per_step=recipe.rollout.prompts_per_step,
        seed=recipe.run.seed,
        stratify_by=recipe.data.stratify_by,
    )
    _check_prompts(recipe.rewards, "data.prompts", loaded.prompts)
    warnings = list(sampler.warnings)
    if loaded.blank_lines:
        warnings.append(f"{loaded.blank_lines} blank lines of {recipe.data.prompts} are skipped")
    if recipe.eval is not None:
        held_out = load_prompts(resolve(recipe.eval.prompts, where="eval.prompts")).prompts
        _check_prompts(recipe.eval_rewards, "eval.prompts", held_out)
        both = {prompt.text for prompt in held_out} & {prompt.text for prompt in loaded.prompts}
        if both:
            warnings.append(f"{len(both)} prompts of eval.prompts are also trained on, for example {min(both)!r}")
    pairs, rows = step_arithmetic(recipe).timestep_batch_size, recipe.rollout.forward_batch_size
    if recipe.model.dtype == "bfloat16" and pairs != rows:
        warnings.append(
            f"in bfloat16, forward passes of {rows} samples in rollout and {pairs} pairs in training differ by more than a clip "
            "of the importance ratio: give rollout.forward_batch_size and train.timestep_batch_size one value"
        )
    if mixes_prompt_lengths(recipe):
        warnings.append(f"{MIXED_LENGTHS} Ratios are not exactly 1 at first; use schedule.groups_per_micro_batch=1")
    warnings += schedule_warnings(recipe)
    return Inspection(folder=folder, prompts=len(loaded.prompts), warnings=tuple(warnings))


def _check_prompts(rewards: Sequence[RewardSpec], key: str, prompts: Sequence[Prompt]) -> None:
    """Raise ConfigError for a prompt that a reward cannot score, as its settings' ``check_prompt`` says it."""
    for reward in rewards:
        check = getattr(reward.settings, "check_prompt", None)
        wrong = [(prompt.text, check(prompt.text, prompt.metadata)) for prompt in prompts] if check is not None else []
        wrong = [(text, complaint) for text, complaint in wrong if complaint is not None]
        if wrong:
            text, complaint = wrong[0]
            raise ConfigError(
                f"{key}: the reward {reward.name!r} cannot score {text[:80]!r}: {complaint}.",
                why=f"Samples of {len(wrong)} of {len(prompts)} prompts would be invalid.",
                fix="Take these prompts out of the file, mend them, or use another reward.",
            )


def service_warnings(recipe: Recipe) -> Iterator[str]:
    """Services that do not answer here, which may be because they are asked from elsewhere.

    Raises ConfigError where one that does cannot score what the model makes.
    """
    lists = [("rewards", recipe.rewards, trained_samples(recipe))]
    if recipe.eval is not None and recipe.eval.rewards is not None:
        lists.append(("eval.rewards", recipe.eval.rewards, held_out_samples(recipe)))
    for key, rewards, samples in lists:
        for index, reward in enumerate(rewards):
            if not isinstance(reward.settings, RemoteSettings):
                continue
            from digenrl.rewards.remote.client import ask_what_is_served  # imports numpy, which others need not wait for

            served = ask_what_is_served(reward.settings, within_s=_SERVICE_S)
            if served is None:
                yield f"{key}.{index}: no reward service answers at {reward.settings.url} from here; a run asks it at its start"
            else:
                check_needs(served.needs, samples, f"{key}.{index}: {reward.name}")


def schedule_warnings(recipe: Recipe) -> Iterator[str]:
    """What is said of the schedule and comes to nothing."""
    asked, micro_batches = recipe.schedule.max_stale_fraction, _micro_batches(recipe)
    if asked and not stale_quota(asked, micro_batches):
        finer = _finer_cut(recipe)
        yield (
            f"schedule.max_stale_fraction ({asked:g}) of a step's {micro_batches} micro-batches is less than one, so none is "
            f"generated ahead: the smallest fraction that does something is {_smallest_fraction(micro_batches):g}"
            f"{f', or cut finer: {finer}' if finer else ''}"
        )


def _micro_batches(recipe: Recipe) -> int:
    return -(-recipe.rollout.prompts_per_step // recipe.groups_in_micro_batch)


def _smallest_fraction(micro_batches: int) -> float:
    """1 / B in as few digits as are needed, rounded up: rounded down, it would be less than one micro-batch."""
    scale: int = 10 ** max(2, len(str(micro_batches)))
    return math.ceil(scale / micro_batches) / scale


def _finer_cut(recipe: Recipe) -> str | None:
    """The largest micro-batches of which the fraction that is asked for is at least one; None where even the smallest are few."""
    schedule, prompts = recipe.schedule, recipe.rollout.prompts_per_step
    needed = int(1 / schedule.max_stale_fraction)
    while not stale_quota(schedule.max_stale_fraction, needed):
        needed += 1
    ranks = recipe.generating_pools[0].ranks if schedule.micro_batching == "batch_axis" else 1
    # There are more than needed - 1 micro-batches where fewer than prompts / (needed - 1) prompts are in one.
    groups = min(schedule.groups_per_micro_batch, (prompts - 1) // (needed - 1) // ranks)
    if not groups:
        return None
    axis = "schedule.micro_batching=generation_axis " if schedule.micro_batching == "none" else ""
    return f"{axis}schedule.groups_per_micro_batch={groups} for {-(-prompts // (groups * ranks))} micro-batches"


def _spread_lines(recipe: Recipe) -> list[str]:
    """How the samples of full and last micro-batches fall onto the ranks of each pool of replicas, and what unevenness costs."""
    if recipe.cluster.placement == "inline":
        return []
    axis, samples = recipe.schedule.micro_batching, recipe.rollout.num_generations
    cut = cut_into_micro_batches(recipe.rollout.prompts_per_step, recipe.groups_in_micro_batch)
    lines = []
    for pool in recipe.generating_pools:
        for name, micro_batch in {len(m.prompts): (n, m) for n, m in (("last", cut[-1]), ("full", cut[0]))}.values():
            shares = [len(share) for share in spread_over_ranks(micro_batch, samples, pool.ranks, axis)]
            idle = idle_share(micro_batch, samples, pool.ranks, axis)
            each = f"{max(shares)}" if min(shares) == max(shares) else f"{min(shares)} to {max(shares)}"
            lines.append(
                f"{_count(pool.replicas, 'replica')} of {_count(pool.ranks, 'rank')}: {sum(shares)} samples of a {name} "
                f"micro-batch, {each} a rank, ranks idle {idle:.0%}".replace("%", " %")
            )
    return lines


def _held_lines(path: str, recipe: Recipe, overrides: Sequence[str]) -> list[str]:
    """What it costs that updates wait for the rewards of the whole step, and how a step is cut into updates."""
    lines = []
    if recipe.updates_per_rollout > 1:
        lines.append(f"{recipe.updates_per_rollout} optimizer steps per rollout, over {_micro_batches(recipe)} micro-batches")
    if recipe.schedule.update_after != "step":
        return lines
    held = "updates wait until the whole step is scored (schedule.update_after: step)"
    if recipe.cluster.placement != "disaggregated":
        return [*lines, f"{held}: its trajectories are kept until then, and no time is lost in one pool"]
    if len({pool.ranks for pool in recipe.generating_pools}) > 1:
        return [*lines, f"{held}: the trainer is idle until then"]
    usual, waiting = (
        simulate(loaded.settings, loaded.costs).step_time_s
        for loaded in (load_source(path, [*overrides, f"schedule.update_after={after}"], steps=4) for after in ("group", "step"))
    )
    more = f"{max(0.0, waiting / usual - 1):.0%}".replace("%", " %")
    return [*lines, f"{held}: a step takes {more} longer, simulated with default durations of the shipped tiny model"]


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
