"""The recipe: every key, its type, its default and what it means. Frozen; unknown keys are errors.

Sizes that do not fit one another are refused by config/checks.py, which sees the recipe as a whole.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, SerializeAsAny, field_validator

from digenrl.config.reward_list import RewardSpec, named
from digenrl.config.section import MOST, ComponentSpec, Section


class RunSection(Section):
    """Where a run lives and what makes it repeatable."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9._-]+$", description="Name of the run and of its folder.")
    output_dir: str | None = Field(
        default=None, description="Run folder; must not hold another run. Default: runs/<name>-<date>-<time>."
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="Seed of everything random in the run.")
    device: str = Field(
        default="auto", pattern=r"^(auto|cpu|cuda(:[0-9]+)?)$", description="auto (a GPU if there is one), cpu, cuda or cuda:N."
    )
    threads_per_worker: int = Field(
        default=1, ge=1, description="CPU threads of each process; part of what makes numbers repeatable."
    )


class LoraSection(Section):
    """Low-rank adapters instead of full fine-tuning."""

    rank: int = Field(default=32, ge=1, le=MOST, description="Rank r of the adapters.")
    alpha: float = Field(default=64.0, gt=0, description="Scale of the adapters; their effect is alpha / r.")
    target_modules: tuple[str, ...] | None = Field(
        default=None, description="Ends of the module names that get an adapter; the family's attention projections if not given."
    )


class ModelSection(Section):
    """The generator that is trained. Keys of its family stand beside these (`digenrl show model sd3`)."""

    type: str = Field(default="sd3", description="Model family, or package.module:Class of your own adapter.")
    path: str = Field(description="Folder in diffusers' format, hub id, or builtin:shapes (the shipped tiny model).")
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="Compute type of the network. Trained weights, latents, log-probabilities and step arithmetic stay float32.",
    )
    lora: LoraSection | None = Field(default=None, description="Train low-rank adapters; full fine-tuning when absent.")
    gradient_checkpointing: bool = Field(default=False, description="Recompute activations in backward to save memory.")
    offload: bool = Field(
        default=False,
        description="Keep text encoders and VAE on the CPU, and on the GPU only while prompts are encoded and latents decoded.",
    )
    vae_tiling: bool = Field(
        default=False, description="Decode large images in overlapping tiles: less memory, and seams may show in other pixels."
    )
    vae_slicing: bool = Field(default=False, description="Decode the samples of a batch one after the other: less memory.")
    settings: SerializeAsAny[BaseModel] = Field(description="The family's own keys, written beside these in a recipe.")


class DataSection(Section):
    """The prompts to train on."""

    prompts: str = Field(description="txt, jsonl or GenEval metadata file, or builtin:shapes/train.jsonl.")
    stratify_by: str | None = Field(
        default=None, description="Metadata field (GenEval: tag) whose values are drawn in equal shares in every step."
    )
    shuffle: bool = Field(default=True, description="Draw prompts in a seeded random order, anew in each pass over the file.")


class RolloutSection(Section):
    """How samples are generated for training."""

    prompts_per_step: int = Field(ge=1, le=MOST, description="Prompts P of one step (one group each).")
    num_generations: int = Field(ge=1, le=MOST, description="Samples G of each prompt (group size).")
    num_inference_steps: int = Field(ge=1, le=MOST, description="Denoising steps T.")
    height: int = Field(ge=8, le=MOST, description="Image height in pixels.")
    width: int = Field(ge=8, le=MOST, description="Image width in pixels.")
    num_frames: int = Field(default=1, ge=1, le=MOST, description="Frames of a video, for models that make them; 1 is an image.")
    fps: float = Field(default=16.0, gt=0, le=1000, description="Frames per second of saved videos; rewards are told, too.")
    noise_level: float = Field(
        default=0.7, ge=0, description="Strength of the SDE noise (a of flow_sde and cps, eta of dance_sde); 0 is the ODE."
    )
    true_cfg_scale: float = Field(
        default=1.0,
        ge=1,
        description="Classifier-free guidance with a second, unconditional pass, in rollout and training alike; 1 is none.",
    )
    guidance_scale: float | None = Field(
        default=None, description="Embedded guidance, only for models distilled for it; others take true_cfg_scale."
    )
    init_same_noise: bool = Field(default=False, description="All samples of a prompt start from the same noise.")
    forward_batch_size: int = Field(
        default=8,
        ge=1,
        le=MOST,
        description="Samples in one forward pass, everywhere; short batches are padded to it, so that "
        "numbers do not depend on the placement.",
    )


