"""One rank of a trainer, in a process of its own: does what test_fsdp.py asks for, and writes down the numbers.

    python -m tests.training.fsdp_ranks FOLDER RANK SIZE SHARD:CHECK...

Each check is a function of this file, and is done with weights spread over so many ranks. It builds what it needs, once alone and
once on all ranks, and returns numbers, which are judged by the tests. All ranks do the same checks in the same order; the first
error ends the process, and so the others.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from digenrl.algorithms.base import GroupAdvantages, LossInputs, LossOutputs
from digenrl.algorithms.flow_grpo import FlowGRPO
from digenrl.config.loader import recipe_from_plain
from digenrl.config.registry import component_class
from digenrl.config.schema import Recipe
from digenrl.diffusion.trajectory import Trajectory
from digenrl.errors import ConfigError
from digenrl.ids import SampleId
from digenrl.models.base import Conditioning, Guidance
from digenrl.training.batch_size import GIB, BatchSize
from digenrl.training.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from digenrl.training.digest import digest, digests
from digenrl.training.group import ALONE, TrainerGroup, join_group, whole
from digenrl.training.policy import Policy
from digenrl.training.trainer import StepReport, Trainer, merged_metrics
from digenrl.weight_sync.held import HeldWeights
from digenrl.weight_sync.publication import publish
from digenrl.weight_sync.publisher import Publisher
from digenrl.workers.evaluator import EvaluationSampler
from digenrl.workers.generator import Generator, encode_prompts
from tests.conftest import PROMPTS
from tests.families import FAMILIES, FamilyCase

CPU = torch.device("cpu")
TIMEOUT_S = 40.0
STALL_TIMEOUT_S = 2.0
STALL_S = 6.0
NAN = float("nan")
LORA = {"rank": 3, "alpha": 6}
"""Of rank 3, so that on two ranks shares differ, and on four one is empty."""
GROUP_SIZE = 5
STEPS = 2
"""Trained denoising steps: 10 pairs in a group."""
REWARDS = ([0.0, 1.0, 3.0, 2.0, 2.5], [2.0, 5.0, 1.0, 7.0, 2.0])

Numbers = dict[str, Any]


class Recorder(FlowGRPO):
    """Flow-GRPO that remembers how far log-probabilities are from those of the rollout."""

    def __init__(self, settings: Any, recipe: Recipe) -> None:
        super().__init__(settings, recipe)
        self.largest = 0.0

    def loss(self, pairs: LossInputs) -> LossOutputs:
        self.largest = max(self.largest, float((pairs.log_prob - pairs.old_log_prob).detach().abs().max()))
        return super().loss(pairs)


@dataclass
class Side:
    """A trainer and a generator on one network: one process', or one rank's."""

    group: TrainerGroup
    recipe: Recipe
    policy: Policy
    algorithm: Recorder
    trainer: Trainer
    generator: Generator
    text: Conditioning

    def trajectories(self, step: int = 0) -> list[Trajectory]:
        """A micro-batch of each group."""
        found = []
        for prompt in range(len(self.text)):
            samples = [SampleId(step, prompt, sample) for sample in range(self.recipe.rollout.num_generations)]
            rows = torch.full((len(samples),), prompt)
            found.append(self.generator.generate(samples, self.text, rows, self.policy.version))
        return found

    def accumulate(self, trajectories: Sequence[Trajectory], advantages: Sequence[GroupAdvantages], **more: Any) -> None:
        for number, (trajectory, its) in enumerate(zip(trajectories, advantages, strict=True)):
            settings = {"more_to_come": number + 1 < len(trajectories), **more}
            self.trainer.accumulate(trajectory, self.text.select(torch.tensor([number])), [its], **settings)

    def step(self, trajectories: Sequence[Trajectory], advantages: Sequence[GroupAdvantages]) -> StepReport:
        self.accumulate(trajectories, advantages)
        return self.finish()

    def finish(self) -> StepReport:
        report = self.trainer.optimizer_step()
        self.trainer.stepping = False
        return report

    def advantages(self, *rewards: Sequence[float]) -> list[GroupAdvantages]:
        return self.algorithm.advantages(np.array(rewards, dtype=np.float64))

    def momentum(self) -> dict[str, Tensor]:
        """After one step, a tenth of the gradient that the optimizer was given."""
        state = self.trainer.optimizer.state
        return {name: whole(state[p]["exp_avg"]).clone() for name, p in self.policy.parameters.items()}

    @torch.no_grad()
    def predict(self) -> Tensor:
        latents = torch.randn(2, 4, 4, 4, generator=torch.Generator().manual_seed(0))
        return self.policy.adapter.predict(latents, torch.tensor([900.0, 300.0]), self.text, Guidance())

    def weights(self) -> dict[str, Tensor]:
        return {name: whole(p.detach()).clone() for name, p in self.policy.parameters.items()}

    def disturb(self, seed: int = 1, size: float = 0.05) -> None:
        """Move the weights, and a network that has been somewhere has an adapter that does something."""
        generator = torch.Generator().manual_seed(seed)
        moved = {n: w + size * torch.randn(w.shape, generator=generator) for n, w in self.weights().items()}
        self.policy.load(moved, source="a test")


class Ranks:
    """What a check is given: its place among the ranks, and ways to build."""

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        self.folder = folder
        self._rank, self._size = rank, size
        self._store = dist.FileStore(str(folder / f"store-{size}"), size)
        self._meetings = 0
        self._texts: dict[tuple[str, str, float], Conditioning] = {}
        self._made: dict[int, list[Trajectory]] = {}
        self.group = ALONE

    def meet(self, shard: int, *, timeout_s: float = TIMEOUT_S) -> None:
        """Become one of the ranks, anew."""
        if dist.is_initialized():
            dist.destroy_process_group()
        self._meetings += 1
        store = dist.PrefixStore(f"meeting {self._meetings}", self._store)
        self.group = join_group(store, rank=self._rank, size=self._size, shard=shard, device=CPU, timeout_s=timeout_s)

    def trajectories(self, side: Side, step: int = 0) -> list[Trajectory]:
        """Some that the starting model made, as if the side had; made once, for generation takes as long as training."""
        if step not in self._made:
            self._made[step] = self.build(ALONE).trajectories(step)
        return [replace(each, policy_version=side.policy.version) for each in self._made[step]]

    def pair(self, **overrides: Any) -> tuple[Side, Side]:
        """The same, alone and spread over the ranks."""
        return self.build(ALONE, **overrides), self.build(self.group, **overrides)

    def build(self, group: TrainerGroup, **overrides: Any) -> Side:
        recipe = small_recipe(self.folder, **overrides)
        adapter = adapter_class(recipe).load(recipe, CPU, frozenset({"transformer"}))
        algorithm = Recorder(recipe.algorithm.settings, recipe)  # type: ignore[arg-type]
        policy = Policy(adapter, recipe, needs_reference=algorithm.needs_reference, group=group)
        rollout = recipe.rollout
        schedule = adapter.noise_schedule(rollout.num_inference_steps, rollout.height, rollout.width)
        return Side(
            group=group,
            recipe=recipe,
            policy=policy,
            algorithm=algorithm,
            trainer=Trainer(policy, algorithm, recipe, schedule, group),
            generator=Generator(policy, algorithm, recipe, schedule),
            text=self._text(recipe),
        )

    def _text(self, recipe: Recipe) -> Conditioning:
        key = (recipe.model.path, recipe.model.dtype, recipe.rollout.true_cfg_scale)
        if key not in self._texts:
            adapter = adapter_class(recipe).load(recipe, CPU, frozenset({"text_encoders"}))
            self._texts[key] = encode_prompts(adapter, PROMPTS[:2], 2)
        return self._texts[key]


def adapter_class(recipe: Recipe) -> Any:
    return component_class("model", recipe.model.type, where="model.type")


def small_recipe(folder: Path, **overrides: Any) -> Recipe:
    plain: dict[str, Any] = {
        "run": {"device": "cpu", "seed": 11},
        "model": {"type": "sd3", "path": str(folder / "sd3"), "max_sequence_length": 8, "lora": LORA},
        "data": {"prompts": "builtin:shapes/train.jsonl"},
        "rollout": {
            "prompts_per_step": 2,
            "num_generations": GROUP_SIZE,
            "num_inference_steps": STEPS + 1,
            "height": 32,
            "width": 32,
            "forward_batch_size": GROUP_SIZE,
        },
        "algorithm": {"type": "flow_grpo"},
        "rewards": [{"type": "jpeg"}],
        "train": {"steps": 4, "learning_rate": 1e-3, "timestep_batch_size": 4},
    }
    for section, keys in overrides.items():
        plain[section] = {**plain.get(section, {}), **keys}
    return recipe_from_plain(plain)


def off_policy(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """The same, as if made by another policy: ratios inside and outside of the clip of 1e-4, none on its edge."""
    shifts = torch.tensor([3e-5, -2e-4, 2e-4, -3e-5, 5e-5, -3e-4, 0.0])
    return [
        replace(each, log_probs=each.log_probs + shifts.repeat(len(shifts))[: each.log_probs.numel()].view_as(each.log_probs))
        for each in trajectories
    ]


def relative(ours: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Norm of the difference over the norm, of all tensors as one vector."""
    flat = [torch.cat([tensors[name].flatten() for name in wanted]).double() for tensors in (ours, wanted)]
    return float((flat[0] - flat[1]).norm() / flat[1].norm())


