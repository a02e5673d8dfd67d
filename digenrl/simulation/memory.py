"""What a device must hold, from a recipe and the sizes of its model: an estimate for planning, not a promise.

What is counted, per rank, as the code has it:

1.  Trained weights are float32, frozen ones the compute type (model.dtype); a generator holds all of them as they travel, or its
    share of them where the ranks of a replica hold the network together, trained ones in float32.
    A trainer's are spread over the ranks of a copy (FSDP), and so are gradients (4 bytes), AdamW's moments (8), the average (4),
    and a frozen copy for the KL of full fine-tuning (4).
2.  Gathered weights: two layers' at once; all of them, and whole gradients, with ``train.accumulate: unsharded``.
3.  Activations: bytes per token times tokens times rows of a pass (model_sizes.py), guidance by a second pass counted twice in
    training. Full fine-tuning without gradient checkpointing also keeps every rounded weight (2 bytes) until backward.
4.  Text encoders in the compute type and the VAE in float32 on ranks that encode and decode; with ``model.offload`` only while
    they are used. Decoding takes every row of a pass at once, unless ``model.vae_slicing`` is set.
5.  Training, generating, encoding and decoding take turns on a device: of what each takes for a time, the most counts.
6.  2 GiB for the CUDA context, libraries and fragments. Rewards with networks of their own are not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from digenrl.config.arithmetic import step_arithmetic
from digenrl.config.schema import LoraSection, Recipe
from digenrl.errors import ConfigError
from digenrl.simulation.model_sizes import ModelSizes, sizes_of

GIB = 2**30
_CONTEXT = 2 * GIB
_PICTURES = 3
"""Copies of the decoded pixels, float32: what the decoder gives, put into order, and brought into [0, 1]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The ranks of one kind."""

    name: str
    """generator, trainer, scorer; worker and pool do everything."""
    roles: frozenset[str]
    """Of runtime/build.py: encode, generate, score, train."""
    spread_over: int = 1
    """Ranks that share one copy of the network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on each rank of a holder."""

    holder: Holder
    held: Mapping[str, float]
    """Always: weights, gradients, ..."""
    passing: Mapping[str, float]
    """For a time, by activity; they take turns."""

    @property
    def gib(self) -> float:
        """GiB at the worst moment."""
        return (sum(self.held.values()) + max(self.passing.values(), default=0.0) + _CONTEXT) / GIB

    def line(self) -> str:
        """For people."""
        parts = [f"{name} {size / GIB:.1f}" for name, size in self.held.items() if size >= GIB / 20]
        if self.passing:
            name = max(self.passing, key=lambda each: self.passing[each])
            parts.append(f"{name} {self.passing[name] / GIB:.1f}")
        return f"{self.holder.name} {self.gib:.1f} GiB = {' + '.join([*parts, 'context 2.0'])}"


def holders(recipe: Recipe) -> tuple[Holder, ...]:
    """Who holds what, by the recipe's placement."""
    trainer, scorers = recipe.cluster.trainer, recipe.cluster.scorers.placement
    everything = frozenset(("encode", "generate", "score", "train"))
    if recipe.cluster.placement == "inline":
        return (Holder(name="worker", roles=everything),)
    if recipe.cluster.placement == "colocated":
        return (Holder(name="pool", roles=everything, spread_over=trainer.shard_size),)
    scoring = {"score"} if scorers == "generator" else set()
    shared = min(pool.shard for pool in recipe.cluster.generators)
    found = [
        Holder(name="generator", roles=frozenset({"encode", "generate"} | scoring), spread_over=shared),
        Holder(name="trainer", roles=frozenset({"train", "generate"}), spread_over=trainer.shard_size),
    ]
    return (*found, Holder(name="scorer", roles=frozenset({"score"}))) if scorers == "pool" else tuple(found)