class EmaSection(Section):
    """Moving average of the trained weights, used for evaluation and export."""

    decay: float = Field(
        default=0.9, ge=0, lt=1, description="Decay of the average, warmed up as min((1 + n) / (10 + n), decay)."
    )
    update_interval: int = Field(default=1, ge=1, description="Optimizer steps between two updates of the average.")


class TrainSection(Section):
    """The optimizer and how gradients are made."""

    steps: int = Field(ge=0, le=MOST, description="RL steps of the run.")
    learning_rate: float = Field(default=3e-4, gt=0, description="Peak learning rate of AdamW.")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(default="constant", description="Shape after the warm-up.")
    lr_warmup_steps: int = Field(default=0, ge=0, description="Steps of linear rise to the peak.")
    lr_final_fraction: float = Field(default=0.0, ge=0, le=1, description="Share of the peak that linear and cosine end at.")
    adam_beta1: float = Field(default=0.9, ge=0, lt=1, description="AdamW beta 1.")
    adam_beta2: float = Field(default=0.999, ge=0, lt=1, description="AdamW beta 2.")
    adam_eps: float = Field(default=1e-8, gt=0, description="AdamW epsilon.")
    weight_decay: float = Field(default=1e-4, ge=0, description="AdamW weight decay.")
    max_grad_norm: float | None = Field(default=1.0, gt=0, description="Clip of the gradient's norm; null never clips.")
    timestep_batch_size: Annotated[int, Field(ge=1, le=MOST)] | Literal["all", "auto"] = Field(
        default="all",
        description="(sample, denoising step) pairs in one forward and backward pass (TSP). `all`: one prompt group, or a "
        "trainer rank's share of it, which is the most; `auto`: as many of these as fit into train.memory_budget_gib, measured "
        "before the first update. Trainer ranks that each hold the whole network (`shard: 1`) take turns at such passes through "
        "the step, so that a whole group in a pass keeps all of them busy where there are as many groups.",
    )
    memory_budget_gib: float | None = Field(
        default=None,
        gt=0,
        description="Memory that each trainer rank may use in a pass, in GiB, for `timestep_batch_size: auto`: what torch has "
        "allocated on a GPU; on CPUs all of the process, measured to a few MiB.",
    )
    accumulate: Literal["sharded", "unsharded"] = Field(
        default="sharded",
        description="With several trainer ranks: sum gradients and free gathered weights in every pass, or only in the last one "
        "before an optimizer step, which is faster and holds whole weights and gradients on every rank.",
    )
    deterministic: bool = Field(
        default=False, description="Bitwise repeatable whatever the placement; implies schedule.update_order: index."
    )
    max_skipped_steps: int = Field(default=3, ge=1, description="Voided steps (non-finite gradient) in a row that stop the run.")
    ema: EmaSection | None = Field(default=None, description="Keep a moving average of the trained weights.")
    save_freq: int = Field(
        default=20,
        ge=0,
        le=MOST,
        description="Steps between checkpoints; 0: one at the end only. A stopped run continues from the newest.",
    )
    keep_last: int = Field(default=2, ge=1, le=MOST, description="Checkpoints that are kept.")


class EvalSection(Section):
    """Held-out evaluation: ODE sampler, averaged weights, the same noise every time."""

    prompts: str = Field(description="Prompt file that is not trained on, or builtin:shapes/heldout.jsonl.")
    freq: int = Field(default=0, ge=0, description="Steps between evaluations; 0: before the first and after the last step only.")
    num_inference_steps: int = Field(default=20, ge=1, le=MOST, description="Denoising steps of evaluation.")
    true_cfg_scale: float = Field(default=1.0, ge=1, description="Classifier-free guidance of evaluation; 1 is none.")
    guidance_scale: float | None = Field(default=None, description="Embedded guidance of evaluation.")
    seed: int = Field(default=0, ge=0, lt=2**63, description="Seed of the evaluation noise, independent of run.seed.")
    rewards: tuple[RewardSpec, ...] | None = Field(
        default=None,
        description="Rewards of held-out evaluation, listed as in `rewards`: a judge that is not trained on shows what the "
        "training rewards do not see. `rewards` themselves when not given.",
    )
    alarm_window: int = Field(
        default=5,
        ge=0,
        le=100,
        description="Evaluations over which the held-out reward is watched: a warning says when it falls steadily while the "
        "training reward rises. At least 5, or 0 for no such warning.",
    )
    alarm_errors: float = Field(
        default=2.0, ge=0, description="Standard errors by which the held-out reward must have fallen over these evaluations."
    )

    @field_validator("rewards")
    @classmethod
    def _name_rewards(cls, rewards: tuple[RewardSpec, ...] | None) -> tuple[RewardSpec, ...] | None:
        return None if rewards is None else named(rewards)

    @field_validator("alarm_window")
    @classmethod
    def _long_enough(cls, window: int) -> int:
        if 0 < window < 5:
            raise ValueError("fewer than 5 evaluations fall in a row by chance too often; use 5 or more, or 0 for no alarm")
        return window


