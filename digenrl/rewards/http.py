"""Asking a service over HTTP, with a deadline: what may pass is tried again, what will not stops the run.

Tried again until the deadline: no connection, a reset, a timeout, and the statuses 408, 429, 500, 502, 503 and 504 (after
what ``Retry-After`` asks for). Tried again a few times: an answer that is not what was agreed. Everything else is final.

Invariants: no answer is ever unpickled, redirected or larger than a limit; no error becomes a score; no wait is without an end,
however slowly the other side speaks or reads.
"""

from __future__ import annotations

import json
import random
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar
from urllib.parse import urlsplit

from digenrl.errors import ConfigError, RewardUnavailable

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")
Q = TypeVar("Q")

TRANSIENT = frozenset({408, 429, 500, 502, 503, 504})
"""Statuses after which the same request may be answered."""
MOST_ANSWER_BYTES = 64 * 2**20
_UNREADABLE_ATTEMPTS = 3
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.25, 10.0
_JITTER = random.SystemRandom()  # spreads the retries of many workers; no number of a run comes from it
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


class UnreadableAnswer(ValueError):
    """The answer is not what was agreed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a service is, and how long to wait for it."""

    name: str
    """Of the reward, for messages."""
    url: str
    """Without a slash at its end."""
    timeout_s: float
    """Of one attempt."""
    deadline_s: float
    """Of a request with all its attempts."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Sent with every request; never shown."""


class _Retry(Exception):
    """This attempt failed and another one may not."""

    def __init__(self, why: str, *, wait_s: float | None = None, unreadable: bool = False) -> None:
        super().__init__(why)
        self.wait_s = wait_s
        self.unreadable = unreadable


class Service:
    """One service. May be used by several threads at once."""

    def __init__(self, endpoint: Endpoint, *, connections: int = 8) -> None:
        """Raises ConfigError where httpx is not installed."""
        self._endpoint = endpoint
        self._httpx = import_httpx()
        self._client: httpx.Client = self._httpx.Client(
            headers=dict(endpoint.headers),
            follow_redirects=False,
            # A connection for each request: only of a new one is the socket known, by which a wait can be ended.
            limits=self._httpx.Limits(max_connections=connections, max_keepalive_connections=0),
            # A proxy that the environment names is for the world outside.
            trust_env=urlsplit(endpoint.url).hostname not in _LOOPBACK,
        )
        weakref.finalize(self, self._client.close)
        self._retries = 0
        self._lock = threading.Lock()

    def take_retries(self) -> int:
        """Attempts that failed and were repeated since this was last asked."""
        with self._lock:
            retries, self._retries = self._retries, 0
        return retries

    def post(self, path: str, body: bytes, read: Callable[[Any], T], stop: threading.Event | None = None) -> T:
        """Send JSON and return what ``read`` makes of the JSON that comes back; it raises UnreadableAnswer for what is wrong.

        stop: set by another thread to have this one give up waiting. Raises RewardUnavailable.
        """
        return self._until_answered("POST", path, body, read, self._endpoint.deadline_s, stop or threading.Event())

    def get(self, path: str, read: Callable[[Any], T], *, deadline_s: float) -> T:
        """As ``post``, of a question without a body, with a deadline of its own."""
        return self._until_answered("GET", path, None, read, deadline_s, threading.Event())

    def _until_answered(
        self, method: str, path: str, body: bytes | None, read: Callable[[Any], T], deadline_s: float, stop: threading.Event
    ) -> T:
        began, attempt, unreadable = time.monotonic(), 0, 0
        while True:
            left = began + deadline_s - time.monotonic()
            try:
                return read(self._attempt(method, path, body, min(self._endpoint.timeout_s, max(left, 0.001))))
            except UnreadableAnswer as error:
                failure = _Retry(str(error), unreadable=True)
            except _Retry as error:
                failure = error
            attempt += 1
            unreadable += failure.unreadable
            wait = _backoff_s(attempt) if failure.wait_s is None else failure.wait_s
            left = began + deadline_s - time.monotonic()
            if unreadable >= _UNREADABLE_ATTEMPTS:
                self._give_up(f"answered {unreadable} times with something else than scores: {failure}")
            if wait >= left:
                self._give_up(f"did not answer within {deadline_s:g} s ({attempt} attempts); the last one: {failure}")
            if stop.wait(wait):
                self._give_up("was not asked to the end, because another request of the same batch failed")
            with self._lock:
                self._retries += 1

    def _attempt(self, method: str, path: str, body: bytes | None, timeout_s: float) -> Any:
        """One attempt. Returns the JSON of the answer. Raises _Retry, UnreadableAnswer or RewardUnavailable."""
        headers = {} if body is None else {"Content-Type": "application/json"}
        url, content = self._endpoint.url + path, bytearray()
        with _Cut(after_s=timeout_s) as cut:
            try:
                with self._client.stream(
                    method, url, content=body, headers=headers, timeout=timeout_s, extensions={"trace": cut.trace}
                ) as answer:
                    for piece in answer.iter_bytes():
                        content += piece
                        if len(content) > MOST_ANSWER_BYTES:
                            raise UnreadableAnswer(f"more than {MOST_ANSWER_BYTES >> 20} MiB")
            except self._httpx.TimeoutException as error:
                raise _Retry(f"no answer within {timeout_s:g} s ({type(error).__name__})") from error
            except (self._httpx.TransportError, self._httpx.DecodingError) as error:
                raise _Retry(cut.why or f"{type(error).__name__}: {error}") from error
        if cut.why:  # an answer without a length ends where it is cut
            raise _Retry(cut.why)
        if answer.status_code in TRANSIENT:
            raise _Retry(
                f"HTTP {answer.status_code}: {_excerpt(content)}", wait_s=_retry_after_s(answer.headers.get("Retry-After"))
            )
        if answer.status_code != 200:
            self._give_up(f"refuses the request with HTTP {answer.status_code}: {_excerpt(content)}")
        return _parse(bytes(content), answer.headers.get("Content-Type", ""))

    def _give_up(self, detail: str) -> NoReturn:
        raise RewardUnavailable(
            f"The reward {self._endpoint.name!r}: the service at {self._endpoint.url} {detail}.",
            why="A reward that cannot be had is never scored as 0, and without it there is nothing to learn from.",
            fix="Mend or start the service, and go on with `digenrl train --resume RUN`.",
        )


