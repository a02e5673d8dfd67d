"""``digenrl reward-serve`` over real HTTP: right scores, tokens, limits, and requests that are none."""

from __future__ import annotations

import base64
import io
import json
import os
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import uvicorn

from digenrl.cli.reward_serve import run
from digenrl.config.loader import load_reward
from digenrl.errors import ConfigError
from digenrl.rewards.compose import WeightedRewards
from digenrl.rewards.remote.client import RemoteReward
from digenrl.rewards.remote.media import png_bytes
from digenrl.rewards.remote.server import Limits, make_app
from digenrl.rewards.remote.wire import encode_request
from tests.rewards.services import ROOT, pictures, reward_serve

SAMPLES = pictures(6)
TOKEN = "a-long-random-text"


@pytest.fixture(scope="module")
def marker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("marker") / "ran"


@pytest.fixture(scope="module")
def service(marker: Path) -> Iterator[str]:
    arguments = ("jpeg", "quality=50", "--port", "0", "--max-request-mib", "1")
    with reward_serve(*arguments, DIGENRL_REWARD_TOKEN=TOKEN, DIGENRL_TEST_MARKER=str(marker)) as (url, _):
        yield url


def post(url: str, content: bytes, timeout_s: float = 20, **headers: str) -> httpx.Response:
    given = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"} | headers
    return httpx.post(f"{url}/v1/score", content=content, headers=given, trust_env=False, timeout=timeout_s)