class ScheduleSection(Section):
    """How work is cut into micro-batches and in which order it is done."""

    micro_batching: Literal["generation_axis", "batch_axis", "none"] = Field(
        default="generation_axis",
        description="How a step becomes micro-batches: whole groups whose samples are spread over the ranks of a replica (GAP); "
        "another group for each rank; or the whole step as one.",
    )
    groups_per_micro_batch: int = Field(
        default=1, ge=1, le=MOST, description="Whole prompt groups in one micro-batch (for each rank along the batch axis)."
    )
    update_order: Literal["arrival", "index"] = Field(
        default="arrival", description="Accumulate micro-batches as they are scored, or strictly by index."
    )
    update_after: Literal["group", "step"] = Field(
        default="group", description="Accumulate a micro-batch once it is scored, or hold all until the step is scored."
    )
    tag: Literal["never", "static", "greedy", "bts", "bts_plus"] | None = Field(
        default=None,
        description="When a trainer with nothing to update generates (TAG): bts_plus with pools of their own, never otherwise, "
        "when not given.",
    )
    tag_static: int = Field(
        default=0, ge=0, le=MOST, description="Micro-batches the trainer generates in a step with `tag: static`."
    )
    max_stale_fraction: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Share of the next step's micro-batches that may be generated with the present weights (TCSS); 0 is strictly "
        "on-policy. Needs a trainer of its own.",
    )
    max_attempts: int = Field(default=3, ge=1, le=MOST, description="Failures of one micro-batch that stop the run.")


class Resources(Section):
    """What each rank of a pool takes of a Ray cluster, and which nodes it may run on."""

    cpus: float | None = Field(
        default=None,
        ge=0,
        le=4096,
        description="Logical CPU cores of one rank; a fraction lets ranks share a core (0.5). One when not given; on the private "
        "cluster of a machine with fewer cores, an equal share, of at least a quarter.",
    )
    gpus: float | None = Field(
        default=None,
        ge=0,
        le=64,
        description="GPUs of one rank; a fraction lets ranks share one. One where the cluster has GPUs and run.device does not "
        "say cpu, when not given.",
    )
    custom: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict, description="Custom resources of one rank, as the nodes were started with: {h100: 1}."
    )
    node_labels: dict[str, str] = Field(
        default_factory=dict,
        description="Ray labels that a node must have, which pins a pool to one kind of device: {ray.io/accelerator-type: H100}.",
    )


class GeneratorPool(Section):
    """Generators of one kind."""

    replicas: int = Field(default=1, ge=1, le=4096, description="Generator replicas: each works on one micro-batch at a time.")
    ranks: int = Field(default=1, ge=1, le=4096, description="Devices of one replica, which share a micro-batch's samples.")
    shard: int = Field(
        default=1,
        ge=1,
        le=4096,
        description="Neighbouring ranks of a replica that hold one network together (FSDP), for one that a device alone has no "
        "room for; with 1, each rank holds the whole of it, and nothing has to be gathered.",
    )
    timeout_s: float = Field(
        default=600.0,
        gt=0,
        description="Longest wait of one rank for another that it holds a network with; the replica is then started anew.",
    )
    resources: Resources = Field(default_factory=Resources, description="What each rank takes: cpus, gpus, custom, node_labels.")


class TrainerPool(Section):
    """The trainer's devices."""

    ranks: int = Field(default=1, ge=1, le=4096, description="Devices of the trainer; with `colocated`, all devices.")
    shard: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="Neighbouring ranks that share one copy of weights, gradients and optimizer (FSDP); all ranks if not given.",
    )
    replicate: int | None = Field(
        default=None, ge=1, le=4096, description="Copies of it (HSDP): ranks / shard, when not given. Shard inside a node."
    )
    timeout_s: float = Field(
        default=600.0, gt=0, description="Longest wait of one trainer rank for another; the run ends when it is over."
    )
    resources: Resources = Field(default_factory=Resources, description="What each rank takes: cpus, gpus, custom, node_labels.")

    @property
    def shard_size(self) -> int:
        """Ranks that share one copy of everything."""
        return self.shard or self.ranks // (self.replicate or 1)


