"""Videos on the wire, what a service says it takes, and runs that make something else."""

from __future__ import annotations

import asyncio
import base64
import io
from dataclasses import replace
from typing import Any

import av
import httpx
import numpy as np
import pytest

from digenrl.cli.check import service_warnings
from digenrl.config.loader import load_reward
from digenrl.config.reward_checks import Needs, SampleKind
from digenrl.errors import ConfigError
from digenrl.rewards.compose import WeightedRewards
from digenrl.rewards.remote import client, media, wire
from digenrl.rewards.remote.client import RemoteReward
from digenrl.rewards.remote.media import MP4, UnreadableRequest, decode_media, encode_media
from digenrl.rewards.remote.server import make_app
from digenrl.rewards.remote.wire import decode_request, encode_request
from tests.conftest import RecipeMaker
from tests.rewards.services import FaultyServer, free_port, pictures, serving

ACCEPTS = ["image/png", "video/npy", MP4]


def video(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).integers(0, 256, size=(*shape, 3), dtype=np.uint8)


@pytest.mark.parametrize("kind", ["npy", "mp4"])
@pytest.mark.parametrize("shape", [(5, 32, 32), (1, 8, 8), (3, 7, 9), (2, 1, 1), (33, 16, 24)])
def test_a_video_arrives_bit_for_bit(kind: Any, shape: tuple[int, ...]) -> None:
    sent = video(*shape)
    part = encode_media(sent, kind, 12.5)
    assert part["type"] == f"video/{kind}"
    got = decode_media(part)
    assert np.array_equal(got, sent)
    assert not got.flags.writeable


def part(content: bytes) -> dict[str, str]:
    return {"type": MP4, "data": base64.b64encode(content).decode()}


def mp4_of(codec: str, pix_fmt: str) -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream(codec, rate=8)
        stream.height, stream.width, stream.pix_fmt = 32, 32, pix_fmt
        container.mux(stream.encode(av.VideoFrame.from_ndarray(video(32, 32), format="rgb24")))
        container.mux(stream.encode())
    return buffer.getvalue()


def test_an_mp4_of_another_client_is_read_as_far_as_its_own_compression_lets_it() -> None:
    assert decode_media(part(mp4_of("libx264", "yuv420p"))).shape == (1, 32, 32, 3)


@pytest.mark.parametrize(
    "content",
    [b"", b"\x00" * 64, mp4_of("mpeg4", "yuv420p"), mp4_of("libx264", "yuv420p")[:200], b"file '/etc/passwd'\n"],
    ids=["nothing", "zeros", "another codec", "cut off", "a playlist"],
)
def test_what_is_no_mp4_is_refused(content: bytes) -> None:
    with pytest.raises(UnreadableRequest, match="a video"):
        decode_media(part(content))


def test_an_mp4_that_would_unpack_to_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = encode_media(video(6, 16, 16), "mp4", 8)
    monkeypatch.setattr(media, "MOST_PIXELS", 5 * 16 * 16)
    with pytest.raises(UnreadableRequest, match="more than"):
        decode_media(sent)


def test_a_request_of_small_files_with_large_pictures_is_refused_before_all_are_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    content = encode_request("r", pictures(3, size=16))
    monkeypatch.setattr(wire, "MOST_PIXELS_IN_ALL", 2 * 16 * 16)
    with pytest.raises(UnreadableRequest, match="512 pixels in all"):
        decode_request(content)
    monkeypatch.setattr(wire, "MOST_PIXELS_IN_ALL", 3 * 16 * 16)
    assert len(decode_request(content)[1]) == 3


@pytest.mark.parametrize("kind", ["image/png", "video/npy", "video/mp4"])
def test_a_damaged_part_is_read_or_refused_and_nothing_else(kind: str) -> None:
    sent = encode_media(video(16, 16) if kind == "image/png" else video(3, 16, 16), "mp4" if kind == MP4 else "npy", 8)
    content, random = base64.b64decode(sent["data"]), np.random.default_rng(0)
    damaged = [content[: int(random.integers(len(content)))] for _ in range(50)]
    for _ in range(300):
        copy = bytearray(content)
        for place in random.integers(len(content) if kind != "video/npy" else 140, size=3):
            copy[place] = random.integers(256)
        damaged.append(bytes(copy))
    refused = 0
    for each in damaged:
        try:
            decode_media({"type": kind, "data": base64.b64encode(each).decode()})
        except UnreadableRequest:
            refused += 1
    assert refused > 50


def clips() -> list[Any]:
    return [replace(s, image=np.stack([s.image, s.image[::-1]]), fps=8.0) for s in pictures(5)]


@pytest.mark.parametrize("kind", ["npy", "mp4"])
def test_scores_of_videos_are_those_in_process_however_they_are_sent(kind: str) -> None:
    here = WeightedRewards.from_recipe([load_reward("jpeg")]).score(clips()).totals.tolist()
    server = FaultyServer()
    server.says(accepts=ACCEPTS)
    with serving(server) as url:
        there = WeightedRewards.from_recipe([load_reward("remote", [f"url={url}", f"video={kind}"])]).score(clips())
    assert there.totals.tolist() == here
    assert {sample["media"]["type"] for request in server.requests for sample in request["samples"]} == {f"video/{kind}"}