def memory_of(recipe: Recipe, sizes: ModelSizes, holder: Holder) -> Memory:
    """What each rank of a holder needs."""
    held: dict[str, float] = {}
    passing: dict[str, float] = {}
    compute = 2 if recipe.model.dtype == "bfloat16" else 4
    if holder.roles & {"generate", "train"}:
        held |= dict(_policy(recipe, sizes, holder, compute))
    if "train" in holder.roles:
        passing["training"] = _training(recipe, sizes, compute)
    if "generate" in holder.roles:
        tokens = _tokens(recipe, sizes, rows=recipe.rollout.forward_batch_size)
        passing["generating"] = tokens * sizes.generate_bytes * compute / 2
    aside = {"text encoders": compute * sizes.text_encoders} if "encode" in holder.roles else {}
    aside |= {"VAE": 4 * sizes.vae} if "score" in holder.roles else {}
    decoding = _decoding(recipe, sizes) if "score" in holder.roles else 0.0
    if recipe.model.offload:
        passing |= {"encoding": aside.get("text encoders", 0.0), "decoding": aside.get("VAE", 0.0) + decoding}
    else:
        held |= aside
        passing["decoding"] = decoding
    return Memory(holder=holder, held=held, passing={name: size for name, size in passing.items() if size})


def check_memory(recipe: Recipe) -> None:
    """Raise ConfigError, with the nearest settings that fit, where a rank needs more than ``cluster.device_memory_gib``."""
    room, sizes = recipe.cluster.device_memory_gib, sizes_of(recipe)
    if sizes is None:
        return
    needed = [memory_of(recipe, sizes, holder) for holder in holders(recipe)]
    worst = max(needed, key=lambda memory: memory.gib)
    if room is None or worst.gib <= room:
        return
    changes = nearest_fit(recipe, sizes)
    raise ConfigError(
        f"{sizes.name} does not fit: a rank of the {worst.holder.name} needs about {worst.gib:.0f} GiB, and a device has "
        f"{room:g} (cluster.device_memory_gib).",
        why=f"{worst.line()}.",
        fix="No setting was found that fits: use larger devices, a smaller model, or smaller images or videos."
        if changes is None
        else f"Use {' '.join(changes)}.",
    )


def nearest_fit(recipe: Recipe, sizes: ModelSizes) -> tuple[str, ...] | None:
    """The fewest of some changes, cheap ones first, under which everything fits; None where all of them are not enough."""
    taken: list[Change] = []
    for change in _CHANGES:
        taken.append(change)
        if _fits(_with(recipe, taken)[0], sizes):
            return _without_needless(recipe, sizes, taken)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What a plan asks: whether pools of so many ranks hold what this recipe puts on them."""

    recipe: Recipe
    sizes: ModelSizes

    def fits(self, pool: Literal["generators", "trainer", "all"], ranks: int) -> bool:
        """Weights that are trained are spread over all ranks of a pool."""
        roles = {"generators": {"encode", "generate", "score"}, "trainer": {"train", "generate"}}
        asked = frozenset(roles.get(pool, {"encode", "generate", "score", "train"}))
        holder = Holder(name=pool, roles=asked, spread_over=1 if pool == "generators" else ranks)
        room = self.recipe.cluster.device_memory_gib
        return room is None or memory_of(self.recipe, self.sizes, holder).gib <= room


def room_of(recipe: Recipe) -> Room | None:
    """For a model of a published size."""
    sizes = sizes_of(recipe)
    return None if sizes is None else Room(recipe=recipe, sizes=sizes)


def memory_lines(recipe: Recipe) -> list[str]:
    """What each rank needs, in words; nothing for a model of no published size."""
    sizes = sizes_of(recipe)
    if sizes is None:
        return []
    room = recipe.cluster.device_memory_gib
    of = "" if room is None else f" of the {room:g} GiB that it has"
    lines = [f"memory of a device{of}, estimated for {sizes.name}:"]
    return lines + [f"  {memory_of(recipe, sizes, holder).line()}" for holder in holders(recipe)]


def memory_table(recipe: Recipe) -> list[str]:
    """The recipe's own memory beside that of adapters and of full fine-tuning, with and without checkpointing, at its size."""
    sizes = sizes_of(recipe)
    if sizes is None:
        return []
    rollout, model = recipe.rollout, recipe.model
    lora = model.lora or LoraSection()
    names = [holder.name for holder in holders(recipe)]
    size = f"{rollout.height} x {rollout.width}" + (f" x {rollout.num_frames} frames" if rollout.num_frames > 1 else "")
    lines = [f"memory of a device in GiB, estimated for {sizes.name} at {size}:"]
    lines.append(f"{'':32}{''.join(f'{name:>11}' for name in names)}")
    ways = {"as the recipe says": recipe}
    for what, adapters in ((f"LoRA of rank {lora.rank}", lora), ("full fine-tuning", None)):
        for how, checkpointing in (("checkpointing", True), ("all activations", False)):
            section = model.model_copy(update={"lora": adapters, "gradient_checkpointing": checkpointing})
            ways[f"{what}, {how}"] = recipe.model_copy(update={"model": section})
    for name, way in ways.items():
        amounts = "".join(f"{memory_of(way, sizes, holder).gib:11.1f}" for holder in holders(way))
        lines.append(f"{name:32}{amounts}")
    return lines