def test_the_service_gives_the_very_scores_of_its_reward(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIGENRL_REWARD_TOKEN", TOKEN)
    scored = RemoteReward(RemoteReward.Settings(url=service, samples_per_request=2)).score(SAMPLES)
    here = WeightedRewards.from_recipe([load_reward("jpeg", ["quality=50"])]).score(SAMPLES)
    assert [scored[s.id].value for s in SAMPLES] == here.totals.tolist()
    assert [scored[s.id].parts["kilobytes"] for s in SAMPLES] == here.parts["jpeg/kilobytes"].tolist()


def test_videos_arrive_bit_for_bit(service: str) -> None:
    video = np.random.default_rng(1).integers(0, 256, size=(3, 8, 10, 3), dtype=np.uint8)
    sample = pictures(1)[0]
    clip = type(sample)(id=sample.id, prompt="", metadata={}, image=video, fps=8.0)
    answer = post(service, encode_request("r", [clip])).json()
    here = WeightedRewards.from_recipe([load_reward("jpeg", ["quality=50"])]).score([clip])
    assert answer["scores"][0]["value"] == here.totals[0]


def test_health_says_what_is_served(service: str) -> None:
    answer = httpx.get(f"{service}/health", headers={"Authorization": f"Bearer {TOKEN}"}, trust_env=False)
    assert answer.json() == {
        "status": "ok",
        "schema": 1,
        "rewards": ["jpeg"],
        "media": ["image", "video"],
        "sample_size": None,
        "compares_groups": False,
        "accepts": ["image/png", "video/npy", "video/mp4"],
    }


@pytest.mark.parametrize("shown", ["", "Bearer", "Bearer wrong", f"Basic {TOKEN}", f"bearer {TOKEN}x"])
def test_without_the_token_nothing_is_answered(service: str, shown: str) -> None:
    assert post(service, encode_request("r", SAMPLES), Authorization=shown).status_code == 401
    assert httpx.get(f"{service}/health", headers={"Authorization": shown}, trust_env=False).status_code == 401


def test_a_run_without_the_token_is_refused_at_its_start(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIGENRL_REWARD_TOKEN", "another")
    with pytest.raises(ConfigError, match="HTTP 401") as caught:
        RemoteReward(RemoteReward.Settings(url=service))
    assert "DIGENRL_REWARD_TOKEN" in caught.value.fix


class HarmlessHere:
    """Pickles to what makes a folder where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (self._path,))


def request(**changes: Any) -> bytes:
    plain = json.loads(encode_request("r", SAMPLES[:1]))
    plain["samples"][0].update(changes)
    return json.dumps(plain).encode()


def npy(array: Any, **how: Any) -> dict[str, str]:
    buffer = io.BytesIO()
    np.save(buffer, array, **how)
    return media(buffer.getvalue(), "video/npy")


def media(content: bytes, kind: str = "image/png") -> dict[str, str]:
    return {"type": kind, "data": base64.b64encode(content).decode()}


def test_a_pickle_that_is_sent_never_runs(service: str, marker: Path) -> None:
    bomb = pickle.dumps(HarmlessHere(marker))
    objects = np.empty((1, 1, 1, 3), dtype=object)
    objects[:] = HarmlessHere(marker)
    for content in (
        bomb,
        request(media=media(bomb)),
        request(media=media(bomb, "video/npy")),
        request(media=npy(objects, allow_pickle=True)),
        request(media=media(bomb, "application/python-pickle")),
    ):
        assert post(service, content).status_code == 422
    assert post(service, bomb, **{"Content-Type": "application/python-pickle"}).status_code == 415
    assert not marker.exists()
    pickle.loads(bomb)
    assert marker.exists(), "the bomb would go off"


LIE = b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little")
LIE += b"{'descr': '|u1', 'fortran_order': False, 'shape': (9999999, 4096, 4096, 3), }".ljust(117) + b"\n"
WRONG: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"",
    "a list": lambda: b"[]",
    "nested": lambda: b"[" * 100_000,
    "another schema": lambda: json.dumps({"schema": 2, "request": "r", "samples": []}).encode(),
    "no samples": lambda: json.dumps({"schema": 1, "request": "r", "samples": []}).encode(),
    "an id of two numbers": lambda: request(id="1/2"),
    "a negative id": lambda: request(id="1/2/-3"),
    "no id": lambda: request(id=None),
    "no prompt": lambda: request(prompt=None),
    "an fps of 0": lambda: request(fps=0),
    "metadata that is a list": lambda: request(metadata=[]),
    "no media": lambda: request(media=None),
    "no base64": lambda: request(media={"type": "image/png", "data": "ä"}),
    "half a PNG": lambda: request(media=media(png_bytes(SAMPLES[0].image)[:60])),
    "another format": lambda: request(media=media(b"GIF89a\x01\x00\x01\x00\x00\x00\x00;")),
    "a video of floats": lambda: request(media=npy(np.zeros((2, 4, 4, 3)))),
    "a video without frames": lambda: request(media=npy(np.zeros((0, 4, 4, 3), dtype=np.uint8))),
    "a video of another shape": lambda: request(media=npy(np.zeros((4, 4, 3), dtype=np.uint8))),
    "a video that says it is enormous": lambda: request(media=media(LIE, "video/npy")),
    "the same id twice": lambda: encode_request("r", [SAMPLES[0], SAMPLES[0]]),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_request_that_is_none_is_refused_with_the_reason(service: str, wrong: str) -> None:
    answer = post(service, WRONG[wrong]())
    assert answer.status_code == 422, answer.text
    assert answer.json()["error"]


def test_a_request_beyond_the_limit_is_refused_whether_it_says_so_or_not(service: str) -> None:
    large = b" " * (2**20 + 1)
    assert post(service, large).status_code == 413

    def pieces() -> Iterator[bytes]:
        yield from (large[:65536] for _ in range(32))

    try:
        answer = httpx.post(
            f"{service}/v1/score",
            content=pieces(),
            headers={"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"},
            trust_env=False,
        )
    except httpx.TransportError:
        return  # it hangs up on who keeps sending
    assert answer.status_code == 413


def serve(source: str, *overrides: str, host: str = "127.0.0.1") -> None:
    run(source, overrides, host=host, port=0, token_env="DIGENRL_REWARD_TOKEN", limits=Limits())


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "somewhere.example"])
def test_nothing_listens_beyond_this_machine_without_a_token(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIGENRL_REWARD_TOKEN", "")
    with pytest.raises(ConfigError, match="DIGENRL_REWARD_TOKEN holds no token"):
        serve("jpeg", host=host)


def test_a_port_that_is_taken_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="Cannot listen"):
        run("jpeg", (), host="127.0.0.1", port=taken.getsockname()[1], token_env="NO_SUCH_TOKEN", limits=Limits())


@pytest.mark.parametrize(
    ("arguments", "detail"),
    [
        (("jepg",), "Did you mean 'jpeg'?"),
        (("jpeg", "qualty=3"), "did you mean quality?"),
        (("jpeg", "quality=300"), "quality cannot be 300"),
        (("remote", "url=http://127.0.0.1:1"), "of type remote"),
        (("no_such.yaml",), "There is no recipe"),
    ],
)
def test_what_cannot_be_served_is_refused(arguments: tuple[str, ...], detail: str) -> None:
    with pytest.raises(ConfigError) as caught:
        serve(*arguments)
    assert detail in str(caught.value)


def test_a_recipe_s_rewards_are_served_as_their_weighted_sum(tmp_path: Path) -> None:
    text = (ROOT / "recipes" / "quickstart.yaml").read_text(encoding="utf-8")
    start, end = text.index("rewards:"), text.index("train:")
    rewards = "rewards:\n  - {type: jpeg, weight: 2}\n  - {type: jpeg, quality: 10, name: coarse}\n"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text[:start] + rewards + text[end:], encoding="utf-8")
    with reward_serve(str(recipe), "--port", "0") as (url, _):
        scored = RemoteReward(RemoteReward.Settings(url=url, token_env="NO_SUCH_TOKEN")).score(SAMPLES)
    for score in scored.values():
        assert score.value == pytest.approx(2 * score.parts["jpeg"] + score.parts["coarse"], rel=1e-12)


class Waits:
    """A reward that is told when to go on, and says what it was asked for."""

    def __init__(self) -> None:
        self.scored: list[int] = []
        self.inside, self.most_inside = 0, 0
        self.working, self.go_on = threading.Event(), threading.Event()

    def score(self, samples: Any) -> dict[Any, float]:
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        self.scored.append(samples[0].id.sample)
        self.working.set()
        assert self.go_on.wait(20)
        self.inside -= 1
        return {sample.id: 0.0 for sample in samples}


@contextmanager
def in_process(reward: Any, **limits: float) -> Iterator[str]:
    app = make_app(WeightedRewards([(load_reward("jpeg"), reward)]), limits=Limits(**limits))  # type: ignore[arg-type]
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(20)


def test_a_request_whose_caller_has_hung_up_is_not_scored() -> None:
    reward = Waits()
    with in_process(reward) as url, ThreadPoolExecutor() as threads:
        first = threads.submit(post, url, encode_request("r", SAMPLES[:1]))
        assert reward.working.wait(20)
        with pytest.raises(httpx.ReadTimeout):
            post(url, encode_request("r", SAMPLES[1:2]), timeout_s=0.5)
        reward.go_on.set()
        assert first.result(20).status_code == 200
        assert post(url, encode_request("r", SAMPLES[2:3])).status_code == 200
    assert reward.scored == [0, 2]


def test_one_request_is_scored_at_a_time_and_what_waits_behind_too_many_is_told_to_come_again() -> None:
    reward = Waits()
    with in_process(reward, waiting=2) as url, ThreadPoolExecutor() as threads:
        first = threads.submit(post, url, encode_request("r", SAMPLES[:1]))
        assert reward.working.wait(20)
        others = [threads.submit(post, url, encode_request("r", [sample])) for sample in SAMPLES[1:]]
        refused = list(islice(as_completed(others, timeout=20), len(others) - 1))
        assert {(each.result().status_code, each.result().headers["Retry-After"]) for each in refused} == {(503, "1")}
        reward.go_on.set()
        assert [each.result(20).status_code for each in (first, *others) if each not in refused] == [200, 200]
    assert reward.most_inside == 1
    assert len(reward.scored) == 2


def test_a_request_that_does_not_arrive_whole_is_given_up() -> None:
    with in_process(Waits(), read_s=0.2) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as asker:
            asker.sendall(b"POST /v1/score HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{")
            assert asker.recv(4096).startswith(b"HTTP/1.1 408")
