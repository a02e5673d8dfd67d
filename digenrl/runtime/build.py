"""The composition root: the only file that turns a recipe into objects."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from digenrl.algorithms.base import Algorithm
from digenrl.config.builtin import resolve
from digenrl.config.checks import check_recipe
from digenrl.config.registry import component_class
from digenrl.config.reward_checks import held_out_samples, trained_samples
from digenrl.config.schema import Recipe
from digenrl.data.prompts import Prompt, load_prompts
from digenrl.data.sampler import PromptSampler
from digenrl.diffusion.noise_schedule import NoiseSchedule
from digenrl.errors import ConfigError
from digenrl.models.base import ModelAdapter, Part
from digenrl.rewards.compose import WeightedRewards
from digenrl.runtime.checkpointer import measured_of
from digenrl.runtime.ledger import Ledger
from digenrl.scheduling.micro_batches import cut_into_micro_batches
from digenrl.scheduling.settings import SchedulerSettings
from digenrl.training.checkpoint import Checkpoint
from digenrl.training.group import ALONE, RankGroup
from digenrl.training.policy import Policy
from digenrl.training.trainer import Trainer
from digenrl.workers.evaluator import EvaluationSampler
from digenrl.workers.generator import Generator
from digenrl.workers.scorer import Scorer

Role = Literal["encode", "generate", "score", "train"]
"""What a worker can do. Each role brings the parts of the model that it needs, and no others."""

ALL_ROLES: frozenset[Role] = frozenset(get_args(Role))
_PARTS: dict[Role, Part] = {"encode": "text_encoders", "generate": "transformer", "train": "transformer", "score": "vae"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Components:
    """Everything that one process needs for its roles; None where no role asks for it."""

    recipe: Recipe
    adapter: ModelAdapter
    algorithm: Algorithm
    policy: Policy | None = None
    generator: Generator | None = None
    evaluation: EvaluationSampler | None = None
    scorer: Scorer | None = None
    """With the rewards that are trained on."""
    judge: Scorer | None = None
    """With those of held-out evaluation; the scorer itself where these are the same, None without an eval section."""
    trainer: Trainer | None = None


def build_components(recipe: Recipe, roles: Set[Role], device: torch.device, group: RankGroup = ALONE) -> Components:
    """Load what the roles need, cheapest first, so that a mistake shows before anything large is loaded.

    group: the ranks that a trainer or generator shares its weights with.
    """
    torch.set_num_threads(recipe.run.threads_per_worker)
    torch.use_deterministic_algorithms(recipe.train.deterministic)
    trained_on = held_out = None
    if "score" in roles:
        trained_on = WeightedRewards.from_recipe(recipe.rewards, samples=trained_samples(recipe))
        held_out = _held_out_rewards(recipe, trained_on)
    algorithm = build_algorithm(recipe)
    adapter = component_class("model", recipe.model.type, where="model.type").load(
        recipe, device, frozenset(_PARTS[role] for role in roles)
    )
    scorer = scorer_of(recipe, adapter, trained_on) if trained_on is not None else None
    judge = scorer if held_out is trained_on else scorer_of(recipe, adapter, held_out) if held_out is not None else None
    if not roles & {"generate", "train"}:
        return Components(recipe=recipe, adapter=adapter, algorithm=algorithm, scorer=scorer, judge=judge)
    trains, rollout = "train" in roles, recipe.rollout
    policy = Policy(adapter, recipe, needs_reference=trains and algorithm.needs_reference, group=group)
    schedule: NoiseSchedule = adapter.noise_schedule(rollout.num_inference_steps, rollout.height, rollout.width)
    trainer = Trainer(policy, algorithm, recipe, schedule, group) if trains else None
    return Components(
        recipe=recipe,
        adapter=adapter,
        algorithm=algorithm,
        policy=policy,
        generator=Generator(policy, algorithm, recipe, schedule),
        evaluation=EvaluationSampler(policy, trainer.ema, recipe, recipe.eval) if trainer and recipe.eval else None,
        scorer=scorer,
        judge=judge,
        trainer=trainer,
    )


def scorer_of(recipe: Recipe, adapter: ModelAdapter, rewards: WeightedRewards) -> Scorer:
    """Decodes and scores as the recipe says."""
    return Scorer(adapter, rewards, forward_batch_size=recipe.rollout.forward_batch_size, fps=recipe.rollout.fps)


def _held_out_rewards(recipe: Recipe, trained_on: WeightedRewards) -> WeightedRewards | None:
    if recipe.eval is None:
        return None
    samples = held_out_samples(recipe)
    if recipe.eval.rewards is None:
        trained_on.check(samples, where="rewards")
        return trained_on
    return WeightedRewards.from_recipe(recipe.eval.rewards, where="eval.rewards", samples=samples, beside=trained_on.built)


def build_algorithm(recipe: Recipe) -> Algorithm:
    """The algorithm alone, which needs no weights."""
    algorithm: Algorithm = component_class("algorithm", recipe.algorithm.type, where="algorithm.type")(
        recipe.algorithm.settings, recipe
    )
    return algorithm


def build_ledger(recipe: Recipe) -> Ledger[Any, Any]:
    """Prompts and bookkeeping of a run."""
    data = recipe.data
    sampler = PromptSampler(
        load_prompts(resolve(data.prompts, where="data.prompts")).prompts,
        prompts_per_step=recipe.rollout.prompts_per_step,
        seed=recipe.run.seed,
        shuffle=data.shuffle,
        stratify_by=data.stratify_by,
    )
    return Ledger(sampler, build_algorithm(recipe), recipe)


def evaluation_prompts(recipe: Recipe) -> tuple[Prompt, ...]:
    """The held-out prompts; none without an eval section."""
    return load_prompts(resolve(recipe.eval.prompts, where="eval.prompts")).prompts if recipe.eval else ()


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

    @property
    def stale_claims(self) -> tuple[int, ...]:
        """Micro-batches of the next step that were being generated with the weights of the version before."""
        return tuple(self.checkpoint.state.get("stale_claims", ())) if self.checkpoint is not None else ()


def schedule_settings(recipe: Recipe, start: Start, **workers: Any) -> SchedulerSettings:
    """The schedule of a recipe. workers: who there is, as SchedulerSettings has it (generators, trainer, scorers, ...)."""
    check_recipe(recipe)
    micro_batches = cut_into_micro_batches(recipe.rollout.prompts_per_step, recipe.groups_in_micro_batch)
    first, steps = start.policy_version, recipe.train.steps
    one_pool = workers["trainer"] in workers["generators"]
    return SchedulerSettings(
        **{
            "steps": steps,
            "micro_batches": len(micro_batches),
            "update_order": recipe.update_order,
            # In one pool a step is generated before it is updated, where that would otherwise happen with changed weights.
            "update_after": "step" if one_pool and recipe.updates_per_rollout > 1 else recipe.schedule.update_after,
            "updates_per_rollout": recipe.updates_per_rollout,
            "tag": recipe.tag,
            "tag_static": recipe.schedule.tag_static,
            "max_stale_fraction": recipe.schedule.max_stale_fraction,
            "max_attempts": recipe.schedule.max_attempts,
            "max_skipped_steps": recipe.train.max_skipped_steps,
            "evaluate_at": tuple(v for v in evaluation_versions(recipe) if v >= first and v not in start.evaluated),
            "save_at": tuple(v for v in every(recipe.train.save_freq, steps) if v > first),
            "first_version": first,
            "stale_claims": start.stale_claims if first < steps else (),
            "skipped_before": int(start.checkpoint.state["skipped_in_a_row"]) if start.checkpoint is not None else 0,
            "measured": measured_of(start.checkpoint),
            "partial_last": recipe.rollout.prompts_per_step % recipe.groups_in_micro_batch != 0,
            "groups_per_micro_batch": recipe.groups_in_micro_batch,
            **workers,
        }
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