class ScorersSection(Section):
    """Who decodes and scores."""

    placement: Literal["generator", "pool", "driver"] = Field(
        default="generator",
        description="The generators, before new generation; workers of their own; or the process that drives the run, for "
        "rewards that must not be copied (its CPU decodes, too).",
    )
    replicas: int = Field(default=1, ge=1, le=4096, description="Scorers of `placement: pool`.")
    resources: Resources = Field(
        default_factory=Resources, description="What each scorer of `placement: pool` takes: cpus, gpus, custom, node_labels."
    )


class EmulatedDeath(Section):
    """A worker that dies by itself, once."""

    worker: str = Field(min_length=1, description="Name of the worker: generator-0, scorer-0, trainer, or pool with `colocated`.")
    at_command: int = Field(
        ge=2,
        le=MOST,
        description="In the middle of which of its commands, from 1; the first of a generator is to load the starting weights.",
    )


class EmulateSection(Section):
    """Workers that sleep instead of computing: for looking at the schedule and the cluster alone."""

    preset: str = Field(min_length=1, description="Whose durations: a preset of `digenrl simulate`.")
    time_scale: float | None = Field(
        default=None,
        gt=0,
        le=1000,
        description="Real seconds per second of the preset; such that a micro-batch is generated in half a second if not given.",
    )
    durations: Literal["measured", "known"] = Field(
        default="measured",
        description="What TAG's searches plan with: estimates made as the run goes, as a real run has to, or the preset's.",
    )
    jitter: float = Field(default=0.0, ge=0, le=10, description="Coefficient of variation of every duration.")
    straggler_share: float = Field(default=0.0, ge=0, le=1, description="Share of commands that take much longer.")
    straggler_factor: float = Field(default=5.0, ge=1, le=MOST, description="How many times longer.")
    deaths: tuple[EmulatedDeath, ...] = Field(default=(), description="Workers that die by themselves.")
    weight_bytes: int = Field(
        default=0, ge=0, le=2**40, description="Bytes that are published with every version and fetched by every generator."
    )


class ClusterSection(Section):
    """Which devices do what."""

    placement: Literal["inline", "disaggregated", "colocated"] = Field(
        default="inline",
        description="One process for everything; a generator pool and a trainer pool of Ray workers; or the trainer's devices in "
        "both roles, in turn.",
    )
    generators: tuple[GeneratorPool, ...] = Field(
        default=(GeneratorPool(),),
        min_length=1,
        description="Generator pools, each with `replicas`, `ranks` and `resources`; not used by `colocated`.",
    )
    trainer: TrainerPool = Field(default_factory=TrainerPool, description="The trainer pool.")
    scorers: ScorersSection = Field(default_factory=ScorersSection, description="Where pictures are decoded and scored.")
    weight_transport: Literal["object_store", "broadcast"] = Field(
        default="object_store",
        description="How weights go from the trainer to the generators: Ray's object store, or a broadcast of torch.distributed "
        "(gloo, NCCL on GPUs).",
    )
    device_memory_gib: float | None = Field(
        default=None,
        gt=0,
        description="Memory of one device in GiB. `check` and `plan` refuse what is estimated to need more, where the model is a "
        "published one; nothing is refused when not given.",
    )
    start_timeout_s: float = Field(
        default=120.0, gt=0, description="Seconds to wait until the cluster has room for all workers, before the run is refused."
    )
    load_timeout_s: float = Field(default=1800.0, gt=0, description="Seconds that a worker may take to load its model.")
    command_timeout_s: float = Field(
        default=3600.0, gt=0, description="Seconds without any result from any worker after which the run is given up."
    )
    heartbeat_timeout_s: float = Field(
        default=60.0, gt=0, description="Seconds without a sign of life after which a worker counts as lost."
    )
    emulate: EmulateSection | None = Field(
        default=None,
        description="Have one process for every worker sleep for a preset's durations instead of computing; the preset's name "
        "alone will do (`emulate: hunyuanvideo-32gpu`). No picture is made and nothing is learned.",
    )

    @field_validator("emulate", mode="before")
    @classmethod
    def _preset_alone(cls, given: Any) -> Any:
        return {"preset": given} if isinstance(given, str) else given


