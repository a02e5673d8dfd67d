"""What the settings of every reward with a network have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class NeuralSettings(BaseModel):
    """Where a network runs, how many samples it sees at once, and whether it is tried at the start."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    device: str = Field(
        default="auto", pattern=r"^(auto|cpu|cuda(:[0-9]+)?)$", description="auto (a GPU if there is one), cpu, cuda or cuda:N."
    )
    forward_batch_size: int = Field(
        default=8,
        ge=1,
        le=4096,
        description="Samples in one forward pass; short batches are padded to it, so that numbers repeat.",
    )
    self_test: bool = Field(
        default=True,
        description="Check at the start that a good sample beats a bad one; false for models that are not trained.",
    )
