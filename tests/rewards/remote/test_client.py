"""The reward ``remote`` against servers that misbehave: what passes leaves no trace in the scores, what stays stops in time."""

from __future__ import annotations

import json
import os
import pickle
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from digenrl.config.loader import load_reward
from digenrl.errors import ConfigError, RewardUnavailable
from digenrl.ids import SampleId
from digenrl.rewards.compose import WeightedRewards
from digenrl.rewards.http import ask_each
from digenrl.rewards.remote.client import RemoteReward
from tests.rewards.services import (
    Fault,
    FaultyServer,
    Reply,
    body,
    free_port,
    pictures,
    reset,
    scores,
    serving,
    slow,
    status,
    value,
)

SAMPLES = pictures(10)


def client(url: str, **settings: Any) -> RemoteReward:
    given = {"url": url, "timeout_s": 1, "deadline_s": 20, "start_timeout_s": 20, "samples_per_request": 4} | settings
    return RemoteReward(RemoteReward.Settings(**given))


def values(answer: Mapping[SampleId, Any]) -> list[float]:
    return [float(answer[sample.id].value) for sample in SAMPLES]


@pytest.fixture(scope="module")
def right() -> list[float]:
    return WeightedRewards.from_recipe([load_reward("jpeg")]).score(SAMPLES).totals.tolist()


def test_a_service_gives_the_very_scores_of_the_reward_in_process(right: list[float]) -> None:
    server = FaultyServer()
    with serving(server) as url:
        assert values(client(url).score(SAMPLES)) == right
    assert sorted(len(request["samples"]) for request in server.requests) == [2, 4, 4]
    assert {sample["metadata"]["n"] for request in server.requests for sample in request["samples"]} == set(range(10))


def test_a_proxy_for_the_world_outside_is_not_asked_for_a_service_on_this_machine(
    right: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    with serving(FaultyServer()) as url:
        assert values(client(url, deadline_s=2, start_timeout_s=2).score(SAMPLES)) == right


PASSING: dict[str, list[Fault | None]] = {
    "500": [status(500)],
    "502, 503 and 504": [status(502), status(503), status(504)],
    "429 with a wait": [status(429, Retry_After="0.05")],
    "429 with nonsense": [status(429, Retry_After="soon")],
    "timeout": [slow(1.2)],
    "reset": [reset],
    "short answer": [scores(lambda all_: all_[:-1])],
    "extra answer": [scores(lambda all_: [*all_, {"id": "9/9/9", "value": 1.0}])],
    "double answer": [scores(lambda all_: [*all_, all_[0]])],
    "wrong type": [value("0.5")],
    "truth": [value(True)],
    "a list": [scores(lambda all_: [each["value"] for each in all_])],
    "web page": [body(b"<html>starting up</html>", "text/html")],
    "half an answer": [lambda server, right: Reply(right.body[:-5])],
    "answer to another": [lambda server, right: Reply(right.body.replace(b'"request": "', b'"request": "x'))],
    "enormous number": [value(10**400)],
    "slow, but in time": [slow(0.2)] * 3,
}


@pytest.mark.parametrize("fault", PASSING)
def test_a_fault_that_passes_changes_no_score(fault: str, right: list[float]) -> None:
    server = FaultyServer(PASSING[fault])
    with serving(server) as url:
        reward = client(url)
        assert values(reward.score(SAMPLES)) == right
    repeated = len(server.requests) - 3
    assert reward.take_retries() == repeated
    assert (repeated == 0) == (fault == "slow, but in time")


@pytest.mark.parametrize("answer", [None, float("nan"), float("inf")])
def test_a_sample_without_a_valid_score_is_invalid_and_no_other(answer: float | None, right: list[float]) -> None:
    with serving(FaultyServer([value(answer)])) as url:
        scored = values(client(url, samples_per_request=10).score(SAMPLES))
    assert not np.isfinite(scored[0])
    assert scored[1:] == right[1:]


STAYING: dict[str, tuple[Fault, str]] = {
    "500": (status(500), "HTTP 500"),
    "429 that asks to wait for an hour": (status(429, Retry_After="3600"), "HTTP 429"),
    "timeout": (slow(1.2), "no answer within"),
    "reset": (reset, "did not answer within"),
    "short answer": (scores(lambda all_: all_[:-1]), "1 missing"),
    "wrong type": (value("0.5"), "not a number"),
    "web page": (body(b"<!doctype html>", "text/html"), "a web page"),
    "a page that says it is JSON": (body(b" <html>"), "a web page"),
    "400": (status(400), "HTTP 400"),
    "401": (status(401), "HTTP 401"),
    "413": (status(413), "HTTP 413"),
    "redirect": (status(302, Location="http://127.0.0.1:9/"), "HTTP 302"),
}


@pytest.mark.parametrize("fault", STAYING)
def test_a_fault_that_stays_stops_in_time_and_is_never_a_score(fault: str) -> None:
    bad, detail = STAYING[fault]
    with serving(FaultyServer(then=bad)) as url:
        reward, began = client(url, deadline_s=2), time.monotonic()
        with pytest.raises(RewardUnavailable, match=detail) as caught:
            reward.score(SAMPLES)
        assert time.monotonic() - began < 10
    assert url in caught.value.what
    assert "--resume" in caught.value.fix


def test_an_answer_that_is_none_is_asked_for_three_times_and_no_more() -> None:
    server = FaultyServer(then=scores(lambda all_: all_[:-1]))
    with serving(server) as url, pytest.raises(RewardUnavailable, match="answered 3 times with something else than scores"):
        client(url, deadline_s=60).score(SAMPLES[:1])
    assert len(server.requests) == 3


def test_a_request_that_is_refused_for_good_ends_the_waiting_of_the_others() -> None:
    with serving(FaultyServer([status(503, Retry_After="15")], then=status(400))) as url:
        reward, began = client(url, deadline_s=60, max_inflight=2), time.monotonic()
        with pytest.raises(RewardUnavailable, match="HTTP 400"):
            reward.score(SAMPLES)
        assert time.monotonic() - began < 10


def drips(head: bytes, each: bytes) -> type:
    """A server that is healthy, and then answers piece by piece, for three seconds."""
    import socketserver

    class Drips(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            if self.request.recv(65536).startswith(b"GET"):
                content = b'{"status": "ok", "schema": 1}'
                self.request.sendall(
                    b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(content) + content
                )
                return
            self.request.sendall(head)
            for _ in range(60):
                time.sleep(0.05)
                try:
                    self.request.sendall(each)
                except OSError:
                    return

    return Drips


@pytest.mark.parametrize(
    ("head", "each"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n", b" "),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n", b" "),
        (b"HTTP/1.1 200 OK\r\n", b"X-More: of it\r\n"),
    ],
    ids=["a body", "a body without a length", "headers"],
)
def test_an_answer_that_drips_does_not_outlast_the_timeout(head: bytes, each: bytes) -> None:
    import socketserver

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), drips(head, each)) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}).start()
        reward, began = client(f"http://127.0.0.1:{server.server_address[1]}", timeout_s=0.3, deadline_s=0.6), time.monotonic()
        with pytest.raises(RewardUnavailable, match="no answer within"):
            reward.score(SAMPLES[:1])
        took = time.monotonic() - began
        server.shutdown()
    assert took < 2