class Collectives(TorchDispatchMode):
    """Counts the gathers of weights and the reductions of gradients inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.gathers = self.reductions = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name() if isinstance(func, torch._ops.OpOverload) else ""
        self.gathers += name.startswith("c10d::_allgather_base")
        self.reductions += name.startswith("c10d::_reduce_scatter_base")
        return func(*args, **(kwargs or {}))


def gradient_of(ranks: Ranks, **overrides: Any) -> Numbers:
    """Gradient, its norm and Z of two micro-batches, on the ranks and by one process that keeps its activations."""
    shared = ranks.build(ranks.group, **overrides)
    alone = ranks.build(ALONE, **{**overrides, "model": {**overrides.get("model", {}), "gradient_checkpointing": False}})
    for side in (alone, shared):
        if side.algorithm.needs_reference:
            side.disturb()
    return gradients_of(alone, shared, ranks.trajectories(alone))


def gradients_of(alone: Side, shared: Side, made: Sequence[Trajectory]) -> Numbers:
    """The same of two sides and micro-batches that are there."""
    trajectories = off_policy(made)
    reports = [side.step(trajectories, side.advantages(*REWARDS)) for side in (alone, shared)]
    return {
        "relative": relative(shared.momentum(), alone.momentum()),
        "norm": [report.common["grad_norm"] for report in reports],
        "pairs": [report.common["trained_pairs"] for report in reports],
        "digest": digest(shared.weights()),
        "noted": passes_noted(shared.policy._frozen),
        "left out": [[name for name, each in side.momentum().items() if not each.any()] for side in (alone, shared)],
    }


def passes_noted(network: nn.Module | None) -> int:
    """Forward passes of a network that is never trained which FSDP remembers for a backward pass that never comes."""
    return len(network._get_fsdp_state()._comm_ctx.post_forward_order) if isinstance(network, FSDPModule) else 0


def families(ranks: Ranks) -> Numbers:
    """Every model family, all of its weights trained, with checkpointing and classifier-free guidance."""
    return {case.name: family_gradient(ranks, case, None) for case in FAMILIES}


def lora_families(ranks: Ranks) -> Numbers:
    """The same with adapters."""
    return {case.name: family_gradient(ranks, case, LORA) for case in FAMILIES}


def family_gradient(ranks: Ranks, case: FamilyCase, lora: Any) -> Numbers:
    model = {"lora": lora, "gradient_checkpointing": True}
    sections = case.sections(str(ranks.folder / case.name), model=model, rollout={"true_cfg_scale": 2.0})
    alone, shared = ranks.pair(**sections)
    return gradients_of(alone, shared, alone.trajectories())


KL = {"type": "flow_grpo", "kl_beta": 0.04}
FULL = {"lora": None}


def gradients(ranks: Ranks) -> Numbers:
    """LoRA and full, gradient checkpointing, pairs in a pass, and a KL to the starting model: each once."""
    return {
        "lora, 1 pair": gradient_of(ranks, train={"timestep_batch_size": 1}),
        "lora, 4 pairs": gradient_of(ranks),
        "lora, all pairs, checkpointing": gradient_of(
            ranks, model={"gradient_checkpointing": True}, train={"timestep_batch_size": "all"}
        ),
        "lora, KL, unsharded": gradient_of(ranks, algorithm=KL, train={"accumulate": "unsharded"}),
        "full, all pairs": gradient_of(ranks, model=FULL, train={"timestep_batch_size": "all"}),
        "full, 4 pairs, checkpointing": gradient_of(ranks, model={**FULL, "gradient_checkpointing": True}),
        "full, KL": gradient_of(ranks, model=FULL, algorithm=KL),
    }


def few_gradients(ranks: Ranks) -> Numbers:
    """The same for more ranks: what could differ with their number."""
    return {
        "lora, all pairs": gradient_of(ranks, train={"timestep_batch_size": "all"}),
        "full, 4 pairs, KL, unsharded": gradient_of(ranks, model=FULL, algorithm=KL, train={"accumulate": "unsharded"}),
    }


def all_gradients(ranks: Ranks) -> Numbers:
    """All of these together."""
    found = {}
    for lora in (LORA, None):
        for checkpointing in (False, True):
            for size in (1, 4, "all"):
                for accumulate in ("sharded", "unsharded"):
                    for algorithm in ({"type": "flow_grpo"}, KL):
                        name = f"{lora} {checkpointing} {size} {accumulate} {algorithm}"
                        found[name] = gradient_of(
                            ranks,
                            model={"lora": lora, "gradient_checkpointing": checkpointing},
                            algorithm=algorithm,
                            train={"timestep_batch_size": size, "accumulate": accumulate},
                        )
    return found


def three_steps(ranks: Ranks) -> Numbers:
    """Digests after each of three steps, on this rank, twice; and how far that is from one process."""
    return {"lora": steps_of(ranks, 3, LORA, repeats=2), "full": steps_of(ranks, 3, None, repeats=1)}


def two_steps(ranks: Ranks) -> Numbers:
    """A shorter one of these, for more ranks and other ways to spread the weights."""
    return {"lora": steps_of(ranks, 2, LORA, repeats=1)}


def steps_of(ranks: Ranks, steps: int, lora: Any, *, repeats: int) -> Numbers:
    runs = []
    for group in (ALONE, *(ranks.group,) * repeats):
        side = ranks.build(group, model={"lora": lora}, train={"ema": {"decay": 0.5}})
        start, after = side.weights(), []
        for step in range(steps):
            side.step(ranks.trajectories(side, step), side.advantages(*REWARDS))
            after.append(digests(on_this_rank(side)))
        runs.append((after, side.weights()))
    return {
        "digests": [run[0] for run in runs[1:]],
        "relative": relative(runs[1][1], runs[0][1]),
        "change": relative(runs[0][1], start),
    }


def on_this_rank(side: Side) -> dict[str, dict[str, Tensor]]:
    """Parameters, momentum and average, each whole and as this rank has them."""
    return {
        "parameters": side.weights(),
        "optimizer": side.momentum(),
        "ema": {} if side.trainer.ema is None else {n: whole(t) for n, t in side.trainer.ema.average.items()},
    }


def outcomes(
    alone: Side, shared: Side, ranks: Ranks, trajectories: Sequence[Trajectory], advantages: Sequence[GroupAdvantages]
) -> Numbers:
    """What came of one step on both sides, and how far the weights are apart after another one."""
    found: Numbers = {}
    for name, side in (("alone", alone), ("shared", shared)):
        before = digest(side.weights())
        side.accumulate(trajectories, advantages)
        report = side.finish()
        found[name] = {
            "outcome": report.outcome.value,
            "pairs": report.common["trained_pairs"],
            "norm": report.common["grad_norm"],
            "nonfinite": merged_metrics(gathered(report, side))["nonfinite_pairs"],
            "moved": digest(side.weights()) != before,
        }
    trained = alone.trainer.optimizer.state and found["alone"]["norm"]
    found["gradient"] = relative(shared.momentum(), alone.momentum()) if trained else 0.0
    for side in (alone, shared):
        side.step(ranks.trajectories(side, 1), side.advantages(*REWARDS))
    found["weights of the next step"] = relative(shared.weights(), alone.weights())
    found["digest"] = digest(shared.weights())
    return found


def gathered(report: StepReport, side: Side) -> list[StepReport]:
    """The reports of all ranks."""
    if side.group.size > 1:
        everyone: list[Any] = [None] * side.group.size
        dist.all_gather_object(everyone, report)
        return everyone
    return [report]


def by_hand(*values: Sequence[float]) -> list[GroupAdvantages]:
    return [
        GroupAdvantages(values=np.array(each), kept=np.ones(len(each), dtype=bool), zero_variance=not any(each))
        for each in values
    ]


def with_latent(trajectory: Trajectory, row: int, slot: int, value: float) -> Trajectory:
    latents = trajectory.latents.clone()
    latents[row, slot, 0, 1, 1] = value
    return replace(trajectory, latents=latents)


def with_log_prob(trajectory: Trajectory, row: int, slot: int, value: float) -> Trajectory:
    log_probs = trajectory.log_probs.clone()
    log_probs[row, slot] = value
    return replace(trajectory, log_probs=log_probs)


def invalid(ranks: Ranks) -> Numbers:
    """Rewards, latents and gradients that are not finite, and micro-batches with little or nothing to train."""
    found: Numbers = {}
    for name, change, advantages, train in (
        ("a NaN reward", None, ([0.0, 1.0, NAN, 2.0, 2.5], REWARDS[1]), {}),
        ("a NaN latent", (0, 0), REWARDS, {"timestep_batch_size": 5}),
        # 10 pairs in batches of 4: the second rank repeats the first batch, with the NaN in it, as padding.
        ("a NaN latent in what another rank pads with", (0, 0), REWARDS, {"timestep_batch_size": 4}),
        ("a NaN latent in every pair of one sample", (1, None), REWARDS, {"timestep_batch_size": 3}),
    ):
        alone, shared = ranks.pair(train=train)
        trajectories = ranks.trajectories(alone)
        if change is not None:
            row, slot = change
            for each in range(STEPS) if slot is None else (slot,):
                trajectories[0] = with_latent(trajectories[0], row, each, NAN)
        found[name] = outcomes(alone, shared, ranks, trajectories, alone.advantages(*advantages))
    for name, values, accumulate in (
        ("all pairs on one rank", ([1.0, 0.0, 0.0, 0.0, -1.0], [0.0, 2.0, 0.0, 0.0, -2.0]), "sharded"),
        ("no useful pair in the last micro-batch", (SOME, NONE), "sharded"),
        ("no useful pair in the last micro-batch, unsharded", (SOME, NONE), "unsharded"),
        ("no useful pair in the first micro-batch, unsharded", (NONE, SOME), "unsharded"),
        ("no useful pair at all, unsharded", (NONE, NONE), "unsharded"),
    ):
        alone, shared = ranks.pair(train={"timestep_batch_size": "all", "accumulate": accumulate})
        found[name] = outcomes(alone, shared, ranks, ranks.trajectories(alone), by_hand(*values))
    for accumulate in ("sharded", "unsharded"):
        found[f"an infinite gradient, {accumulate}"] = infinite(ranks, accumulate)
    return found


SOME, NONE = [1.0, 0.5, 0.0, 0.0, -1.5], [0.0] * GROUP_SIZE
"""Advantages of a group."""


def few_invalid(ranks: Ranks) -> Numbers:
    """The same for ranks with whole weights, where each goes its own way until the step."""
    alone, shared = ranks.pair()
    trajectories = ranks.trajectories(alone)
    trajectories[0] = with_latent(trajectories[0], 0, 0, NAN)
    found = {"a NaN latent": outcomes(alone, shared, ranks, trajectories, alone.advantages(*REWARDS))}
    alone, shared = ranks.pair(train={"timestep_batch_size": "all"})
    found["all pairs on one rank"] = outcomes(alone, shared, ranks, ranks.trajectories(alone), by_hand(SOME, NONE))
    return {**found, "an infinite gradient": infinite(ranks, "sharded")}


def infinite(ranks: Ranks, accumulate: str) -> Numbers:
    alone, shared = ranks.pair(train={"accumulate": accumulate})
    trajectories = ranks.trajectories(alone)
    # The ratio is e^87 = 6e37: the loss is finite, and its gradient is not.
    trajectories[0] = with_log_prob(trajectories[0], 0, 0, float(trajectories[0].log_probs[0, 0]) - 87.0)
    advantages = by_hand([-5.0, 1.0, 1.0, 1.0, 2.0], [1.0, -1.0, 0.5, 0.0, -0.5])
    return outcomes(alone, shared, ranks, trajectories, advantages)


def packing(ranks: Ranks) -> Numbers:
    """Digests after one step of two groups, as two micro-batches and as one."""
    found: Numbers = {}
    for accumulate in ("sharded", "unsharded"):
        digests_of = []
        for together in (False, True):
            # 10 pairs a group in batches of 4: the second rank has one less, which the next group must not fill.
            side = ranks.build(ranks.group, train={"accumulate": accumulate, "timestep_batch_size": 4})
            trajectories, advantages = ranks.trajectories(side), side.advantages(*REWARDS)
            if together:
                side.trainer.accumulate(joined(trajectories), side.text, advantages)
                side.finish()
            else:
                side.step(trajectories, advantages)
            digests_of.append(digests(on_this_rank(side)))
        found[accumulate] = digests_of
    return found


def joined(parts: Sequence[Trajectory]) -> Trajectory:
    names = ("noise_levels", "denoising_steps", "latents", "next_latents", "log_probs", "final_latents")
    tensors = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
    return replace(parts[0], samples=tuple(sample for part in parts for sample in part.samples), **tensors)


def unsharded(ranks: Ranks) -> Numbers:
    """What ``train.accumulate`` changes: collectives, what is held, and nothing else."""
    found: Numbers = {}
    for name, lora in (("lora", LORA), ("full", None)):
        sides, counts, held = [], {}, {}
        for accumulate in ("sharded", "unsharded"):
            side = ranks.build(ranks.group, model={"lora": lora}, train={"accumulate": accumulate})
            trajectories, advantages = ranks.trajectories(side), side.advantages(*REWARDS)
            counts[accumulate], held[accumulate] = [], []
            for number in range(2):
                with Collectives() as collectives:
                    side.trainer.accumulate(
                        trajectories[number],
                        side.text.select(torch.tensor([number])),
                        [advantages[number]],
                        more_to_come=number == 0,
                    )
                counts[accumulate].append([collectives.gathers, collectives.reductions])
                held[accumulate].append(held_by(side.policy))
            side.finish()
            sides.append(side)
        wrong = ranks.build(ranks.group, model={"lora": lora}, train={"accumulate": "unsharded"})
        wrong.accumulate(ranks.trajectories(wrong), wrong.advantages(*REWARDS), more_to_come=True)
        wrong.finish()
        found[name] = {
            "relative": relative(sides[1].momentum(), sides[0].momentum()),
            "wrongly told": relative(wrong.momentum(), sides[0].momentum()),
            "collectives": counts,
            "held": held,
            "numbers": sum(p.numel() for p in sides[0].policy.adapter.transformer.parameters()),
            "trained": sides[0].policy.num_parameters,
            "groups": sum(isinstance(each, FSDPModule) for each in sides[0].policy.adapter.transformer.modules()),
            "trained groups": 2 if lora else 3,
        }
    return found


def held_by(policy: Policy) -> list[int]:
    """Numbers that this rank holds of the network's weights, and of their gradients that are not reduced yet."""
    weights = gradients = 0
    for parameter in policy.adapter.transformer.parameters():
        own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        weights += own.numel()
        gradients += 0 if isinstance(parameter, DTensor) or parameter.grad is None else parameter.grad.numel()
    return [weights, gradients]