class _Cut:
    """Ends the connection of one attempt when its time is over: the client's own timeouts begin anew with every byte."""

    def __init__(self, *, after_s: float) -> None:
        self._after_s = after_s
        self._timer = threading.Timer(after_s, self._end)
        self._timer.daemon = True
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self.why = ""
        """What is to be said of it; empty as long as nothing was cut."""

    def __enter__(self) -> _Cut:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        with self._lock:
            self._socket = None  # its number may be another connection's soon

    def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """What httpx tells of a request: the new connection, and the encrypted one in its place."""
        if event.endswith((".connect_tcp.complete", ".start_tls.complete")):
            with self._lock:
                self._socket = info["return_value"].get_extra_info("socket")
            if self.why:
                self._end()

    def _end(self) -> None:
        with self._lock:
            self.why = f"no answer within {self._after_s:g} s, or not all of it"
            if self._socket is not None:
                with suppress(OSError):  # the other side has ended it already
                    # Not SSLSocket's own, which takes its encryption off first, under the hands of the thread that sends.
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)


def ask_each(questions: Sequence[Q], ask: Callable[[Q, threading.Event], T], *, at_once: int) -> list[T]:
    """Answers to all questions, in order, a few at a time. The first one that fails ends the others' waiting, and is raised.

    So does Ctrl-C: what is on its way is waited for, and nothing is asked again or begun.
    """
    if not questions:
        return []
    stop = threading.Event()
    with ThreadPoolExecutor(max_workers=min(at_once, len(questions))) as threads:
        try:
            futures = [threads.submit(ask, question, stop) for question in questions]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            failed = [future for future in done if future.exception() is not None]
        finally:
            stop.set()  # where all are answered, nobody waits for it
            threads.shutdown(cancel_futures=True)
        return [future.result() for future in failed or futures]


def import_httpx() -> Any:
    """The module. Raises ConfigError where it is not installed."""
    try:
        import httpx
    except ImportError as error:
        raise ConfigError(
            "A reward over HTTP needs the package httpx, which is not installed.",
            fix='pip install "digenrl[rewards]", on every machine that scores.',
        ) from error
    return httpx


def _parse(content: bytes, kind: str) -> Any:
    if "html" in kind.lower() or content.lstrip()[:1] == b"<":
        raise UnreadableAnswer(f"a web page (HTML) instead of JSON: {_excerpt(content)}")
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UnreadableAnswer(f"not JSON ({error}): {_excerpt(content)}") from error


def _excerpt(content: bytes | bytearray) -> str:
    text = " ".join(bytes(content[:2000]).decode("utf-8", errors="replace").split())
    return repr(text[:200]) if text else "an empty body"


def _retry_after_s(header: str | None) -> float | None:
    """Seconds that the service asks to wait; None where it says nothing that is a number."""
    try:
        seconds = float(header) if header is not None else -1.0
    except ValueError:
        return None
    return seconds if 0 <= seconds < float("inf") else None


def _backoff_s(attempt: int) -> float:
    longest: float = min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2.0 ** min(attempt - 1, 10))
    return longest * _JITTER.uniform(0.5, 1.0)
