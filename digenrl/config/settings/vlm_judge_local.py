"""Settings of the reward ``vlm_judge_local``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from digenrl.config.settings.neural import NeuralSettings
from digenrl.config.settings.vlm_judge import JudgeSettings


class QwenVlSettings(NeuralSettings):
    """How a vision-language model of the Qwen family is held and what it is shown."""

    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        default="auto", description="Of the weights and of the passes; auto: bfloat16 on a GPU, float32 on a CPU."
    )


class VlmJudgeLocalSettings(JudgeSettings, QwenVlSettings):
    """Which model is asked, and what counts of its answer."""

    path: str = Field(
        default="Qwen/Qwen2.5-VL-7B-Instruct",
        min_length=1,
        description="Folder or hub id of a Qwen2-VL, Qwen2.5-VL or Qwen3-VL in transformers' format, with safetensors.",
    )
    read: Literal["answer", "yes"] = Field(
        default="answer",
        description="answer: the number in what the model writes; yes: P(yes) / (P(yes) + P(no)) for its first token, 0 to 1, "
        "so the template must ask a question of yes or no.",
    )
    max_pixels: int = Field(
        default=1280 * 28 * 28,
        ge=56 * 56,
        description="Pixels of a picture that the model is shown; larger ones are made smaller.",
    )
