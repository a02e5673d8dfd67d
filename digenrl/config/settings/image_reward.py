"""Settings of the reward ``image_reward``."""

from __future__ import annotations

from pydantic import Field

from digenrl.config.settings.neural import NeuralSettings


class ImageRewardSettings(NeuralSettings):
    """Which weights are used."""

    path: str = Field(
        default="THUDM/ImageReward",
        min_length=1,
        description="Hub id, folder or file: ImageReward.pt, or the same tensors as ImageReward.safetensors.",
    )
    tokenizer_path: str = Field(
        default="google-bert/bert-base-uncased", min_length=1, description="Folder or hub id of BERT's tokenizer."
    )