def bfloat16(ranks: Ranks) -> Numbers:
    """How far the trainer is from a generator that has loaded its weights, in log-probabilities, and one process likewise."""
    found: Numbers = {}
    for name, lora in (("lora", LORA), ("full", None)):
        overrides = {"model": {"lora": lora, "dtype": "bfloat16"}, "train": {"timestep_batch_size": GROUP_SIZE}}
        trainer, generator, alone = (ranks.build(group, **overrides) for group in (ranks.group, ALONE, ALONE))
        trainer.disturb()
        published = publish(trainer.policy, 0, compute_dtype=torch.bfloat16)
        HeldWeights(generator.policy, torch.bfloat16).load(published.manifest, published.buckets)
        alone.policy.load(trainer.weights(), source="the ranks")
        trajectories, own = generator.trajectories(), trainer.trajectories()
        for side in (trainer, alone):
            side.accumulate(trajectories, side.advantages(*REWARDS))
        found[name] = {
            "ranks": trainer.algorithm.largest,
            "alone": alone.algorithm.largest,
            "generates the same": all(
                torch.equal(mine.latents, theirs.latents) and torch.equal(mine.log_probs, theirs.log_probs)
                for mine, theirs in zip(own, trajectories, strict=True)
            ),
        }
    return found


def average(ranks: Ranks) -> Numbers:
    """The moving average, evaluation with it, and that training goes on with the trained weights."""
    found: Numbers = {}
    for name, lora in (("lora", LORA), ("full", None)):
        overrides = {
            "model": {"lora": lora},
            "train": {"ema": {"decay": 0.9}, "accumulate": "unsharded", "learning_rate": 1e-2},
            "eval": {"prompts": "builtin:shapes/heldout.jsonl", "num_inference_steps": 3},
        }
        alone, shared = sides = ranks.pair(**overrides)
        evaluations, before, after, middle = [], [], [], []
        for side in sides:
            for step in range(2):
                side.step(ranks.trajectories(side, step), side.advantages(*REWARDS))
            section, ema = side.recipe.eval, side.trainer.ema
            assert section is not None and ema is not None, "the recipe says so"
            sampler = EvaluationSampler(side.policy, ema, side.recipe, section)
            weights = digest(side.weights())
            before.append(side.predict())
            evaluations.append(sampler.generate(side.text))
            after.append(side.predict())
            assert digest(side.weights()) == weights, "the trained weights are back"
            # In the middle of an accumulation, where the ranks hold gathered weights.
            trajectories, advantages = ranks.trajectories(side, 2), side.advantages(*REWARDS)
            side.accumulate(trajectories[:1], advantages[:1], more_to_come=True)
            gathered_weights = held_by(side.policy)[0]
            middle.append(sampler.generate(side.text))
            side.trainer.accumulate(trajectories[1], side.text.select(torch.tensor([1])), advantages[1:])
            side.finish()
        with alone.trainer.ema.swapped():  # type: ignore[union-attr]
            averaged = alone.predict()
        found[name] = {
            "average": relative({n: whole(t) for n, t in shared.trainer.ema.average.items()}, dict(alone.trainer.ema.average)),  # type: ignore[union-attr]
            "evaluation": distance(evaluations[1], evaluations[0]),
            "evaluation in the middle": distance(middle[1], middle[0]),
            "between evaluation and trained": distance(averaged, alone.predict()),
            "prediction before": distance(before[1], before[0]),
            "prediction after": distance(after[1], after[0]),
            "weights at the end": relative(shared.weights(), alone.weights()),
            "gathered in the middle": gathered_weights,
            "numbers": sum(p.numel() for p in alone.policy.adapter.transformer.parameters()),
        }
    return found


