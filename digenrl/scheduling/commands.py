"""What the scheduler asks workers to do. Ids and numbers only; every command says why it was chosen.

A worker carries out one command at a time, and none is interrupted.
"""

from __future__ import annotations

from dataclasses import dataclass

from digenrl.ids import MicroBatchId, WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Encode:
    """Encode the prompts of one step, once, on a worker that holds the text encoders."""

    worker: WorkerId
    step: int
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generate:
    """Run all denoising steps of one micro-batch under one policy."""

    worker: WorkerId
    micro_batch: MicroBatchId
    policy_version: int
    """Weights to use for the whole trajectory; never mixed inside one."""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Decode one generated micro-batch and compute its rewards."""

    worker: WorkerId
    micro_batch: MicroBatchId
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulate:
    """Add the gradient of one scored micro-batch; the weights do not change."""

    worker: WorkerId
    micro_batch: MicroBatchId
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchMode:
    """Turn the trainer from training to generating or back; the command that needs it follows at once."""

    worker: WorkerId
    generating: bool
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStep:
    """Divide the summed gradient by Z, clip it, and change the weights: the end of one RL step, or of one of its updates."""

    worker: WorkerId
    step: int
    update: int = 0
    """Which of the ``updates_per_rollout`` updates of the step; the version advances after the last one."""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncWeights:
    """Publish a version (the trainer) or load it (everyone else), between two trajectories.

    Buffered: a generator may be told to load while the trainer still publishes. The executor lets the load wait for the bytes.
    """

    worker: WorkerId
    policy_version: int
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluate:
    """Measure the rewards of a version on held-out prompts; changes nothing."""

    worker: WorkerId
    policy_version: int
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCheckpoint:
    """Write the trainer's whole state of a version, between two steps."""

    worker: WorkerId
    policy_version: int
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRun:
    """End the run as failed. Addressed to the driver, not to a worker."""

    reason: str


WorkerCommand = Encode | Generate | Score | Accumulate | SwitchMode | OptimizerStep | SyncWeights | SaveCheckpoint | Evaluate
Command = WorkerCommand | StopRun