def _policy(recipe: Recipe, sizes: ModelSizes, holder: Holder, compute: int) -> Iterator[tuple[str, float]]:
    """Of the network that is trained: what is held all the time."""
    lora, shares = recipe.model.lora, holder.spread_over
    trained = sizes.transformer if lora is None else sizes.lora_per_rank * lora.rank
    frozen = 0 if lora is None else sizes.transformer
    if "train" not in holder.roles:
        # Shards of trained weights stay float32.
        yield "weights", (compute * frozen + (compute if shares == 1 else 4) * trained) / shares
        if shares > 1:
            yield "gathered", 2 * (compute * frozen + 4 * trained) / sizes.layers
        return
    yield "weights", (compute * frozen + 4 * trained) / shares
    yield "gradients", 4 * trained / (1 if recipe.train.accumulate == "unsharded" else shares)
    yield "optimizer", 8 * trained / shares
    if recipe.train.ema is not None:
        yield "average", 4 * trained / shares
    if lora is None and getattr(recipe.algorithm.settings, "kl_beta", False):
        yield "reference", 4 * trained / shares
    if shares > 1:
        whole = compute * frozen + 4 * trained
        yield "gathered", whole if recipe.train.accumulate == "unsharded" else 2 * whole / sizes.layers


def _training(recipe: Recipe, sizes: ModelSizes, compute: int) -> float:
    full = recipe.model.lora is None
    rows = _pairs(recipe)
    if recipe.rollout.true_cfg_scale > 1 and not recipe.model.gradient_checkpointing:
        rows *= 2
    per_token = sizes.train_bytes_full if full else sizes.train_bytes
    if recipe.model.gradient_checkpointing:
        per_token = sizes.train_bytes_checkpointed
        if recipe.rollout.true_cfg_scale > 1:
            per_token += 2 * sizes.layers * sizes.width  # the other pass's inputs of blocks
    rounded = compute * sizes.transformer if full and compute == 2 and not recipe.model.gradient_checkpointing else 0
    return _tokens(recipe, sizes, rows=rows) * per_token * compute / 2 + rounded