def test_mp4_is_refused_at_the_start_where_either_side_lacks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    server = FaultyServer()
    with serving(server) as url:
        settings = RemoteReward.Settings(url=url, video="mp4")
        with pytest.raises(ConfigError, match="does not read video/mp4") as caught:
            RemoteReward(settings)
        assert "npy" in caught.value.fix
        server.says(accepts=ACCEPTS)
        monkeypatch.setattr(client, "can_write_mp4", lambda: False)
        with pytest.raises(ConfigError, match="libx264rgb"):
            RemoteReward(settings)


IMAGE, VIDEO = SampleKind(height=32, width=48), SampleKind(height=32, width=48, num_frames=9)


@pytest.mark.parametrize(
    ("health", "samples", "detail"),
    [
        ({"media": ["video"]}, IMAGE, "scores videos, and rollout.num_frames is 1"),
        ({"sample_size": [64, 48]}, IMAGE, "scores pictures of 64 x 48 pixels"),
        ({"sample_size": [64, 48]}, VIDEO, "rollout.height x rollout.width is 32 x 48"),
        ({"media": ["video"]}, VIDEO, None),
        ({"media": ["image"]}, VIDEO, None),
        ({"sample_size": [32, 48]}, IMAGE, None),
        ({}, VIDEO, None),
    ],
)
def test_a_service_that_cannot_score_what_the_run_makes_is_refused_at_its_start(
    health: dict[str, Any], samples: SampleKind, detail: str | None
) -> None:
    server = FaultyServer()
    server.says(**health)
    with serving(server) as url:
        spec = load_reward("remote", [f"url={url}"])
        if detail is None:
            WeightedRewards.from_recipe([spec], samples=samples)
            return
        with pytest.raises(ConfigError, match=detail) as caught:
            WeightedRewards.from_recipe([spec], samples=samples)
    assert "rewards.0: remote" in caught.value.what
    assert server.requests == [], "nothing was scored"


def test_of_a_video_a_service_of_images_alone_is_asked_for_every_frame() -> None:
    server = FaultyServer()
    server.says(media=["image"])
    here = WeightedRewards.from_recipe([load_reward("jpeg")]).score(clips()).totals.tolist()
    with serving(server) as url:
        assert WeightedRewards.from_recipe([load_reward("remote", [f"url={url}"])]).score(clips()).totals.tolist() == here
    assert {sample["media"]["type"] for request in server.requests for sample in request["samples"]} == {"image/png"}


@pytest.mark.parametrize(
    "health",
    [
        {"media": []},
        {"media": "image"},
        {"media": ["sound"]},
        {"media": [3]},
        {"sample_size": [64]},
        {"sample_size": ["64", "64"]},
        {"sample_size": [True, 64]},
        {"compares_groups": 1},
        {"accepts": "video/npy"},
        {"rewards": 3},
    ],
)
def test_health_that_says_something_else_is_refused(health: dict[str, Any]) -> None:
    server = FaultyServer()
    server.says(**health)
    with serving(server) as url, pytest.raises(ConfigError, match=next(iter(health))):
        RemoteReward(RemoteReward.Settings(url=url))


def test_check_refuses_a_service_that_does_not_fit_and_warns_of_one_that_does_not_answer_here(tiny_recipe: RecipeMaker) -> None:
    server = FaultyServer()
    server.says(media=["video"])
    with serving(server) as url, pytest.raises(ConfigError, match=r"rewards\.0: remote scores videos"):
        list(service_warnings(tiny_recipe(rewards=[{"type": "remote", "url": url}])))
    away = f"http://127.0.0.1:{free_port()}"
    held_out = {"prompts": "builtin:shapes/heldout.jsonl", "rewards": [{"type": "remote", "url": away}]}
    (warning,) = service_warnings(tiny_recipe(eval=held_out))
    assert warning.startswith("eval.rewards.0: no reward service answers")
    assert away in warning


@pytest.mark.parametrize(
    ("sample", "detail"), [(pictures(1)[0], "scores videos"), (clips()[0], "scores pictures of 8 x 8 pixels")]
)
def test_a_server_refuses_what_its_reward_cannot_score_for_good(sample: Any, detail: str) -> None:
    class Motion:
        needs = Needs(media=("video",), sample_size=(8, 8))

        def score(self, samples: Any) -> Any:
            raise AssertionError("never asked")

    rewards = WeightedRewards([(load_reward("jpeg"), Motion())])

    async def asked() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(make_app(rewards)), base_url="http://x") as asker:
            kind = {"Content-Type": "application/json"}
            return await asker.post("/v1/score", content=encode_request("r", [sample]), headers=kind)

    answer = asyncio.run(asked())
    assert answer.status_code == 422
    assert detail in answer.json()["error"]
