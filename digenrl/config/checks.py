"""Checks that need the recipe as a whole: sizes that do not fit one another, settings that contradict.

They run in ``digenrl check`` and again before every run starts; none of them loads weights.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

from digenrl.config.builtin import PREFIX, resolve
from digenrl.config.families import FAMILIES, Family
from digenrl.config.model_folder import ModelFolder, inspect_model_folder
from digenrl.config.registry import media_of
from digenrl.config.reward_checks import check_rewards
from digenrl.config.schema import Recipe
from digenrl.errors import ConfigError


def check_recipe(recipe: Recipe) -> ModelFolder | None:
    """Raise ConfigError for the first thing that cannot work; the inspected model folder where it is a local one."""
    check = getattr(recipe.algorithm.settings, "check", None)
    if check is not None:
        check(recipe)
    _check_sizes(recipe)
    check_rewards(recipe)
    _check_schedule(recipe)
    _check_generators(recipe)
    _check_trainer(recipe)
    _check_batch_size(recipe)
    _check_emulation(recipe)
    family = FAMILIES.get(recipe.model.type)
    if family is not None and family.embedded_guidance is None:
        check_guidance(recipe, family, distilled=False)
    _check_media(recipe)
    if recipe.train.deterministic and mixes_prompt_lengths(recipe):
        raise ConfigError(
            f"train.deterministic does not go with several groups in a micro-batch of {recipe.model.type}.",
            why=MIXED_LENGTHS,
            fix="Set schedule.groups_per_micro_batch=1 and schedule.micro_batching=generation_axis.",
        )
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


def _check_generators(recipe: Recipe) -> None:
    for number, pool in enumerate(recipe.cluster.generators):
        key, gpus = f"cluster.generators.{number}", pool.resources.gpus or 0
        if pool.ranks % pool.shard:
            raise ConfigError(
                f"{key}.shard ({pool.shard}) does not divide {key}.ranks ({pool.ranks}).",
                why="A replica's ranks hold whole networks: `shard` neighbouring ones hold each of them together.",
                fix=f"Use {key}.shard={pool.ranks} for one network on all ranks, or {key}.shard=1 for one on each.",
            )
        if pool.shard > 1 and 0 < gpus < 1:
            raise ConfigError(
                f"{key}.shard ({pool.shard}) needs whole GPUs, and its ranks take {gpus:g} each.",
                why="NCCL, by which ranks gather the network that they hold together, wants a GPU for each of them.",
                fix=f"Set {key}.resources.gpus=1, or {key}.shard=1 if the network fits.",
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


def check_guidance(recipe: Recipe, family: Family, *, distilled: bool) -> None:
    """Raise ConfigError for an embedded guidance that the model (not ``distilled`` for it) would not look at."""
    if distilled:
        return
    this_model = recipe.model.type if family.embedded_guidance is None else repr(recipe.model.path)
    for section in ("rollout", "eval"):
        settings = getattr(recipe, section)
        if settings is not None and settings.guidance_scale is not None:
            raise ConfigError(
                f"{section}.guidance_scale is for models with embedded guidance, and {this_model} has none.",
                why=_WHY_NO_GUIDANCE[family.cfg_argument],
                fix=f"Use {section}.true_cfg_scale={settings.guidance_scale} instead.",
            )


_WHY_NO_GUIDANCE = {
    "guidance_scale": "diffusers' guidance_scale of this family is classifier-free guidance with a second pass.",
    "true_cfg_scale": "The network takes no guidance; classifier-free guidance, with a second pass, has a name of its own.",
}


MIXED_LENGTHS = (
    "Prompts of different lengths that share a forward pass change each other's last bits, and which of them do depends on the "
    "number of ranks."
)


def mixes_prompt_lengths(recipe: Recipe) -> bool:
    """Whether passes of the rollout hold several prompts, in a family where these would see one another's length."""
    family, schedule = FAMILIES.get(recipe.model.type), recipe.schedule
    # A trainer that helps (TAG) need not have a rank for each group.
    one_each = schedule.micro_batching == "batch_axis" and schedule.groups_per_micro_batch == 1 and recipe.tag == "never"
    return family is not None and family.text_by_length and recipe.groups_in_micro_batch > 1 and not one_each


def _check_media(recipe: Recipe) -> None:
    frames = recipe.rollout.num_frames
    if frames > 1 and "video" not in media_of("model", recipe.model.type, where="model.type"):
        raise ConfigError(
            f"rollout.num_frames ({frames}) is for models of videos, and {recipe.model.type} makes images.",
            fix="Use rollout.num_frames=1, or another model.type (`digenrl show model`).",
        )
    if frames > 1 and find_spec("av") is None:
        raise ConfigError(
            "rollout.num_frames: saving videos needs the package av, which is not installed.",
            why="Videos are kept as mp4 files.",
            fix="pip install av.",
        )


def _check_frames(recipe: Recipe, folder: ModelFolder) -> None:
    frames, factor = recipe.rollout.num_frames, folder.vae_temporal_factor
    if (frames - 1) % factor:
        low = (frames - 1) // factor * factor + 1
        nearest = low if frames - low <= low + factor - frames else low + factor
        raise ConfigError(
            f"rollout.num_frames ({frames}) is not 1 more than a multiple of {factor}.",
            why=f"The VAE makes one frame of the first latent frame, and {factor} of each further one.",
            fix=f"Use rollout.num_frames={nearest}, the nearest that it can make ({low} and {low + factor} are its neighbours).",
        )


def _check_model(recipe: Recipe) -> ModelFolder | None:
    family = FAMILIES.get(recipe.model.type)
    if family is None:
        return None
    path = resolve(recipe.model.path, where="model.path")
    if not os.path.exists(path) and looks_like_hub_id(recipe.model.path):
        return None
    folder = inspect_model_folder(path, family)
    check_guidance(recipe, family, distilled=folder.guidance_embeds)
    _check_pixels(recipe, folder)
    _check_frames(recipe, folder)
    _check_steps(recipe, folder)
    return folder


def _check_pixels(recipe: Recipe, folder: ModelFolder) -> None:
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


def _check_steps(recipe: Recipe, folder: ModelFolder) -> None:
    for section in ("rollout", "eval"):
        settings = getattr(recipe, section)
        if folder.shift_terminal and settings is not None and settings.num_inference_steps == 1:
            raise ConfigError(
                f"{section}.num_inference_steps: a schedule of 1 step is not defined for this model.",
                why=f"Its noise scheduler stretches the sigmas to end at {folder.shift_terminal:g}, which needs two of them.",
                fix=f"Use {section}.num_inference_steps=2 or more.",
            )


def looks_like_hub_id(path: str) -> bool:
    """Whether a model.path is owner/name on the hub, where no folder of that name is there."""
    return not path.startswith((PREFIX, "/", ".", "~")) and path.count("/") == 1
