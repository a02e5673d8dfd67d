"""Settings of the rewards that are made of a CLIP model."""

from __future__ import annotations

from pydantic import Field

from digenrl.config.settings.neural import NeuralSettings


class ClipSettings(NeuralSettings):
    """Which weights are used."""

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