def distance(ours: Tensor, wanted: Tensor) -> float:
    return float((ours - wanted).abs().max())


def checkpoint(ranks: Ranks) -> Numbers:
    """A checkpoint of these ranks, continued here and by one process."""
    found: Numbers = {}
    for name, overrides in CONTINUED.items():
        first = ranks.build(ranks.group, **overrides)
        for step in range(2):
            first.step(ranks.trajectories(first, step), first.advantages(*REWARDS))
        weights, state = first.trainer.weights(), {"trainer": first.trainer.counters()}
        if ranks.group.rank == 0:
            save_checkpoint(ranks.folder / name, first.policy.version, weights, state, keep_last=1)
        dist.barrier()
        found[name] = {"held": {part: len(tensors) for part, tensors in weights.items()}, **continued_from(ranks, name, first)}
    return found


def continued(ranks: Ranks) -> Numbers:
    """The same checkpoints, of two ranks, continued by as many as there are here."""
    return {name: continued_from(ranks, name) for name in CONTINUED}


CONTINUED = {
    "checkpoint-lora": {"train": {"ema": {"decay": 0.9}}},
    "checkpoint-full": {"model": {"lora": None}, "train": {"ema": {"decay": 0.9}}},
}


def continued_from(ranks: Ranks, name: str, *others: Side) -> Numbers:
    """One more step of sides that have loaded a checkpoint (one process, these ranks), and of others that never stopped."""
    alone, shared = ranks.pair(**CONTINUED[name])
    path = ranks.folder / name / "step-000002"
    for side in (alone, shared):
        side.trainer.restore(load_checkpoint(path))
    written = digests(parts_of(load_checkpoint(path).weights))
    same = digests(on_this_rank(alone)) == digests(on_this_rank(shared)) == written
    trajectories = ranks.trajectories(alone, 2)
    for side in (alone, shared, *others):
        side.step(trajectories, side.advantages(*REWARDS))
    ours, wanted = on_this_rank(shared), on_this_rank(alone)
    return {
        "loaded": same,
        "relative": {part: relative(ours[part], wanted[part]) for part in ours},
        "digests": [digests(on_this_rank(side)) for side in (shared, *others)],
    }


