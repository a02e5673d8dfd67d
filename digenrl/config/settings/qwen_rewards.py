"""Settings of the rewards that are a Qwen2-VL with a head of their own: ``hpsv3`` and ``video_align``."""

from __future__ import annotations

from pydantic import Field, model_validator

from digenrl.config.settings.vlm_judge_local import QwenVlSettings


class HpsV3Settings(QwenVlSettings):
    """Which weights are used, and what the model is asked."""

    path: str = Field(
        default="MizzenAI/HPSv3", min_length=1, description="Hub id, folder or file of the weights: HPSv3.safetensors."
    )
    base_path: str = Field(
        default="Qwen/Qwen2-VL-7B-Instruct",
        min_length=1,
        description="Folder or hub id of the model that HPSv3 was made from: its configuration and tokenizer, no weights.",
    )
    template_path: str = Field(
        min_length=1,
        description="Text file with what the model was trained to be asked, with {text_prompt} and <|Reward|>; "
        "docs/rewards/hpsv3.md says how to get it.",
    )


class VideoAlignSettings(QwenVlSettings):
    """Which weights are used, what the model is asked, and what counts of its three answers."""

    path: str = Field(
        min_length=1,
        description="Folder with VideoReward's model_config.json and checkpoint-N/model.pth (or model.safetensors).",
    )
    base_path: str = Field(
        default="Qwen/Qwen2-VL-2B-Instruct",
        min_length=1,
        description="Folder or hub id of the model that VideoReward was made from: its configuration and tokenizer, no weights.",
    )
    template_path: str = Field(
        min_length=1,
        description="Text file with what the model was trained to be asked, with {text_prompt}, <|VQ_reward|>, <|MQ_reward|> and "
        "<|TA_reward|>; docs/rewards/video_align.md says how to get it.",
    )
    vq_weight: float = Field(default=1.0, description="Weight of the visual quality in the score.")
    mq_weight: float = Field(default=1.0, description="Weight of the motion's quality in the score.")
    ta_weight: float = Field(default=1.0, description="Weight of the alignment with the prompt in the score.")

    @model_validator(mode="after")
    def _something_counts(self) -> VideoAlignSettings:
        if self.vq_weight == self.mq_weight == self.ta_weight == 0:
            raise ValueError("vq_weight, mq_weight and ta_weight are all 0: the score would be 0. Give one of them a weight.")
        return self
