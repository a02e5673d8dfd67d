"""Checks that need the recipe as a whole: sizes that do not fit one another, settings that contradict.

They run in ``digenrl check`` and again before every run starts; none of them loads weights.
"""

from __future__ import annotations

import os

from digenrl.config.builtin import PREFIX, resolve
from digenrl.config.model_folder import ModelFolder, inspect_model_folder
from digenrl.config.schema import Recipe
from digenrl.errors import ConfigError

PIPELINES = {  # by model.type: diffusers' class, and the components that it cannot do without
    "sd3": (
        "StableDiffusion3Pipeline",
        ("transformer", "vae", "scheduler", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"),
    )
}
_WITHOUT_EMBEDDED_GUIDANCE = {"sd3"}


def check_recipe(recipe: Recipe) -> ModelFolder | None:
    """Raise ConfigError for the first thing that cannot work; the inspected model folder where it is a local one."""
    check = getattr(recipe.algorithm.settings, "check", None)
    if check is not None:
        check(recipe)
    _check_sizes(recipe)
    _check_schedule(recipe)
    _check_trainer(recipe)
    _check_batch_size(recipe)
    _check_emulation(recipe)
    _check_guidance(recipe)
    return _check_model(recipe)


def _check_sizes(recipe: Recipe) -> None:
    groups, per_micro_batch = recipe.rollout.prompts_per_step, recipe.schedule.groups_per_micro_batch
    if per_micro_batch > groups:
        raise ConfigError(
            f"schedule.groups_per_micro_batch ({per_micro_batch}) is larger than rollout.prompts_per_step ({groups}).",
            why="A micro-batch is made of whole prompt groups of one step.",
            fix=f"Use schedule.groups_per_micro_batch={groups} for one micro-batch a step, or fewer for a pipeline.",
        )
    micro_batches = -(-groups // recipe.groups_in_micro_batch)
    if recipe.updates_per_rollout > micro_batches:
        raise ConfigError(
            f"algorithm.updates_per_rollout ({recipe.updates_per_rollout}) is more than the {micro_batches} micro-batches of "
            "a step.",
            why="Each update takes micro-batches of its own.",
            fix=f"Use at most {micro_batches}, or fewer groups in a micro-batch (schedule.groups_per_micro_batch).",
        )
    if all(reward.weight == 0 for reward in recipe.rewards):
        raise ConfigError(
            "All weights in rewards are 0.", why="Every sample would have the same reward.", fix="Give one a weight of 1."
        )


def _check_schedule(recipe: Recipe) -> None:
    schedule, placement = recipe.schedule, recipe.cluster.placement
    if recipe.tag != "never" and placement != "disaggregated":
        raise ConfigError(
            f"schedule.tag: {recipe.tag} needs cluster.placement: disaggregated, and it is {placement}.",
            why="Where the same devices generate and train in turn, there is no idle trainer that could help to generate.",
            fix="Set cluster.placement=disaggregated, or schedule.tag=never.",
        )
    if schedule.max_stale_fraction and placement != "disaggregated":
        raise ConfigError(
            f"schedule.max_stale_fraction ({schedule.max_stale_fraction:g}) needs cluster.placement: disaggregated, and it is "
            f"{placement}.",
            why="Where the same devices generate and train in turn, nobody can generate ahead while the trainer trains.",
            fix="Set cluster.placement=disaggregated, or schedule.max_stale_fraction=0.",
        )
    micro_batches = -(-recipe.rollout.prompts_per_step // recipe.groups_in_micro_batch)
    if schedule.tag_static > micro_batches:
        raise ConfigError(
            f"schedule.tag_static ({schedule.tag_static}) is more than the {micro_batches} micro-batches of a step.",
            fix=f"Use at most {micro_batches}.",
        )
    if schedule.micro_batching == "batch_axis" and len({pool.ranks for pool in recipe.generating_pools}) > 1:
        raise ConfigError(
            "schedule.micro_batching: batch_axis needs generator pools with equal ranks.",
            why="A micro-batch has one group for each rank, and any replica may get it.",
            fix="Give all cluster.generators the same ranks, or use generation_axis.",
        )


def _check_trainer(recipe: Recipe) -> None:
    trainer = recipe.cluster.trainer
    shard, replicate = trainer.shard or 1, trainer.replicate or 1
    both = trainer.shard is not None and trainer.replicate is not None
    if trainer.ranks % (shard * replicate) or (both and shard * replicate != trainer.ranks):
        raise ConfigError(
            f"cluster.trainer.ranks ({trainer.ranks}) is not shard ({trainer.shard}) x replicate ({trainer.replicate}).",
            why="Each copy of the weights is spread over `shard` neighbouring ranks, and there are `replicate` copies (HSDP).",
            fix=f"Use cluster.trainer.shard={trainer.ranks} for one copy, or sizes whose product is {trainer.ranks}.",
        )


def _check_emulation(recipe: Recipe) -> None:
    cluster = recipe.cluster
    if cluster.emulate is None:
        return
    if cluster.placement == "inline":
        raise ConfigError(
            "cluster.emulate needs worker processes, and cluster.placement is inline: one process for everything.",
            fix="Set cluster.placement=disaggregated (or colocated), or cluster.emulate=null.",
        )
    if cluster.weight_transport == "broadcast":
        raise ConfigError(
            "cluster.weight_transport: broadcast is not emulated.",
            why="Emulated workers hold no weights to broadcast; how long a sync takes, the preset says.",
            fix="Set cluster.weight_transport=object_store, or cluster.emulate=null.",
        )


def _check_batch_size(recipe: Recipe) -> None:
    train = recipe.train
    measured = train.timestep_batch_size == "auto"
    if measured and train.memory_budget_gib is None:
        raise ConfigError(
            "train.timestep_batch_size: auto needs train.memory_budget_gib.",
            why="It takes as many pairs as fit into that much memory.",
            fix="Set train.memory_budget_gib to what the trainer may use, some GiB less than there are.",
        )
    if measured and train.deterministic:
        raise ConfigError(
            "train.timestep_batch_size: auto cannot be repeated, as train.deterministic asks for.",
            why="What fits depends on the machine, and the number of pairs in a pass changes the last bits of every gradient.",
            fix="Run a step with train.deterministic=false, and set train.timestep_batch_size to the number that it names.",
        )
    if not measured and train.memory_budget_gib is not None:
        raise ConfigError(
            f"train.memory_budget_gib ({train.memory_budget_gib:g}) is for train.timestep_batch_size: auto, and that is "
            f"{train.timestep_batch_size}.",
            why="Nothing else looks at it, and the trainer would use what it needs.",
            fix="Set train.timestep_batch_size=auto, or train.memory_budget_gib=null.",
        )


def _check_guidance(recipe: Recipe) -> None:
    if recipe.model.type not in _WITHOUT_EMBEDDED_GUIDANCE:
        return
    for section in ("rollout", "eval"):
        settings = getattr(recipe, section)
        if settings is not None and settings.guidance_scale is not None:
            raise ConfigError(
                f"{section}.guidance_scale is for models with embedded guidance, and {recipe.model.type} has none.",
                why="diffusers' guidance_scale of this family is classifier-free guidance with a second pass.",
                fix=f"Use {section}.true_cfg_scale={settings.guidance_scale} instead.",
            )


def _check_model(recipe: Recipe) -> ModelFolder | None:
    if recipe.model.type not in PIPELINES:
        return None
    path = resolve(recipe.model.path, where="model.path")
    if not os.path.exists(path) and looks_like_hub_id(recipe.model.path):
        return None
    pipeline, required = PIPELINES[recipe.model.type]
    folder = inspect_model_folder(path, pipeline=pipeline, required=required)
    for side in ("height", "width"):
        pixels = getattr(recipe.rollout, side)
        if pixels % folder.pixel_multiple:
            low = pixels // folder.pixel_multiple * folder.pixel_multiple
            sizes = f"{low} or {low + folder.pixel_multiple}" if low else str(folder.pixel_multiple)
            raise ConfigError(
                f"rollout.{side} ({pixels}) is not a multiple of {folder.pixel_multiple}.",
                why=f"The VAE shrinks by {folder.vae_scale_factor} and the transformer cuts patches of {folder.patch_size}.",
                fix=f"Use rollout.{side}={sizes}.",
            )
        limit = None if folder.positions is None else folder.positions * folder.pixel_multiple
        if limit is not None and pixels > limit:
            raise ConfigError(
                f"rollout.{side} ({pixels}) is more than the {limit} pixels that this model can draw.",
                why=f"Its transformer knows {folder.positions} positions per side.",
                fix=f"Use rollout.{side}={limit} or less.",
            )
    return folder


def looks_like_hub_id(path: str) -> bool:
    """Whether a model.path is owner/name on the hub, where no folder of that name is there."""
    return not path.startswith((PREFIX, "/", ".", "~")) and path.count("/") == 1