def _pairs(recipe: Recipe) -> int:
    """Rows of a training pass on one rank; of ``auto``, the least that it can find."""
    asked = recipe.train.timestep_batch_size
    if asked == "auto":
        return 1
    pairs = step_arithmetic(recipe).timestep_batch_size
    ranks = 1 if recipe.cluster.placement == "inline" else recipe.cluster.trainer.ranks
    return -(-pairs // ranks) if asked == "all" else pairs


def _tokens(recipe: Recipe, sizes: ModelSizes, *, rows: int) -> int:
    rollout = recipe.rollout
    return rows * sizes.tokens(rollout.height, rollout.width, rollout.num_frames)


def _decoding(recipe: Recipe, sizes: ModelSizes) -> float:
    rollout, model = recipe.rollout, recipe.model
    rows = 1 if model.vae_slicing else rollout.forward_batch_size
    height, width = (min(side, sizes.decode_tile) if model.vae_tiling else side for side in (rollout.height, rollout.width))
    at_once = height * width * min(rollout.num_frames, sizes.decode_frames)
    pixels = rollout.forward_batch_size * rollout.height * rollout.width * rollout.num_frames
    return rows * at_once * sizes.decode_bytes + _PICTURES * 4 * 3 * pixels


def _fits(recipe: Recipe, sizes: ModelSizes) -> bool:
    room = recipe.cluster.device_memory_gib
    return room is None or all(memory_of(recipe, sizes, holder).gib <= room for holder in holders(recipe))


Change = Callable[[Recipe], tuple[str, Recipe] | None]
"""The override in words, and the recipe with it; None where it would change nothing."""


def _set(section: str, **values: Any) -> Change:
    def change(recipe: Recipe) -> tuple[str, Recipe] | None:
        old = getattr(recipe, section)
        if all(getattr(old, key) == value for key, value in values.items()):
            return None
        text = " ".join(f"{section}.{key}={str(value).lower()}" for key, value in values.items())
        return text, recipe.model_copy(update={section: old.model_copy(update=values)})

    return change


def _smaller_passes(recipe: Recipe) -> tuple[str, Recipe] | None:
    """Half as many rows in a pass; as many in rollout and training, which bfloat16 needs."""
    rows = max(recipe.rollout.forward_batch_size, _pairs(recipe)) // 2
    if rows < 1:
        return None
    changed = recipe.model_copy(
        update={
            "rollout": recipe.rollout.model_copy(update={"forward_batch_size": rows}),
            "train": recipe.train.model_copy(update={"timestep_batch_size": rows, "memory_budget_gib": None}),
        }
    )
    return f"rollout.forward_batch_size={rows} train.timestep_batch_size={rows}", changed


def _more_trainers(recipe: Recipe) -> tuple[str, Recipe] | None:
    cluster = recipe.cluster
    if cluster.placement == "inline":
        return None
    ranks = 2 * cluster.trainer.ranks
    trainer = cluster.trainer.model_copy(update={"ranks": ranks, "shard": None, "replicate": None})
    text = f"cluster.trainer.ranks={ranks}"
    return text, recipe.model_copy(update={"cluster": cluster.model_copy(update={"trainer": trainer})})


def _adapters(recipe: Recipe) -> tuple[str, Recipe] | None:
    if recipe.model.lora is not None:
        return None
    lora = LoraSection()
    text = f"model.lora={{rank: {lora.rank}, alpha: {lora.alpha:g}}}"
    return f"'{text}'", recipe.model_copy(update={"model": recipe.model.model_copy(update={"lora": lora})})


_CHANGES: tuple[Change, ...] = (
    _set("model", gradient_checkpointing=True),
    _set("model", vae_slicing=True),
    _set("model", offload=True),
    _set("model", dtype="bfloat16"),
    *(_smaller_passes,) * 10,
    _set("model", vae_tiling=True),
    _set("train", accumulate="sharded"),
    *(_more_trainers,) * 6,
    _adapters,
)
"""Cheap ones first: what costs time, then what may show in the pixels, then more devices, then another kind of training."""


def _without_needless(recipe: Recipe, sizes: ModelSizes, changes: Sequence[Change]) -> tuple[str, ...]:
    """The changes in words, less those without which it fits, the dear ones left out first."""
    kept = list(changes)
    for change in reversed(changes):
        fewer = list(kept)
        fewer.remove(change)
        if _fits(_with(recipe, fewer)[0], sizes):
            kept = fewer
    return _with(recipe, kept)[1]


def _with(recipe: Recipe, changes: Sequence[Change]) -> tuple[Recipe, tuple[str, ...]]:
    """The recipe with all changes, and each in words; of those that repeat one another, the last."""
    texts: dict[Change, str] = {}
    for change in changes:
        found = change(recipe)
        if found is not None:
            texts[change], recipe = found
    return recipe, tuple(texts.values())