class WandbSection(Section):
    """Weights & Biases, beside the local files. Needs `pip install "digenrl[wandb]"`."""

    project: str = Field(default="digenrl", min_length=1, description="Project that the run appears in.")
    entity: str | None = Field(default=None, description="User or team that owns the project; your default one if not given.")
    mode: Literal["online", "offline"] = Field(
        default="online", description="Send at once, or write a folder for `wandb sync` (machines without a network)."
    )


class LogSection(Section):
    """What is written while the run goes on."""

    sample_freq: int = Field(default=10, ge=0, description="Steps between saved sample pictures; 0 saves none.")
    num_samples: int = Field(default=12, ge=1, description="Pictures saved each time, first samples of the first prompts.")
    tensorboard: bool = Field(
        default=True, description="Write scalars and pictures for `tensorboard --logdir` into the run folder's tensorboard/."
    )
    wandb: WandbSection | None = Field(default=None, description="Log to Weights & Biases, too; `{}` takes its defaults.")


class Recipe(Section):
    """A complete run, as one YAML file describes it."""

    run: RunSection = Field(default_factory=RunSection)
    model: ModelSection
    data: DataSection
    rollout: RolloutSection
    algorithm: ComponentSpec
    rewards: tuple[RewardSpec, ...]
    train: TrainSection
    eval: EvalSection | None = None
    schedule: ScheduleSection = Field(default_factory=ScheduleSection)
    cluster: ClusterSection = Field(default_factory=ClusterSection)
    log: LogSection = Field(default_factory=LogSection)

    @field_validator("rewards")
    @classmethod
    def _name_rewards(cls, rewards: tuple[RewardSpec, ...]) -> tuple[RewardSpec, ...]:
        return named(rewards)

    @property
    def eval_rewards(self) -> tuple[RewardSpec, ...]:
        """Those of held-out evaluation: ``eval.rewards``, or the ones that are trained on."""
        return self.rewards if self.eval is None or self.eval.rewards is None else self.eval.rewards

    @property
    def update_order(self) -> Literal["arrival", "index"]:
        """``schedule.update_order``, or ``index`` where ``train.deterministic`` implies it."""
        return "index" if self.train.deterministic else self.schedule.update_order

    @property
    def tag(self) -> Literal["never", "static", "greedy", "bts", "bts_plus"]:
        """``schedule.tag``, or the placement's default."""
        return self.schedule.tag or ("bts_plus" if self.cluster.placement == "disaggregated" else "never")

    @property
    def updates_per_rollout(self) -> int:
        """``algorithm.updates_per_rollout``; 1 for an algorithm of the user's own that has no such setting."""
        return int(getattr(self.algorithm.settings, "updates_per_rollout", 1))

    @property
    def generating_pools(self) -> tuple[GeneratorPool, ...]:
        """Whose ranks share the samples of a micro-batch: ``cluster.generators``, or ``colocated`` the trainer's own devices."""
        if self.cluster.placement != "colocated":
            return self.cluster.generators
        trainer = self.cluster.trainer
        return (GeneratorPool(ranks=trainer.ranks, resources=trainer.resources),)

    @property
    def groups_in_micro_batch(self) -> int:
        """Prompt groups of one full micro-batch, as ``schedule.micro_batching`` cuts a step."""
        schedule, prompts = self.schedule, self.rollout.prompts_per_step
        if schedule.micro_batching == "none":
            return prompts
        ranks = self.generating_pools[0].ranks if schedule.micro_batching == "batch_axis" else 1
        return min(prompts, schedule.groups_per_micro_batch * ranks)

    def for_replay(self) -> Recipe:
        """As a record is followed: in one process, the record says who helped whom and what was stale."""
        if self.cluster.placement != "inline":
            return self
        schedule = self.schedule.model_copy(update={"tag": None, "max_stale_fraction": 0.0})
        return self.model_copy(update={"schedule": schedule})

    def to_plain(self) -> dict[str, Any]:
        """The recipe as it is written in YAML: a component's settings stand beside its type."""
        plain = self.model_dump(mode="json")
        held_out = (plain["eval"] or {}).get("rewards") or ()
        for component in (plain["model"], plain["algorithm"], *plain["rewards"], *held_out):
            component.update(component.pop("settings"))
        return plain
