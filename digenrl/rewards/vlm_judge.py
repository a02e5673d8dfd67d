"""The reward ``vlm_judge``: a vision-language model looks at each picture and gives a number (chat completions, as OpenAI's API).

Invariants: a score is read strictly or not at all: an answer with no score, two, or one out of range makes its sample invalid
(NaN) and is counted in the part ``unreadable``; an endpoint that fails stops the run (see http), and is never a score.
"""

from __future__ import annotations

import base64
import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from digenrl.config.settings.vlm_judge import PLACEHOLDER, VlmJudgeSettings
from digenrl.errors import ConfigError, RewardUnavailable
from digenrl.ids import SampleId
from digenrl.rewards.answers import read_score, spread
from digenrl.rewards.base import RewardSample, Score
from digenrl.rewards.http import Endpoint, Service, UnreadableAnswer, ask_each
from digenrl.rewards.remote.media import png_bytes
from digenrl.rewards.self_test import GoodAndBad, circle_and_noise


class VlmJudgeReward:
    """Asks an OpenAI-compatible endpoint, one request for each sample."""

    Settings = VlmJudgeSettings
    media = ("image", "video")

    def __init__(self, settings: VlmJudgeSettings) -> None:
        """Raises ConfigError when the endpoint, its key or the model is not there."""
        self._settings = settings
        self._service = Service(
            Endpoint(
                name="vlm_judge",
                url=settings.url,
                timeout_s=settings.timeout_s,
                deadline_s=settings.deadline_s,
                headers=_key_header(settings.api_key_env),
            ),
            connections=settings.max_inflight,
        )
        try:
            models = self._service.get("/models", _read_models, deadline_s=settings.start_timeout_s)
        except RewardUnavailable as error:
            raise ConfigError(
                error.what,
                why="The endpoint is asked for its models before anything is generated, so that no work is lost.",
                fix="Check that url is the base of an OpenAI-compatible API (it usually ends with /v1), that it runs, and "
                "api_key_env.",
            ) from error
        if settings.model not in models:
            raise ConfigError(
                f"The endpoint {settings.url} has no model {settings.model!r}.",
                why=f"It lists: {', '.join(models[:10]) or 'none'}.",
                fix="Set model to one of these.",
            )

    def score(self, samples: Sequence[RewardSample]) -> Mapping[SampleId, Score]:
        """The judge's number for each sample. Raises RewardUnavailable when the endpoint does not answer."""

        def ask(sample: RewardSample, stop: Any) -> Score:
            text = self._service.post("/chat/completions", self._request(sample), _read_content, stop)
            value = read_score(text, self._settings)
            return Score(value=value, parts={"unreadable": float(math.isnan(value))})

        scores = ask_each(samples, ask, at_once=self._settings.max_inflight)
        return {sample.id: score for sample, score in zip(samples, scores, strict=True)}

    def self_test(self) -> GoodAndBad | None:
        """A drawn circle must beat noise."""
        return circle_and_noise() if self._settings.self_test else None

    def take_retries(self) -> int:
        """See Reward."""
        return self._service.take_retries()

    def _request(self, sample: RewardSample) -> bytes:
        settings = self._settings
        pictures = [
            {"type": "image_url", "image_url": {"url": _data_url(frame)}} for frame in spread(sample.frames, settings.num_frames)
        ]
        # Not str.format: templates show JSON, which is full of braces.
        question = {"type": "text", "text": settings.template.replace(PLACEHOLDER, sample.prompt)}
        messages: list[dict[str, object]] = [{"role": "user", "content": [*pictures, question]}]
        if settings.system:
            messages.insert(0, {"role": "system", "content": settings.system})
        plain = {
            "model": settings.model,
            "messages": messages,
            "max_tokens": settings.max_tokens,
            "temperature": settings.temperature,
        }
        return json.dumps(plain).encode()


def _data_url(image: NDArray[np.uint8]) -> str:
    return "data:image/png;base64," + base64.b64encode(png_bytes(image)).decode("ascii")


def _key_header(variable: str | None) -> dict[str, str]:
    if variable is None:
        return {}
    key = os.environ.get(variable, "")
    if not key:
        raise ConfigError(
            f"The environment variable {variable} holds no key.",
            why="vlm_judge.api_key_env names it as the place of the endpoint's key.",
            fix=f"export {variable}=..., on every machine that scores; or leave api_key_env out if none is needed.",
        )
    return {"Authorization": f"Bearer {key}"}


def _read_models(plain: Any) -> list[str]:
    entries = plain.get("data") if isinstance(plain, dict) else None
    if not isinstance(entries, list) or not all(isinstance(each, dict) and isinstance(each.get("id"), str) for each in entries):
        raise UnreadableAnswer("no list of models, as an OpenAI-compatible endpoint has it")
    return [each["id"] for each in entries]


def _read_content(plain: Any) -> str:
    try:
        content = plain["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError) as error:
        raise UnreadableAnswer("no choices[0].message.content") from error
    if content is None:
        return ""  # a refusal: no score
    if not isinstance(content, str):
        raise UnreadableAnswer("a message whose content is not a text")
    return content
