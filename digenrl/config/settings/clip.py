"""Settings of the rewards that are made of a CLIP model."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class ClipSettings(BaseModel):
    """Which weights are used, and where they run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str = Field(
        default="openai/clip-vit-large-patch14",
        min_length=1,
        description="Folder or hub id of a CLIP model in transformers' format, with safetensors.",
    )
    tokenizer_path: str | None = Field(
        default=None,
        min_length=1,
        description="Folder or hub id of its tokenizer and preprocessor_config.json; path if not given.",
    )
    device: str = Field(
        default="auto", pattern=r"^(auto|cpu|cuda(:[0-9]+)?)$", description="auto (a GPU if there is one), cpu, cuda or cuda:N."
    )
    forward_batch_size: int = Field(
        default=8,
        ge=1,
        le=4096,
        description="Images in one forward pass; short batches are padded to it, so that numbers repeat.",
    )
    self_test: bool = Field(
        default=True, description="Check at the start that a drawn circle beats noise; false for models that are not trained."
    )


class PickScoreSettings(ClipSettings):
    """As ``clip_score``, with the weights of PickScore."""

    path: str = Field(
        default="yuvalkirstain/PickScore_v1",
        min_length=1,
        description="Folder or hub id of PickScore in transformers' format, with safetensors.",
    )
    tokenizer_path: str | None = Field(
        default="laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
        min_length=1,
        description="Folder or hub id of its tokenizer and preprocessor_config.json; path if null.",
    )
