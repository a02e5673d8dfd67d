"""What the ids of commands stand for: prompts, conditioning, trajectories, rewards, advantages of the steps in flight.

Invariants: a reward is stored under its own sample's place, checked by id; batch statistics are computed only from a
complete step; what is accumulated is forgotten, so memory does not grow with steps.

Whether data or references to it lie here is the executor's choice (``C`` and ``T``): tensors in one process, object references
on a cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from digenrl.algorithms.base import Algorithm, GroupAdvantages, RewardTable
from digenrl.config.schema import Recipe
from digenrl.data.prompts import Prompt
from digenrl.data.sampler import PromptSampler
from digenrl.errors import ProtocolError
from digenrl.ids import MicroBatchId, SampleId
from digenrl.rewards.compose import Effort, Rewards
from digenrl.scheduling.micro_batches import MicroBatch, cut_into_micro_batches

C = TypeVar("C")
"""What encoded prompts are kept as."""
T = TypeVar("T")
"""What the trajectory of a micro-batch is kept as."""


@dataclass(slots=True)
class StepRecord(Generic[C, T]):
    """One step while it is in flight."""

    prompts: tuple[Prompt, ...]
    conditioning: C | None = None
    trajectories: dict[int, T] = field(default_factory=dict)
    """By index of the micro-batch; gone once accumulated."""
    rewards: NDArray[np.float64] = field(default_factory=lambda: np.empty((0, 0)))
    """[P, G], NaN until scored and where invalid."""
    parts: dict[str, dict[int, NDArray[np.float64]]] = field(default_factory=dict)
    """Rewards and their parts, by name and micro-batch."""
    efforts: dict[str, dict[int, Effort]] = field(default_factory=dict)
    """What scoring took, by reward and micro-batch."""
    scored: set[int] = field(default_factory=set)
    """Indices of scored micro-batches."""
    accumulated: int = 0
    """Micro-batches whose gradient is in."""
    update: int = 0
    """Optimizer steps of it that are done."""


class Ledger(Generic[C, T]):
    """The data behind the ids."""

    def __init__(self, sampler: PromptSampler, algorithm: Algorithm, recipe: Recipe) -> None:
        self._sampler = sampler
        self._algorithm = algorithm
        self._num_generations = recipe.rollout.num_generations
        self._micro_batches = cut_into_micro_batches(recipe.rollout.prompts_per_step, recipe.groups_in_micro_batch)
        self._reward_names = tuple(reward.name for reward in recipe.rewards)
        self._batch_statistics = recipe.schedule.update_after == "step"
        self._steps: dict[int, StepRecord[C, T]] = {}

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a user should know about the prompts before the run."""
        return self._sampler.warnings

    def step(self, step: int) -> StepRecord[C, T]:
        """The record of a step, made on first use."""
        if step not in self._steps:
            prompts = self._sampler.prompts_of_step(step)
            rewards = np.full((len(prompts), self._num_generations), np.nan)
            self._steps[step] = StepRecord(prompts=prompts, rewards=rewards)
        return self._steps[step]

    def micro_batch(self, micro_batch: MicroBatchId) -> MicroBatch:
        """Which prompts a micro-batch holds."""
        return self._micro_batches[micro_batch.index]

    def samples(self, micro_batch: MicroBatchId) -> tuple[SampleId, ...]:
        """All samples of a micro-batch, by prompt and then sample."""
        return tuple(
            SampleId(micro_batch.step, prompt, sample)
            for prompt in self.micro_batch(micro_batch).prompts
            for sample in range(self._num_generations)
        )

    def conditioning(self, step: int) -> C:
        """The step's encoded prompts. Raises ProtocolError before they are encoded."""
        conditioning = self.step(step).conditioning
        if conditioning is None:
            raise ProtocolError(f"The prompts of step {step} are not encoded yet.", fix="Encode before generating.")
        return conditioning

    def add_rewards(self, micro_batch: MicroBatchId, samples: Sequence[SampleId], rewards: Rewards) -> None:
        """Store the rewards of a micro-batch, each under its sample's id. Raises ProtocolError for foreign samples."""
        if tuple(samples) != self.samples(micro_batch):
            raise ProtocolError(
                f"Micro-batch {micro_batch} was scored with the samples of another one.",
                fix="This is a bug; please report it with the run's trace.jsonl.",
            )
        record = self.step(micro_batch.step)
        for sample, value in zip(samples, rewards.totals, strict=True):
            record.rewards[sample.prompt, sample.sample] = value
        for name, values in rewards.parts.items():
            record.parts.setdefault(name, {})[micro_batch.index] = values
        for name, effort in rewards.efforts.items():
            record.efforts.setdefault(name, {})[micro_batch.index] = effort
        record.scored.add(micro_batch.index)

    def discard(self, micro_batch: MicroBatchId) -> None:
        """Forget what a micro-batch was generated and scored to: its trajectory is gone, and it is generated anew."""
        record = self.step(micro_batch.step)
        record.trajectories.pop(micro_batch.index, None)
        record.scored.discard(micro_batch.index)
        record.rewards[list(self.micro_batch(micro_batch).prompts)] = np.nan
        for pieces in record.parts.values():
            pieces.pop(micro_batch.index, None)
        for efforts in record.efforts.values():
            efforts.pop(micro_batch.index, None)

    def advantages(self, micro_batch: MicroBatchId) -> list[GroupAdvantages]:
        """Advantages of the groups of a scored micro-batch, in order of prompt."""
        record, prompts = self.step(micro_batch.step), self.micro_batch(micro_batch).prompts
        if self._batch_statistics:
            assert len(record.scored) == len(self._micro_batches), "update_after: step holds updates until all is scored"
            groups = self._algorithm.advantages(self._rewards(record, range(len(record.prompts))))
            return [groups[prompt] for prompt in prompts]
        return self._algorithm.advantages(self._rewards(record, prompts))

    def _rewards(self, record: StepRecord[C, T], prompts: Sequence[int]) -> RewardTable:
        """The rewards of some groups of a step."""
        rows, by_reward = list(prompts), {}
        for name in self._reward_names:
            # Emulated workers score no reward by name: what they answer stands for each.
            values = record.rewards.copy()
            for index, piece in record.parts.get(name, {}).items():
                values[list(self._micro_batches[index].prompts)] = piece.reshape(-1, self._num_generations)
            by_reward[name] = values[rows]
        return RewardTable(total=record.rewards[rows], by_reward=by_reward)

    def close_step(self, step: int) -> StepRecord[C, T]:
        """Forget a step and return its record."""
        return self._steps.pop(step)
