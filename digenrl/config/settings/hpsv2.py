"""Settings of the reward ``hpsv2``."""

from __future__ import annotations

from pydantic import Field

from digenrl.config.settings.neural import NeuralSettings


class HpsV2Settings(NeuralSettings):
    """Which weights are used."""

    path: str = Field(
        default="xswu/HPSv2",
        min_length=1,
        description="Hub id, folder or file: HPS_v2.1_compressed.pt, or the same tensors as HPS_v2.1_compressed.safetensors.",
    )
    tokenizer_path: str = Field(
        default="laion/CLIP-ViT-H-14-laion2B-s32B-b79K", min_length=1, description="Folder or hub id of the tokenizer."
    )
