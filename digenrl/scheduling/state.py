"""What the scheduler knows: the stage of every micro-batch, the queues, and which worker does what.

Every change of a micro-batch's stage is a row of ``TRANSITIONS``; anything else is a ProtocolError, raised before
anything has changed. Invariant: a micro-batch is accumulated exactly once, and only into the step that it belongs to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from digenrl.errors import ProtocolError
from digenrl.ids import MicroBatchId, WorkerId
from digenrl.scheduling.commands import Accumulate, Generate, Score, WorkerCommand


class Stage(StrEnum):
    """Where a micro-batch is on its way from prompts to gradient."""

    PENDING = "pending"
    GENERATING = "generating"
    SCORING_QUEUE = "scoring_queue"
    SCORING = "scoring"
    UPDATE_QUEUE = "update_queue"
    UPDATING = "updating"
    ACCUMULATED = "accumulated"


Move = tuple[type[WorkerCommand], Literal["started", "finished"]]
TRANSITIONS: dict[tuple[Stage, Move], Stage] = {
    (Stage.PENDING, (Generate, "started")): Stage.GENERATING,
    (Stage.GENERATING, (Generate, "finished")): Stage.SCORING_QUEUE,
    (Stage.SCORING_QUEUE, (Score, "started")): Stage.SCORING,
    (Stage.SCORING, (Score, "finished")): Stage.UPDATE_QUEUE,
    (Stage.UPDATE_QUEUE, (Accumulate, "started")): Stage.UPDATING,
    (Stage.UPDATING, (Accumulate, "finished")): Stage.ACCUMULATED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """All that the schedule depends on; written into the head of every trace."""

    steps: int
    """RL steps of the run."""
    micro_batches: int
    """Micro-batches B of one step."""
    generators: tuple[WorkerId, ...]
    """Workers that encode, generate and score, in order of index."""
    trainer: WorkerId
    """Worker that accumulates and steps; may be one of the generators (one pool that works in turn)."""
    update_order: Literal["arrival", "index"] = "arrival"
    update_after: Literal["group", "step"] = "group"
    max_skipped_steps: int = 3
    """Voided steps in a row that stop the run."""
    evaluate_at: tuple[int, ...] = ()
    """Policy versions to evaluate, ascending."""

    def __post_init__(self) -> None:
        """Refuse with a ValueError what no schedule can carry out: it would wait for ever, or finish with work undone."""
        if self.steps < 0 or self.micro_batches < 1 or self.max_skipped_steps < 1:
            raise ValueError(
                f"steps ({self.steps}), micro_batches ({self.micro_batches}) and max_skipped_steps ({self.max_skipped_steps}) "
                "must be at least 0, 1 and 1"
            )
        if not self.generators or len(set(self.generators)) < len(self.generators):
            raise ValueError(f"generators {self.generators} must be distinct, and at least one")
        if list(self.evaluate_at) != sorted(set(self.evaluate_at)) or not set(self.evaluate_at) <= set(range(self.steps + 1)):
            raise ValueError(f"evaluate_at {self.evaluate_at} must be ascending versions from 0 to {self.steps}")

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        """All workers, generators first: the order in which they are given work."""
        return self.generators if self.trainer in self.generators else (*self.generators, self.trainer)


@dataclass(slots=True)
class Worker:
    """One worker as the scheduler sees it."""

    policy_version: int = 0
    running: WorkerCommand | None = None


@dataclass(slots=True)
class ScheduleState:
    """The one mutable object of the schedule, owned by the Scheduler."""

    settings: SchedulerSettings
    workers: dict[WorkerId, Worker] = field(default_factory=dict)
    started: bool = False
    policy_version: int = 0
    """Completed RL steps, which is also the step that is being trained."""
    encoded: bool = False
    """Whether the prompts of the step in training are encoded."""
    stages: dict[MicroBatchId, Stage] = field(default_factory=dict)
    """Stage of every micro-batch of the step in training, by index."""
    scoring_queue: list[MicroBatchId] = field(default_factory=list)
    """SQ: generated, not yet scored; oldest first."""
    update_queue: list[MicroBatchId] = field(default_factory=list)
    """UQ: scored, not yet accumulated; in order of arrival."""
    evaluations: list[int] = field(default_factory=list)
    """Versions still to be evaluated, ascending."""
    skipped_in_a_row: int = 0
    stopped: bool = False

    def __post_init__(self) -> None:
        self.workers = {worker: Worker() for worker in self.settings.workers}
        self.evaluations = list(self.settings.evaluate_at)
        self.open_step()

    @property
    def work_left(self) -> bool:
        """Whether a step is still to be trained."""
        return self.policy_version < self.settings.steps and not self.stopped

    def open_step(self) -> None:
        """Put all micro-batches of the step in training into the pending pool."""
        self.encoded = False
        step = self.policy_version
        self.stages = {MicroBatchId(step, index): Stage.PENDING for index in range(self.settings.micro_batches)}

    def at(self, stage: Stage) -> Iterator[MicroBatchId]:
        """Micro-batches at a stage, by index."""
        return (micro_batch for micro_batch, its in self.stages.items() if its is stage)

    def all_at(self, *stages: Stage) -> bool:
        """Whether every micro-batch of the step is at one of these stages."""
        return all(stage in stages for stage in self.stages.values())

    def target(self, micro_batch: MicroBatchId, move: Move) -> Stage:
        """The stage that a move leads to. Raises ProtocolError when the table has no such move."""
        stage = self.stages.get(micro_batch)
        target = TRANSITIONS.get((stage, move)) if stage is not None else None
        if target is None:
            raise ProtocolError(
                f"{move[0].__name__} of micro-batch {micro_batch} cannot have {move[1]}: "
                f"it is {stage or f'not of step {self.policy_version}'}.",
                why="Each micro-batch is generated, scored and accumulated exactly once.",
                fix="This is a bug in the executor; please report it with the run's trace.jsonl.",
            )
        return target

    def move(self, micro_batch: MicroBatchId, move: Move) -> None:
        """Change a stage and keep the queues in step with it."""
        target = self.target(micro_batch, move)
        queues = {Stage.SCORING_QUEUE: self.scoring_queue, Stage.UPDATE_QUEUE: self.update_queue}
        left = queues.get(self.stages[micro_batch])
        if left is not None:
            left.remove(micro_batch)
        self.stages[micro_batch] = target
        joined = queues.get(target)
        if joined is not None:
            joined.append(micro_batch)

    def updatable(self) -> MicroBatchId | None:
        """The micro-batch to accumulate next, or None while the order or ``update_after`` forbids all of them."""
        if self.settings.update_after == "step" and not self.all_at(Stage.UPDATE_QUEUE, Stage.UPDATING, Stage.ACCUMULATED):
            return None
        if self.settings.update_order == "arrival":
            return self.update_queue[0] if self.update_queue else None
        # By index: the next one of the step, and only that one.
        following = next((m for m, stage in self.stages.items() if stage is not Stage.ACCUMULATED), None)
        return following if following in self.update_queue else None
