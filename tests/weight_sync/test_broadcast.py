"""Broadcast among real processes and threads: equal bytes, or an error for everyone in time."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from xxhash import xxh3_128_hexdigest

from digenrl.weight_sync.broadcast import BroadcastGroup
from digenrl.weight_sync.held import HeldWeights
from digenrl.weight_sync.publication import BucketSpec, Publication, publish
from digenrl.weight_sync.transport import Listener, TransportFailed

DEADLINE_S = 40.0
OPENED: list[BroadcastGroup] = []


@pytest.fixture(autouse=True)
def _groups_are_closed() -> Iterator[None]:
    yield
    while OPENED:
        OPENED.pop().close()


def in_threads(*calls: Callable[[], Any]) -> list[Any]:
    """Results, or the TransportFailed, of calls that run at the same time."""
    results: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except TransportFailed as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=DEADLINE_S)
    assert not any(thread.is_alive() for thread in threads), "a call hangs"
    return results


def open_all(world_size: int, timeout_s: float = 10.0) -> list[BroadcastGroup]:
    """A group whose ranks are threads of this process."""
    listener = Listener()
    places = [listener, *[listener.address] * (world_size - 1)]
    groups = in_threads(
        *(
            lambda rank=rank, place=place: BroadcastGroup.open(
                rank=rank, world_size=world_size, address=place, timeout_s=timeout_s
            )
            for rank, place in enumerate(places)
        )
    )
    OPENED.extend(groups)
    return groups


def open_with(peers: list[Any], timeout_s: float) -> BroadcastGroup:
    """A group of this process as trainer and these processes as receivers."""
    listener, world_size = Listener(), len(peers) + 1
    address = dataclasses.asdict(listener.address)
    for rank, peer in enumerate(peers, start=1):
        peer.tell("open", rank=rank, world_size=world_size, address=address, timeout_s=timeout_s)
    group = BroadcastGroup.open(rank=0, world_size=world_size, address=listener, timeout_s=timeout_s)
    OPENED.append(group)
    assert [peer.answer() for peer in peers] == [{"done": "open"}] * len(peers)
    return group


def random_buckets(*sizes: int) -> list[np.ndarray]:
    draw = np.random.default_rng(sum(sizes))
    return [draw.integers(0, 256, size, dtype=np.uint8) for size in sizes]


def specs(buckets: list[np.ndarray]) -> list[dict[str, Any]]:
    return [{"num_bytes": bucket.nbytes, "digest": xxh3_128_hexdigest(bucket.tobytes())} for bucket in buckets]


def manifest_of(buckets: list[np.ndarray]) -> Publication:
    return Publication(version=0, tensors=(), buckets=tuple(BucketSpec(**spec) for spec in specs(buckets)), digest="")


def seconds(call: Callable[[], Any]) -> float:
    start = time.monotonic()
    with pytest.raises(TransportFailed):
        call()
    return time.monotonic() - start


def test_every_receiver_has_the_senders_bytes_and_a_group_can_be_opened_again_without_one(peers: list[Any]) -> None:
    buckets = random_buckets(1 << 20, 0, 1, 3 << 20)
    group = open_with(peers, timeout_s=20)
    for _ in range(2):
        for peer in peers:
            peer.tell("receive", buckets=specs(buckets))
        group.send(buckets)
        assert [peer.answer()["digests"] for peer in peers] == [[spec["digest"] for spec in specs(buckets)]] * 2
    group.close()
    for peer in peers:
        peer.tell("close")
    assert [peer.answer() for peer in peers] == [{"done": "close"}] * 2

    second = open_with(peers[1:], timeout_s=20)
    peers[1].tell("receive", buckets=specs(buckets))
    second.send(buckets)
    assert peers[1].answer()["digests"] == [spec["digest"] for spec in specs(buckets)]
    assert not dist.is_initialized(), "the default group is the trainer's"


def test_a_receiver_killed_in_the_middle_is_an_error_for_all_at_once_and_the_next_group_works(peers: list[Any]) -> None:
    buckets = random_buckets(*[8 << 20] * 4)
    group = open_with(peers, timeout_s=30)
    peers[0].signal(signal.SIGSTOP)  # so that the broadcast cannot get past its first buckets
    for peer in peers:
        peer.tell("receive", buckets=specs(buckets))
    killer = threading.Timer(0.5, peers[0].signal, args=[signal.SIGKILL])
    killer.start()
    took = seconds(lambda: group.send(buckets))
    killer.join(timeout=5)
    assert 0.3 < took < 5, "it was in the middle, and did not wait for the timeout"
    start = time.monotonic()
    assert "failed" in peers[1].answer()
    assert time.monotonic() - start < 5, "the other receiver is told too"
    with pytest.raises(TransportFailed, match="was closed before sending"):
        group.send(buckets)

    again = open_with(peers[1:], timeout_s=20)
    peers[1].tell("receive", buckets=specs(buckets))
    again.send(buckets)
    assert peers[1].answer()["digests"] == [spec["digest"] for spec in specs(buckets)]


def test_a_receiver_that_stands_still_is_an_error_at_the_timeout(peers: list[Any]) -> None:
    buckets = random_buckets(1 << 20)  # small enough for the system's buffers: only the barrier notices
    group = open_with(peers, timeout_s=2)
    peers[1].signal(signal.SIGSTOP)
    for peer in peers:
        peer.tell("receive", buckets=specs(buckets))
    assert 1 < seconds(lambda: group.send(buckets)) < 6
    assert "failed" in peers[0].answer()
    peers[1].signal(signal.SIGCONT)
    assert "failed" in peers[1].answer(), "nor does it believe that it has them when it wakes up"


def test_the_trainers_end_is_an_error_for_its_receivers_at_once() -> None:
    trainer, *receivers = open_all(3, timeout_s=20)
    manifest = manifest_of(random_buckets(1 << 20))
    closing = threading.Timer(0.3, trainer.close)
    closing.start()
    start = time.monotonic()
    results = in_threads(*(lambda r=receiver: r.receive(manifest) for receiver in receivers))
    assert all(isinstance(result, TransportFailed) for result in results)
    assert time.monotonic() - start < 5
    closing.join(timeout=5)


@pytest.mark.parametrize("leaver", [1, 2])
def test_when_one_receiver_leaves_nobody_waits_for_the_timeout(leaver: int) -> None:
    groups = open_all(3, timeout_s=20)
    buckets = random_buckets(4 << 20, 4 << 20)
    groups[leaver].close()
    start = time.monotonic()
    failures = in_threads(lambda: groups[0].send(buckets), lambda: groups[3 - leaver].receive(manifest_of(buckets)))
    assert time.monotonic() - start < 5, "even while somebody keeps the error"
    assert all(isinstance(failure, TransportFailed) for failure in failures)


def test_a_receiver_that_never_comes_is_named_when_the_time_is_over() -> None:
    listener = Listener()
    address = listener.address
    start = time.monotonic()
    results = in_threads(
        lambda: BroadcastGroup.open(rank=0, world_size=3, address=listener, timeout_s=2),
        lambda: BroadcastGroup.open(rank=1, world_size=3, address=address, timeout_s=2),
    )
    assert 1.5 < time.monotonic() - start < 6
    assert all(isinstance(result, TransportFailed) for result in results)
    assert "these did not come: 2" in results[0].what


def test_a_trainer_that_never_comes_is_an_error_when_the_time_is_over() -> None:
    listener = Listener()
    address = listener.address
    listener.close()
    took = seconds(lambda: BroadcastGroup.open(rank=1, world_size=2, address=address, timeout_s=1))
    assert took < 6


def test_a_receiver_of_an_earlier_meeting_disturbs_nobody() -> None:
    listener = Listener()
    address, stale = listener.address, dataclasses.replace(listener.address, token="another")

    def late() -> BroadcastGroup:
        time.sleep(0.4)
        return BroadcastGroup.open(rank=1, world_size=2, address=address, timeout_s=3)

    results = in_threads(
        lambda: BroadcastGroup.open(rank=0, world_size=2, address=listener, timeout_s=3),
        late,
        lambda: BroadcastGroup.open(rank=1, world_size=2, address=stale, timeout_s=1),
    )
    assert [isinstance(result, TransportFailed) for result in results] == [False, False, True]
    OPENED.extend(results[:2])
    buckets = random_buckets(1000)
    _, received = in_threads(lambda: results[0].send(buckets), lambda: results[1].receive(manifest_of(buckets)))
    assert np.array_equal(received[0], buckets[0])


@pytest.mark.parametrize("expected", [(1000,), (1000, 999), (1000, 4000), (1000, 2000, 1)])
def test_a_receiver_that_expects_other_buckets_is_told_before_anything_is_sent(expected: tuple[int, ...]) -> None:
    trainer, receiver = open_all(2)
    buckets, manifest = random_buckets(1000, 2000), manifest_of(random_buckets(*expected))
    sent, received = in_threads(lambda: trainer.send(buckets), lambda: receiver.receive(manifest))
    assert isinstance(received, TransportFailed)
    assert "3000 bytes" not in received.what
    assert f"the {len(expected)} of {sum(expected)} bytes" in received.what
    assert isinstance(sent, TransportFailed)


def test_read_only_buckets_can_be_sent() -> None:
    trainer, receiver = open_all(2)
    buckets = random_buckets(5000)
    buckets[0].flags.writeable = False
    _, received = in_threads(lambda: trainer.send(buckets), lambda: receiver.receive(manifest_of(buckets)))
    assert np.array_equal(received[0], buckets[0])
    assert received[0].flags.writeable


def test_a_publication_travels_by_broadcast_into_two_generators(make_rig: Callable[..., Any]) -> None:
    rigs = [make_rig(model={"lora": {"rank": 4, "alpha": 8}}) for _ in range(3)]
    trainer, *generators = rigs
    with torch.no_grad():
        for parameter in trainer.policy.parameters.values():
            parameter.add_(0.01)
    held = [HeldWeights(rig.policy, torch.float32) for rig in generators]
    published = publish(trainer.policy, 1, compute_dtype=torch.float32, bucket_bytes=2048)
    root, *others = open_all(3)
    _, *received = in_threads(
        lambda: root.send(published.buckets), *(lambda g=group: g.receive(published.manifest) for group in others)
    )
    for weights, buckets in zip(held, received, strict=True):
        weights.load(published.manifest, buckets)
    assert [weights.digest for weights in held] == [published.manifest.digest] * 2


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's table of sockets")
def test_everything_listens_on_loopback_only() -> None:
    open_all(2)
    mine = {_target(link) for link in Path("/proc/self/fd").iterdir()}
    listening = []
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in mine:
                listening.append(local.partition(":")[0])
    assert len(listening) >= 3, "the store's, and one of each rank"
    loopback = int.from_bytes(socket.inet_aton("127.0.0.1"), sys.byteorder)
    assert {int(ip, 16) for ip in listening} == {loopback}


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""


def test_an_address_that_is_not_this_nodes_is_refused() -> None:
    with pytest.raises(TransportFailed, match=r"192\.0\.2\.1"):
        Listener("192.0.2.1")