def test_ctrl_c_begins_no_further_request() -> None:
    begun = []

    def ask(question: int, stop: threading.Event) -> int:
        begun.append(question)
        if question == 1:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # type: ignore[arg-type]
        stop.wait(20)
        return question

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        ask_each(range(6), ask, at_once=2)
    assert time.monotonic() - began < 5
    assert sorted(begun) == [0, 1]


def test_no_more_requests_are_on_their_way_than_allowed() -> None:
    server = FaultyServer(then=slow(0.05))
    with serving(server) as url:
        client(url, samples_per_request=1, max_inflight=3, timeout_s=10, deadline_s=20).score(SAMPLES)
    assert len(server.requests) == 10
    assert 1 < server.most_inside <= 3


def test_a_service_that_is_down_is_refused_when_the_reward_is_made() -> None:
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"did not answer within 0\.5 s") as caught:
        client(f"http://127.0.0.1:{free_port()}", start_timeout_s=0.5)
    assert 0.1 < time.monotonic() - began < 10
    assert "reward-serve" in caught.value.fix


@pytest.mark.parametrize(
    ("health", "detail"),
    [
        (Reply(b"<html>hello</html>", headers={"Content-Type": "text/html"}), "a web page"),
        (Reply(b'{"status": "ok"}'), "schema 1"),
        (Reply(b'{"status": "ok", "schema": 2}'), "schema 1"),
        (Reply(b"{}", status=404), "HTTP 404"),
        (Reply(b"{}", status=401), "HTTP 401"),
    ],
)
def test_what_is_not_such_a_service_is_refused_when_the_reward_is_made(health: Reply, detail: str) -> None:
    server = FaultyServer()
    server.health = health
    with serving(server) as url, pytest.raises(ConfigError, match=detail):
        client(url)


def test_a_service_that_comes_a_little_late_is_waited_for(right: list[float]) -> None:
    server = FaultyServer()
    late = server.health
    server.health = Reply(b"{}", status=503)

    def arrive() -> None:
        time.sleep(0.4)
        server.health = late

    threading.Thread(target=arrive).start()
    with serving(server) as url:
        assert values(client(url, start_timeout_s=5).score(SAMPLES)) == right


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (os.environ["DIGENRL_TEST_MARKER"],))


def test_a_pickle_that_a_server_answers_with_never_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = tmp_path / "ran"
    monkeypatch.setenv("DIGENRL_TEST_MARKER", str(marker))
    for kind in ("application/json", "application/octet-stream", "application/python-pickle"):
        with serving(FaultyServer(then=body(pickle.dumps(Bomb()), kind))) as url, pytest.raises(RewardUnavailable):
            client(url).score(SAMPLES)
    server = FaultyServer()
    server.health = Reply(pickle.dumps(Bomb()))
    with serving(server) as url, pytest.raises(ConfigError):
        client(url)
    assert not marker.exists()


@pytest.mark.parametrize(
    "url", ["", "localhost:80", "ftp://x", "http://", "http://user:secret@host", "http://host/?a=b", "http://host:99999", 7]
)
def test_an_address_that_is_none_is_refused_by_the_recipe(url: Any) -> None:
    with pytest.raises(ConfigError, match="url"):
        load_reward("remote", [f"url={json.dumps(url)}"])
