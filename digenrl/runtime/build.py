"""The composition root: the only file that turns a recipe into objects."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from digenrl.config.builtin import resolve
from digenrl.config.checks import check_recipe
from digenrl.config.registry import component_class
from digenrl.config.schema import Recipe
from digenrl.data.prompts import load_prompts
from digenrl.data.sampler import PromptSampler
from digenrl.errors import ConfigError
from digenrl.metrics.console import RunConsole
from digenrl.metrics.log import MetricsLog
from digenrl.rewards.compose import WeightedRewards
from digenrl.runtime.inline import INLINE_WORKER, InlineExecutor, Workers
from digenrl.runtime.journal import Journal
from digenrl.runtime.ledger import Ledger
from digenrl.runtime.run_folder import RunFolder
from digenrl.scheduling.micro_batches import cut_into_micro_batches
from digenrl.scheduling.scheduler import Scheduler
from digenrl.scheduling.settings import SchedulerSettings
from digenrl.training.policy import Policy
from digenrl.training.trainer import Trainer
from digenrl.workers.evaluator import Evaluator
from digenrl.workers.generator import Generator
from digenrl.workers.scorer import Scorer


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltRun:
    """Everything of one inline run, wired."""

    scheduler: Scheduler
    executor: InlineExecutor
    trainer: Trainer
    journal: Journal


def build_workers(recipe: Recipe) -> tuple[Workers, Ledger]:
    """Load prompts, rewards and model, cheapest first, so that a mistake shows before anything large is loaded."""
    check_recipe(recipe)
    device = choose_device(recipe.run.device)
    torch.set_num_threads(recipe.run.threads_per_worker)
    torch.use_deterministic_algorithms(recipe.train.deterministic)
    rollout, data = recipe.rollout, recipe.data
    sampler = PromptSampler(
        load_prompts(resolve(data.prompts, where="data.prompts")).prompts,
        prompts_per_step=rollout.prompts_per_step,
        seed=recipe.run.seed,
        shuffle=data.shuffle,
        stratify_by=data.stratify_by,
    )
    eval_prompts = load_prompts(resolve(recipe.eval.prompts, where="eval.prompts")).prompts if recipe.eval else ()
    rewards = WeightedRewards.from_recipe(recipe.rewards)
    algorithm = component_class("algorithm", recipe.algorithm.type, where="algorithm.type")(recipe.algorithm.settings, recipe)
    adapter = component_class("model", recipe.model.type, where="model.type").load(recipe, device)
    policy = Policy(adapter, recipe, needs_reference=algorithm.needs_reference)
    schedule = adapter.noise_schedule(rollout.num_inference_steps, rollout.height, rollout.width)
    trainer = Trainer(policy, algorithm, recipe, schedule)
    scorer = Scorer(adapter, rewards, forward_batch_size=rollout.forward_batch_size)
    evaluator = Evaluator(policy, trainer.ema, scorer, recipe, recipe.eval, eval_prompts) if recipe.eval else None
    workers = Workers(
        generator=Generator(policy, algorithm, recipe, schedule), scorer=scorer, trainer=trainer, evaluator=evaluator
    )
    return workers, Ledger(sampler, algorithm, recipe)


def wire_inline_run(
    recipe: Recipe, workers: Workers, ledger: Ledger, folder: RunFolder, log: MetricsLog, console: RunConsole
) -> BuiltRun:
    """Connect built workers to a scheduler, an inline executor and a journal."""
    for number, warning in enumerate(ledger.warnings):
        console.warn(f"prompts-{number}", warning)
    journal = Journal(recipe, folder, log, console)
    return BuiltRun(
        scheduler=Scheduler(inline_settings(recipe)),
        executor=InlineExecutor(workers, ledger, journal),
        trainer=workers.trainer,
        journal=journal,
    )


def inline_settings(recipe: Recipe) -> SchedulerSettings:
    """The schedule of a recipe on one worker that does everything in turn."""
    micro_batches = cut_into_micro_batches(recipe.rollout.prompts_per_step, recipe.groups_in_micro_batch)
    return SchedulerSettings(
        steps=recipe.train.steps,
        micro_batches=len(micro_batches),
        generators=(INLINE_WORKER,),
        trainer=INLINE_WORKER,
        update_order=recipe.update_order,
        update_after=recipe.schedule.update_after,
        max_attempts=recipe.schedule.max_attempts,
        max_skipped_steps=recipe.train.max_skipped_steps,
        partial_last=recipe.rollout.prompts_per_step % recipe.groups_in_micro_batch != 0,
        groups_per_micro_batch=recipe.groups_in_micro_batch,
        evaluate_at=evaluation_versions(recipe),
    )


def evaluation_versions(recipe: Recipe) -> tuple[int, ...]:
    """Versions to evaluate: before the first step, every ``eval.freq`` steps, after the last."""
    if recipe.eval is None:
        return ()
    steps, freq = recipe.train.steps, recipe.eval.freq
    between = range(freq, steps, freq) if freq else ()
    return tuple(sorted({0, *between, steps}))


def choose_device(name: str) -> torch.device:
    """``auto``: a GPU if there is one. Raises ConfigError for a device that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"run.device: {name!r} is not a device.", fix="Use auto, cpu, cuda or cuda:N.") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"run.device: {name!r} is not there; this machine has {torch.cuda.device_count()} GPUs.",
            fix="Use run.device=auto, which takes a GPU where there is one.",
        )
    return device
