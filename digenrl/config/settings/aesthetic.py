"""Settings of the reward ``aesthetic``."""

from __future__ import annotations

from pydantic import Field

from digenrl.config.settings.neural import NeuralSettings


class AestheticSettings(NeuralSettings):
    """Which weights are used."""

    path: str = Field(
        default="trl-lib/ddpo-aesthetic-predictor",
        min_length=1,
        description="Hub id, folder or file of the predictor's head: aesthetic-model.pth, sac+logos+ava1-l14-linearMSE.pth, or "
        "the same tensors as .safetensors.",
    )
    clip_path: str = Field(
        default="openai/clip-vit-large-patch14",
        min_length=1,
        description="Folder or hub id of CLIP ViT-L/14 in transformers' format, with safetensors and preprocessor_config.json.",
    )
