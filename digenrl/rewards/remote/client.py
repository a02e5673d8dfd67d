"""The reward ``remote``: another process or machine scores. See wire for what is said, and http for what may go wrong."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from digenrl.config.settings.remote_rewards import RemoteSettings
from digenrl.errors import ConfigError, RewardUnavailable
from digenrl.ids import SampleId
from digenrl.rewards.base import RewardSample, Score
from digenrl.rewards.http import Endpoint, Service, UnreadableAnswer, ask_each
from digenrl.rewards.remote.wire import SCHEMA, decode_answer, encode_request


class RemoteReward:
    """Asks a service, a few requests at a time."""

    Settings = RemoteSettings
    media = ("image", "video")

    def __init__(self, settings: RemoteSettings) -> None:
        """Raises ConfigError when no such service is there within ``start_timeout_s``."""
        token = os.environ.get(settings.token_env, "")
        endpoint = Endpoint(
            name="remote",
            url=settings.url,
            timeout_s=settings.timeout_s,
            deadline_s=settings.deadline_s,
            headers={"Authorization": f"Bearer {token}"} if token else {},
        )
        self._settings = settings
        self._service = Service(endpoint, connections=settings.max_inflight)
        try:
            self._service.get("/health", _read_health, deadline_s=settings.start_timeout_s)
        except RewardUnavailable as error:
            raise ConfigError(
                error.what,
                why="The service is asked before anything is generated, so that no work is lost.",
                fix="Start it (`digenrl reward-serve REWARD --port PORT`), check the reward's url, and that the environment "
                f"variable {settings.token_env} holds the service's token here, too.",
            ) from error

    def score(self, samples: Sequence[RewardSample]) -> Mapping[SampleId, Score]:
        """What the service says of each sample. Raises RewardUnavailable when it does not."""
        size = self._settings.samples_per_request
        batches = [samples[start : start + size] for start in range(0, len(samples), size)]
        answers = ask_each(batches, self._ask, at_once=self._settings.max_inflight)
        return {sample: score for answer in answers for sample, score in answer.items()}

    def take_retries(self) -> int:
        """See Reward."""
        return self._service.take_retries()

    def _ask(self, samples: Sequence[RewardSample], stop: threading.Event) -> dict[SampleId, Score]:
        request, wanted = uuid.uuid4().hex, [sample.id for sample in samples]
        body = encode_request(request, samples)
        return self._service.post("/v1/score", body, lambda plain: decode_answer(plain, request, wanted), stop)


def _read_health(plain: Any) -> None:
    if not isinstance(plain, dict) or plain.get("status") != "ok" or plain.get("schema") != SCHEMA:
        raise UnreadableAnswer(f"it does not say that it is a reward service of schema {SCHEMA}")
