"""Names of things, ordered and hashable, and of outcomes; no behaviour. All that crosses a process border carries one."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

PolicyVersion = NewType("PolicyVersion", int)
"""Number of completed RL steps whose weights a policy has; the pretrained model is version 0."""

WorkerId = NewType("WorkerId", str)
"""Name of one worker, unique in a run, for people reading a trace: ``generator-3``."""


@dataclass(frozen=True, slots=True, order=True)
class SampleId:
    """One picture or clip of one prompt of one RL step."""

    step: int
    """RL step, from 0."""
    prompt: int
    """Index of the prompt inside its step, 0..P-1. Groups are keyed by this, never by the text."""
    sample: int
    """Index inside the prompt's group, 0..G-1."""

    def __str__(self) -> str:
        return f"{self.step}/{self.prompt}/{self.sample}"


@dataclass(frozen=True, slots=True, order=True)
class MicroBatchId:
    """One micro-batch (whole prompt groups) of one RL step."""

    step: int
    index: int

    def __str__(self) -> str:
        return f"{self.step}.{self.index}"


class StepOutcome(StrEnum):
    """How an optimizer step ended. The policy version advances in all three cases."""

    APPLIED = "applied"
    EMPTY = "empty"
    """Z = 0: no valid pair to learn from; weights and optimizer unchanged."""
    VOIDED = "voided"
    """The gradient was not finite; weights and optimizer unchanged."""
