"""The composition root: the only file that turns a recipe into objects."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from digenrl.config.builtin import resolve
from digenrl.config.checks import check_recipe
from digenrl.config.registry import component_class
from digenrl.config.schema import Recipe
from digenrl.data.prompts import load_prompts
from digenrl.data.sampler import PromptSampler
from digenrl.errors import ConfigError
from digenrl.rewards.compose import WeightedRewards
from digenrl.runtime.checkpointer import Checkpointer, measured_of
from digenrl.runtime.inline import INLINE_WORKER, InlineExecutor, Workers
from digenrl.runtime.interrupt import Interrupt
from digenrl.runtime.journal import Journal
from digenrl.runtime.ledger import Ledger
from digenrl.scheduling.micro_batches import cut_into_micro_batches
from digenrl.scheduling.scheduler import Scheduler
from digenrl.scheduling.settings import SchedulerSettings
from digenrl.training.checkpoint import Checkpoint
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where a run begins: at version 0, or where a checkpoint left it."""

    checkpoint: Checkpoint | None = None
    evaluated: frozenset[int] = frozenset()
    """Versions whose evaluation is in the metrics already."""

    @property
    def policy_version(self) -> int:
        """Completed RL steps."""
        return self.checkpoint.policy_version if self.checkpoint is not None else 0

    @property
    def skipped_steps(self) -> int:
        """Voided steps so far."""
        return int(self.checkpoint.state["skipped_steps"]) if self.checkpoint is not None else 0


def wire_inline_run(
    recipe: Recipe, workers: Workers, ledger: Ledger, journal: Journal, interrupt: Interrupt, start: Start, checkpoints: Path
) -> BuiltRun:
    """Connect built workers to a scheduler and an inline executor, at the place where the run begins."""
    if start.checkpoint is not None:
        workers.trainer.restore(start.checkpoint)
    scheduler = Scheduler(inline_settings(recipe, start))
    executor = InlineExecutor(workers, ledger, journal, interrupt)
    executor.checkpointer = Checkpointer(checkpoints, recipe, workers.trainer, scheduler, skipped_steps=start.skipped_steps)
    return BuiltRun(scheduler=scheduler, executor=executor, trainer=workers.trainer, journal=journal)


def inline_settings(recipe: Recipe, start: Start) -> SchedulerSettings:
    """The schedule of a recipe on one worker that does everything in turn."""
    micro_batches = cut_into_micro_batches(recipe.rollout.prompts_per_step, recipe.groups_in_micro_batch)
    first, steps = start.policy_version, recipe.train.steps
    return SchedulerSettings(
        steps=steps,
        micro_batches=len(micro_batches),
        generators=(INLINE_WORKER,),
        trainer=INLINE_WORKER,
        update_order=recipe.update_order,
        update_after=recipe.schedule.update_after,
        max_attempts=recipe.schedule.max_attempts,
        max_skipped_steps=recipe.train.max_skipped_steps,
        evaluate_at=tuple(v for v in evaluation_versions(recipe) if v >= first and v not in start.evaluated),
        save_at=tuple(v for v in every(recipe.train.save_freq, steps) if v > first),
        first_version=first,
        skipped_before=int(start.checkpoint.state["skipped_in_a_row"]) if start.checkpoint is not None else 0,
        measured=measured_of(start.checkpoint),
        partial_last=recipe.rollout.prompts_per_step % recipe.groups_in_micro_batch != 0,
        groups_per_micro_batch=recipe.groups_in_micro_batch,
    )


def evaluation_versions(recipe: Recipe) -> tuple[int, ...]:
    """Versions to evaluate: before the first step, every ``eval.freq`` steps, after the last."""
    return () if recipe.eval is None else tuple(sorted({0, *every(recipe.eval.freq, recipe.train.steps)}))


def every(freq: int, steps: int) -> tuple[int, ...]:
    """Versions at every ``freq`` steps and the last one; 0: the last one only."""
    return tuple(sorted({*(range(freq, steps, freq) if freq else ()), steps}))


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
