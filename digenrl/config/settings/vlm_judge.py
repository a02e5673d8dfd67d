"""Settings of the reward ``vlm_judge``, and what any judge is asked and how its answer is read."""

from __future__ import annotations

import re
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from digenrl.config.settings.remote_rewards import ServiceSettings, ServiceUrl

PLACEHOLDER = "{prompt}"
DEFAULT_TEMPLATE = (
    "This was generated for the prompt: {prompt} -- How well does it show what the prompt asks for? 0: nothing of it. 10: all of "
    "it, without a flaw. "
    'Answer with JSON alone, like {"score": 5}.'
)


class JudgeSettings(BaseModel):
    """What a vision-language model is asked, and how its answer is read."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    template: str = Field(
        default=DEFAULT_TEMPLATE,
        description="What is asked beside the picture; {prompt}, which must stand in it, becomes the sample's prompt.",
    )
    system: str = Field(default="", description="System message; none is sent if empty.")
    score_key: str | None = Field(
        default=None, min_length=1, description="Key of the score in an answer that is one JSON object; `score` if not given."
    )
    score_regex: str | None = Field(
        default=None,
        description="Instead of score_key: a regular expression with one group, the score, that matches once in the answer.",
    )
    minimum: float = Field(default=0.0, description="Least score; an answer below it is invalid.")
    maximum: float = Field(default=10.0, description="Highest score; an answer above it is invalid.")
    num_frames: int = Field(
        default=4, ge=1, le=256, description="Frames of a video that are shown, the first and the last among them."
    )
    max_tokens: int = Field(default=64, ge=1, le=65536, description="Longest answer, in tokens.")

    @model_validator(mode="after")
    def _can_be_asked_and_read(self) -> Self:
        if PLACEHOLDER not in self.template:
            raise ValueError(f"template does not contain {PLACEHOLDER}: the judge would not know what was asked for. Put it in.")
        if self.score_key is not None and self.score_regex is not None:
            raise ValueError("score_key and score_regex are two ways to read an answer. Leave one of them out.")
        if self.score_regex is not None:
            try:
                groups = re.compile(self.score_regex).groups
            except re.error as error:
                raise ValueError(f"score_regex is not a regular expression: {error}") from error
            if groups != 1:
                raise ValueError(rf"score_regex has {groups} groups, and needs one, around the score: Score: (\d+)")
        if not self.minimum < self.maximum:
            raise ValueError(f"minimum ({self.minimum:g}) is not below maximum ({self.maximum:g})")
        return self


class VlmJudgeSettings(JudgeSettings, ServiceSettings):
    """Which model is asked, and where it is."""

    url: ServiceUrl = Field(
        description="Base address of an OpenAI-compatible endpoint (vLLM, SGLang, a hosted one), to which /chat/completions is "
        "added: http://HOST:8000/v1."
    )
    model: str = Field(min_length=1, description="Name of the model, as the endpoint lists it.")
    api_key_env: str | None = Field(
        default=None, min_length=1, description="Environment variable that holds the endpoint's key; no key is sent if not given."
    )
    temperature: float = Field(default=0.0, ge=0, le=2, description="Of the answer; 0 takes the likeliest word each time.")
    self_test: bool = Field(
        default=True,
        description="Show it a drawn circle and noise at the start, and refuse a judge that does not prefer the circle; false "
        "where the template asks for something else.",
    )
