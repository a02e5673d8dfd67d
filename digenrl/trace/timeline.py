"""A run as a timeline: the nouns that trace.spans finds in a trace, and that charts and statistics are made of."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from digenrl.ids import MicroBatchId, WorkerId
from digenrl.scheduling.commands import (
    Accumulate,
    Encode,
    Evaluate,
    Generate,
    OptimizerStep,
    SaveCheckpoint,
    Score,
    SwitchMode,
    SyncWeights,
    WorkerCommand,
)
from digenrl.scheduling.settings import SchedulerSettings


class Kind(StrEnum):
    """What a worker is busy with."""

    ENCODE = "encode"
    GENERATE = "generate"
    TAG = "TAG"
    """Generation by an idle trainer."""
    STALE_GENERATE = "stale generate"
    """Generation for the next step with the present weights (TCSS)."""
    SCORE = "score"
    UPDATE = "update"
    SWITCH = "switch"
    OPTIMIZER = "optimizer"
    SYNC = "sync"
    SAVE = "save"
    EVALUATE = "evaluate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One command, from the instant at which it was given to the one at which it ended."""

    worker: WorkerId
    kind: Kind
    start_us: int
    end_us: int
    command: WorkerCommand
    policy_version: int
    """Of the trajectory that is made or used, or of the weights that are loaded or measured; else the one in training."""
    stale: bool = False
    """Whether the trajectory that is made, scored or accumulated is one version old."""
    ended: Literal["finished", "failed", "lost", "open"] = "finished"
    """``lost``: its worker was; ``open``: the trace stops before its end."""

    @property
    def tag(self) -> bool:
        """Whether the trainer generates."""
        return self.kind is Kind.TAG

    @property
    def micro_batch(self) -> MicroBatchId | None:
        """What it works on, if it is one micro-batch."""
        return self.command.micro_batch if isinstance(self.command, Generate | Score | Accumulate) else None

    @property
    def duration_us(self) -> int:
        """Length."""
        return self.end_us - self.start_us


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Time of one worker without a command."""

    worker: WorkerId
    start_us: int
    end_us: int
    why: Literal["bubble", "idle", "done", "lost"]
    """``bubble``: the trainer, while its step is unfinished; ``idle``: any other worker then; ``done``: no step is left."""

    @property
    def duration_us(self) -> int:
        """Length."""
        return self.end_us - self.start_us


class Mark(StrEnum):
    """What happened at an instant."""

    WORKER_LOST = "worker lost"
    WORKER_JOINED = "worker joined"
    WORKER_OVERDUE = "worker overdue"
    TRAJECTORY_LOST = "trajectory lost"
    CONDITIONING_LOST = "conditioning lost"
    PUBLISHED = "version published"
    STOPPED = "run stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Instant:
    """Something that happened and took no time."""

    at_us: int
    mark: Mark
    worker: WorkerId | None = None
    """The worker concerned; of a lost trajectory, the one that had generated it; of encoded prompts, that had encoded them."""
    micro_batch: MicroBatchId | None = None
    policy_version: int | None = None
    """Of PUBLISHED: the version that exists from now on."""
    text: str = ""
    """One clause for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLengths:
    """Micro-batches of the step in training that wait, from this instant to the next sample."""

    at_us: int
    policy_version: int
    """Completed steps, which is also the step in training."""
    pending: int
    scoring: int
    """SQ: generated, not yet being scored."""
    update: int
    """UQ: scored, not yet being accumulated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Workers of one role."""

    name: Literal["generators", "scorers", "trainer", "colocated"]
    workers: tuple[WorkerId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """A whole trace as a timeline."""

    settings: SchedulerSettings
    source: str
    """As in Trace."""
    start_us: int
    end_us: int
    """First and last event."""
    spans: tuple[Span, ...]
    """By start, then in the order of ``settings.workers``."""
    gaps: tuple[Gap, ...]
    instants: tuple[Instant, ...]
    queues: tuple[QueueLengths, ...]

    @property
    def duration_us(self) -> int:
        """From the first event to the last."""
        return self.end_us - self.start_us

    @property
    def bubbles(self) -> tuple[Gap, ...]:
        """Time in which the trainer had no command and its step was unfinished."""
        return tuple(gap for gap in self.gaps if gap.why == "bubble")

    @property
    def published(self) -> tuple[Instant, ...]:
        """One instant per completed step, the first one of step ``settings.first_version``."""
        return tuple(instant for instant in self.instants if instant.mark is Mark.PUBLISHED)

    @property
    def pools(self) -> tuple[Pool, ...]:
        """The pools that the run has, in the order in which they are shown."""
        settings = self.settings
        if settings.one_pool:
            return (Pool(name="colocated", workers=settings.generators),)
        scorers = (Pool(name="scorers", workers=settings.scorers),) if settings.scorers else ()
        trainer = Pool(name="trainer", workers=(settings.trainer,))
        return (Pool(name="generators", workers=settings.generators), *scorers, trainer)

    def pools_of_at_most(self, count: int) -> tuple[Pool, ...]:
        """The pools with the last workers of the largest ones left out, so that a chart has room for the rest."""
        members = {pool.name: list(pool.workers) for pool in self.pools}
        while sum(map(len, members.values())) > count:
            max(members.values(), key=len).pop()
        return tuple(Pool(name=name, workers=tuple(workers)) for name, workers in members.items())


def describe(command: WorkerCommand) -> str:
    """What a command is about, in as few characters as tell it: ``0.3``, ``step 2``, ``version 1``."""
    match command:
        case Generate() | Score() | Accumulate():
            return str(command.micro_batch)
        case Encode() | OptimizerStep():
            return f"step {command.step}"
        case SyncWeights() | Evaluate() | SaveCheckpoint():
            return f"version {command.policy_version}"
        case SwitchMode():
            return "to generating" if command.generating else "to training"
