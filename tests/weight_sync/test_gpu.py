"""Weights leave a GPU, arrive on another, and are the same bytes. Run with ``pytest -m gpu tests/weight_sync``."""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from xxhash import xxh3_128_hexdigest

from digenrl.weight_sync.broadcast import BroadcastGroup
from digenrl.weight_sync.held import HeldWeights
from digenrl.weight_sync.publication import publish
from digenrl.weight_sync.transport import Listener, TransportFailed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs one CUDA device for each rank")

COMPUTE = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.mark.parametrize("dtype", COMPUTE)
@pytest.mark.parametrize("lora", [{"rank": 4, "alpha": 8}, None], ids=["lora", "full"])
def test_weights_of_a_gpu_arrive_on_a_gpu_and_on_a_cpu_with_one_digest(
    lora: Any, dtype: str, make_side: Callable[..., Any]
) -> None:
    trainer, generator, on_cpu = (make_side(lora, dtype, device) for device in ("cuda", "cuda", "cpu"))
    trainer.move(seed=0)
    published = publish(trainer.policy, 1, compute_dtype=COMPUTE[dtype])
    held = [HeldWeights(side.policy, COMPUTE[dtype]) for side in (generator, on_cpu)]
    for weights in held:
        weights.load(published.manifest, published.buckets)
        assert weights.digest == published.manifest.digest
    assert torch.equal(generator.predict(), trainer.predict())


def open_pair(peer: Any, timeout_s: float) -> BroadcastGroup:
    listener = Listener()
    address = dataclasses.asdict(listener.address)
    peer.tell("open", rank=1, world_size=2, address=address, timeout_s=timeout_s, device="cuda:1")
    group = BroadcastGroup.open(rank=0, world_size=2, address=listener, timeout_s=timeout_s, device=torch.device("cuda:0"))
    assert peer.answer() == {"done": "open"}
    return group


@two_gpus
def test_nccl_carries_the_buckets_and_a_peer_that_dies_is_an_error_in_time(peers: list[Any]) -> None:
    bucket = np.random.default_rng(0).integers(0, 256, 4 << 20, dtype=np.uint8)
    spec = {"num_bytes": bucket.nbytes, "digest": xxh3_128_hexdigest(bucket.tobytes())}
    group = open_pair(peers[0], timeout_s=30)
    peers[0].tell("receive", buckets=[spec])
    group.send([bucket])
    assert peers[0].answer()["digests"] == [spec["digest"]]
    peers[0].signal(signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(TransportFailed):
        group.send([bucket])
    assert time.monotonic() - start < 40
    again = open_pair(peers[1], timeout_s=30)
    peers[1].tell("receive", buckets=[spec])
    again.send([bucket])
    assert peers[1].answer()["digests"] == [spec["digest"]]
    again.close()
