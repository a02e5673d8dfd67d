"""The reward ``remote``: another process or machine scores. See wire for what is said, and http for what may go wrong."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Mapping, Sequence

from digenrl.config.registry import MEDIA
from digenrl.config.settings.remote_rewards import RemoteSettings
from digenrl.errors import ConfigError, DigenError, RewardUnavailable
from digenrl.ids import SampleId
from digenrl.rewards.asking import whole_groups
from digenrl.rewards.base import RewardSample, Score
from digenrl.rewards.http import Endpoint, Service, ask_each
from digenrl.rewards.remote.media import MP4, can_write_mp4
from digenrl.rewards.remote.wire import Served, decode_answer, decode_health, encode_request


class RemoteReward:
    """Asks a service, a few requests at a time."""

    Settings = RemoteSettings
    media = MEDIA

    def __init__(self, settings: RemoteSettings) -> None:
        """Raises ConfigError when no such service is there within ``start_timeout_s``, or it does not read what is to be sent."""
        self._settings = settings
        self._service = _service_of(settings)
        try:
            served = self._service.get("/health", decode_health, deadline_s=settings.start_timeout_s)
        except RewardUnavailable as error:
            raise ConfigError(
                error.what,
                why="The service is asked before anything is generated, so that no work is lost.",
                fix="Start it (`digenrl reward-serve REWARD --port PORT`), check the reward's url, and that the environment "
                f"variable {settings.token_env} holds the service's token here, too.",
            ) from error
        self.needs = served.needs
        """Which samples the service can score."""
        if settings.video == "mp4":
            _check_mp4(settings, served)

    def score(self, samples: Sequence[RewardSample]) -> Mapping[SampleId, Score]:
        """What the service says of each sample. Raises RewardUnavailable when it does not."""
        size = self._settings.samples_per_request
        batches: list[tuple[RewardSample, ...]] = [tuple(samples[start : start + size]) for start in range(0, len(samples), size)]
        if self.needs.compares_groups:
            batches = whole_groups(samples, size)
        answers = ask_each(batches, self._ask, at_once=self._settings.max_inflight)
        return {sample: score for answer in answers for sample, score in answer.items()}

    def take_retries(self) -> int:
        """See Reward."""
        return self._service.take_retries()

    def _ask(self, samples: Sequence[RewardSample], stop: threading.Event) -> dict[SampleId, Score]:
        request, wanted = uuid.uuid4().hex, [sample.id for sample in samples]
        body = encode_request(request, samples, self._settings.video)
        return self._service.post("/v1/score", body, lambda plain: decode_answer(plain, request, wanted), stop)


def ask_what_is_served(settings: RemoteSettings, *, within_s: float) -> Served | None:
    """What a service says of itself; None where it is not there, or says nothing of the kind, within this time."""
    try:
        return _service_of(settings).get("/health", decode_health, deadline_s=within_s)
    except DigenError:
        return None


def _service_of(settings: RemoteSettings) -> Service:
    token = os.environ.get(settings.token_env, "")
    endpoint = Endpoint(
        name="remote",
        url=settings.url,
        timeout_s=settings.timeout_s,
        deadline_s=settings.deadline_s,
        headers={"Authorization": f"Bearer {token}"} if token else {},
    )
    return Service(endpoint, connections=settings.max_inflight)


def _check_mp4(settings: RemoteSettings, served: Served) -> None:
    if MP4 not in served.accepts:
        raise ConfigError(
            f"The service at {settings.url} does not read {MP4}.",
            why=f"It says that it reads {', '.join(served.accepts)}.",
            fix="Use video: npy.",
        )
    if not can_write_mp4():
        raise ConfigError(
            "video: mp4 needs an FFmpeg with libx264rgb, and the installed one has none.",
            why="Other encoders lose colours, so scores would differ from those in process.",
            fix="Use video: npy; or pip install --force-reinstall av, whose wheels bring such an FFmpeg.",
        )
