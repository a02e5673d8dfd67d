"""The service behind ``digenrl reward-serve``: ``GET /health`` and ``POST /v1/score``, as wire says them.

Invariants: with a token, nobody is answered without it; without one, only this machine can ask (the command sees to it); a
request is read no further than its limit; nothing is unpickled; one request is scored at a time, those that would wait
behind too many are told to come again, and one whose caller has hung up is not scored.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from digenrl.config.reward_checks import Needs, SampleKind, check_needs
from digenrl.errors import ConfigError, DigenError
from digenrl.rewards.base import RewardSample, Score
from digenrl.rewards.compose import WeightedRewards
from digenrl.rewards.remote.media import READ, UnreadableRequest
from digenrl.rewards.remote.wire import Served, decode_request, encode_answer, encode_health

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.requests import Request
    from starlette.responses import Response


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a service puts up with."""

    request_bytes: int = 256 * 2**20
    """Of one request."""
    waiting: int = 64
    """Requests that are read, wait or are scored."""
    read_s: float = 120.0
    """Until a request has arrived whole."""


class _Refused(Exception):
    def __init__(self, status: int, why: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(why)
        self.status = status
        self.headers = dict(headers or {})


def make_app(rewards: WeightedRewards, *, token: str = "", limits: Limits | None = None) -> FastAPI:
    """The web application. token: what callers have to show; empty: nothing. Raises ConfigError where FastAPI is missing."""
    try:
        from fastapi import FastAPI
        from starlette.responses import Response
    except ImportError as error:
        raise ConfigError(f"Serving rewards needs FastAPI and uvicorn: {error}.", fix='pip install "digenrl[serve]".') from error
    desk = _Desk(rewards, token, limits or Limits())

    async def health(request: Request) -> Response:
        return await _answered(desk.health, request)

    async def score(request: Request) -> Response:
        return await _answered(desk.score, request)

    async def _answered(handle: Any, request: Request) -> Response:
        try:
            return Response(await handle(request), media_type="application/json")
        except _Refused as refused:
            content = json.dumps({"error": str(refused)})
            return Response(content, refused.status, refused.headers, media_type="application/json")

    # No pages of documentation: they would load scripts from elsewhere.
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_route("/health", health, methods=["GET"])
    app.add_route("/v1/score", score, methods=["POST"])
    return app


class _Desk:
    """Answers requests."""

    def __init__(self, rewards: WeightedRewards, token: str, limits: Limits) -> None:
        self._rewards = rewards
        self._token = token
        self._limits = limits
        self._turn = asyncio.Lock()
        self._present = 0

    async def health(self, request: Request) -> bytes:
        self._check_token(request)
        return encode_health(Served(rewards=self._rewards.names, needs=self._rewards.needs, accepts=READ))

    async def score(self, request: Request) -> bytes:
        self._check_token(request)
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            # Also what keeps web pages out: a browser asks before it sends this from another site.
            raise _Refused(415, "the body has to be application/json")
        if self._present >= self._limits.waiting:
            raise _Refused(503, f"{self._present} requests wait already", {"Retry-After": "1"})
        self._present += 1
        try:
            try:
                async with asyncio.timeout(self._limits.read_s):
                    content = await self._read(request)
            except TimeoutError as error:
                raise _Refused(408, f"the request did not arrive within {self._limits.read_s:g} s") from error
            async with self._turn:
                if await request.is_disconnected():
                    # It has given up waiting, and usually asks again: to score this one too would make it wait longer still.
                    raise _Refused(408, "nobody waits for the answer")
                return await asyncio.to_thread(self._work, content)
        finally:
            self._present -= 1

    def _check_token(self, request: Request) -> None:
        shown = request.headers.get("authorization", "").encode()
        if self._token and not hmac.compare_digest(shown, f"Bearer {self._token}".encode()):
            raise _Refused(401, "the bearer token is missing or wrong", {"WWW-Authenticate": "Bearer"})

    async def _read(self, request: Request) -> bytes:
        most, content = self._limits.request_bytes, bytearray()
        too_large = _Refused(413, f"a request may have {most} bytes: send fewer samples, or raise --max-request-mib")
        declared = request.headers.get("content-length", "0")
        if not declared.isdigit() or int(declared) > most:
            raise too_large
        async for piece in request.stream():
            content += piece
            if len(content) > most:
                raise too_large
        return bytes(content)

    def _work(self, content: bytes) -> bytes:
        try:
            request, samples = decode_request(content)
        except UnreadableRequest as error:
            raise _Refused(422, str(error)) from error
        except MemoryError as error:
            raise _Refused(413, "the request does not fit into memory") from error
        for sample in samples:
            _check_sample(sample, self._rewards.needs)
        try:
            return encode_answer(request, _scores(self._rewards, samples))
        except DigenError as error:
            raise _Refused(500, error.what) from error


def _check_sample(sample: RewardSample, needs: Needs) -> None:
    """Refuse what would fail again however often it is sent."""
    height, width = sample.image.shape[-3:-1]
    kind = SampleKind(height=height, width=width, num_frames=2 if sample.image.ndim == 4 else 1)
    try:
        check_needs(needs, kind, f"sample {sample.id}: this service")
    except ConfigError as error:
        raise _Refused(422, error.what) from error


def _scores(rewards: WeightedRewards, samples: tuple[RewardSample, ...]) -> dict[Any, Score]:
    """Parts of a single reward have their own names; of several, they are ``<reward>`` and ``<reward>/<part>``."""
    by_shape: dict[tuple[int, ...], list[RewardSample]] = {}
    for sample in samples:
        by_shape.setdefault(sample.image.shape, []).append(sample)
    prefix = f"{rewards.names[0]}/" if len(rewards.names) == 1 else ""
    scores = {}
    for alike in by_shape.values():
        scored = rewards.score(alike)
        for row, sample in enumerate(alike):
            parts = {
                name.removeprefix(prefix): float(values[row])
                for name, values in scored.parts.items()
                if not prefix or name.startswith(prefix)
            }
            scores[sample.id] = Score(value=float(scored.totals[row]), parts=parts)
    return {sample.id: scores[sample.id] for sample in samples}