def parts_of(weights: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    kept = "exp_avg."
    momentum = {n.removeprefix(kept): t for n, t in weights["optimizer"].items() if n.startswith(kept)}
    return {**weights, "optimizer": momentum}


def publication(ranks: Ranks) -> Numbers:
    """What these ranks publish, and what one process with the same weights does."""
    found: Numbers = {}
    for name, lora in (("lora", LORA), ("full", None)):
        for dtype in (torch.float32, torch.bfloat16):
            publishers = []
            for side in ranks.pair(model={"lora": lora, "dtype": str(dtype).removeprefix("torch.")}):
                side.disturb()
                publishers.append(Publisher(side.policy, dtype, keep_previous=False, bucket_bytes=4096))
            published = [each.publish() for each in publishers]
            found[f"{name}, {dtype}"] = {
                "same manifest": published[0].manifest == published[1].manifest,
                "same bytes": all(map(np.array_equal, published[0].buckets, published[1].buckets)),
                "buckets": [len(each.buckets) for each in published],
                "announced": [each.num_buckets for each in publishers],
                "digest": published[1].manifest.digest,
            }
    return found


def auto(ranks: Ranks) -> Numbers:
    """Pairs in a pass by a budget of memory, where the last rank has less room than the others."""
    last = ranks.group.rank == ranks.group.size - 1
    ballast = torch.ones(BALLAST if last else 0, dtype=torch.uint8)
    _, everything = choose(ranks, 100.0, "unsharded")
    peaks = {pairs: measured.peak for pairs, measured in everything.measured.items()}
    side, some = choose(ranks, (peaks[4] + peaks[8]) / 2 / GIB, "sharded")
    found: Numbers = {
        "without a limit": [everything.pairs, everything.most],
        "between 4 and 8": some.pairs,
        "peaks": peaks,
        "line": some.line(),
    }
    try:
        choose(ranks, 0.01, "sharded")
    except ConfigError as error:
        found["too small"] = str(error)
        found["enough"] = float(error.fix.partition("memory_budget_gib=")[2].split()[0]) * GIB
    trajectory, text = wide_trajectory(side), side.text.select(torch.tensor([0]))
    advantages = by_hand(list(np.linspace(-1, 1, WIDE["num_generations"])))
    alone = ranks.build(ALONE, rollout=WIDE, train={"timestep_batch_size": "all"})
    for each in (alone, side):
        each.trainer.accumulate(trajectory, text, advantages)
        each.finish()
    found["relative"] = relative(side.momentum(), alone.momentum())
    counters = side.trainer.counters()
    resumed = ranks.build(ranks.group, rollout=WIDE, train={"timestep_batch_size": "auto", "memory_budget_gib": 0.01})
    weights = {"parameters": resumed.weights(), "optimizer": {}, "ema": {}}
    saved = Checkpoint(path=ranks.folder, policy_version=1, state={"trainer": counters}, weights=weights)
    resumed.trainer.restore(saved)
    resumed.trainer.accumulate(trajectory, text, advantages)
    found["kept"] = [some.pairs, counters["timestep_batch_size"], resumed.finish().common["timestep_batch_size"]]
    del ballast
    return found


BALLAST = 200 * 2**20
WIDE = {"num_generations": 12, "height": 256, "width": 256, "forward_batch_size": 12}
"""Pictures of 256 tokens, of which a pair takes a MiB or more."""


def choose(ranks: Ranks, budget_gib: float, accumulate: str) -> tuple[Side, BatchSize]:
    train = {"timestep_batch_size": "auto", "memory_budget_gib": budget_gib, "accumulate": accumulate}
    side = ranks.build(ranks.group, rollout=WIDE, train=train)
    found = side.trainer.choose_batch_size(wide_trajectory(side), side.text.select(torch.tensor([0])))
    assert found is not None, "it was not known before"
    assert all(parameter.grad is None for parameter in side.policy.parameters.values()), "what was tried has left no gradient"
    return side, found


def wide_trajectory(side: Side) -> Trajectory:
    """Of one group; not generated, for its shape alone matters. Its first latent is NaN, as one may be."""
    count, generator = side.recipe.rollout.num_generations, torch.Generator().manual_seed(3)
    schedule = side.policy.adapter.noise_schedule(STEPS + 1, 256, 256)
    latents = torch.randn(count, STEPS + 1, 4, 32, 32, generator=generator)
    latents[0, 0] = NAN
    return Trajectory(
        samples=tuple(SampleId(0, 0, sample) for sample in range(count)),
        policy_version=side.policy.version,
        sigmas=schedule.sigmas,
        noise_levels=torch.full((count, STEPS), 0.7),
        denoising_steps=torch.arange(STEPS).repeat(count, 1),
        latents=latents[:, :-1],
        next_latents=latents[:, 1:],
        log_probs=torch.full((count, STEPS), -1.0),
        final_latents=latents[:, -1],
    )


def stalled(ranks: Ranks) -> Numbers:
    """Seconds until each rank notices that the last one has stalled. The ranks are of no use afterwards."""
    ranks.meet(ranks.group.size // 2, timeout_s=STALL_TIMEOUT_S)
    group = ranks.group
    side = ranks.build(group)
    trajectories, advantages = ranks.trajectories(side), side.advantages(*REWARDS)
    dist.barrier()
    began = time.monotonic()
    if group.rank == group.size - 1:
        time.sleep(STALL_S)
        return {"failed after": 0.0}
    try:
        side.step(trajectories, advantages)
    except RuntimeError:
        return {"failed after": time.monotonic() - began}
    return {"failed after": None}


CHECKS: dict[str, Callable[[Ranks], Numbers]] = {
    each.__name__: each
    for each in (
        gradients,
        families,
        lora_families,
        few_gradients,
        all_gradients,
        three_steps,
        two_steps,
        invalid,
        few_invalid,
        packing,
        unsharded,
        bfloat16,
        average,
        checkpoint,
        continued,
        publication,
        auto,
        stalled,
    )
}


def main(arguments: Sequence[str], checks: Mapping[str, Callable[[Ranks], Numbers]]) -> None:
    """Do what the command line asks for, and end the process."""
    try:
        _do(arguments, checks)
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # threads of gloo may still wait for the others


def _do(arguments: Sequence[str], checks: Mapping[str, Callable[[Ranks], Numbers]]) -> None:
    folder, rank, size, *wanted = arguments
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    torch.set_num_threads(1)
    ranks, found = Ranks(Path(folder), int(rank), int(size)), {}
    met = 0
    for each in wanted:
        shard, _, check = each.partition(":")
        if int(shard) != met:
            met = int(shard)
            ranks.meet(met)
        began = time.perf_counter(), time.process_time()
        found[each] = checks[check](ranks)
        took = time.perf_counter() - began[0], time.process_time() - began[1]
        print(f"{each}: {took[0]:.1f} s, {took[1]:.1f} s of computing", file=sys.stderr, flush=True)
    (ranks.folder / f"{size}-{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:], CHECKS)
