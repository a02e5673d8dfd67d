"""The trainer remembers what it sent: to send it again, and for checkpoints of runs with stale trajectories."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from digenrl.errors import ProtocolError, RunFailed
from digenrl.weight_sync.held import HeldWeights
from digenrl.weight_sync.publication import check_arrived
from digenrl.weight_sync.publisher import Publisher

SideMaker = Callable[..., Any]
LORA = {"rank": 4, "alpha": 8}


def step(side: Any, version: int) -> None:
    side.move(seed=version)
    side.policy.version = version


def test_the_newest_publication_is_remembered_and_can_be_sent_again(make_side: SideMaker) -> None:
    side = make_side()
    publisher = Publisher(side.policy, torch.float32, keep_previous=False, bucket_bytes=4096)
    assert publisher.last is None
    for version in range(3):
        step(side, version)
        sent = publisher.publish()
        assert sent.manifest.version == version
        assert publisher.last is sent
        assert publisher.publish() is sent
        assert len(sent.buckets) == publisher.num_buckets > 1
        assert publisher.previous_version is None
        assert publisher.previous_tensors() == {}
    check_arrived(publisher.last.manifest, publisher.last.buckets)


def test_a_version_is_never_published_with_two_different_weights(make_side: SideMaker) -> None:
    side = make_side()
    publisher = Publisher(side.policy, torch.float32, keep_previous=False)
    sent = publisher.publish()
    side.move(seed=0)
    with pytest.raises(ProtocolError, match="Version 0 was published before"):
        publisher.publish()
    assert publisher.last is sent


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])
def test_the_version_before_survives_a_checkpoint_and_is_published_from_it(
    lora: Any, dtype: torch.dtype, make_side: SideMaker, tmp_path: Any
) -> None:
    name = str(dtype).removeprefix("torch.")
    trainer, generator = make_side(lora, name), make_side(lora, name)
    publisher = Publisher(trainer.policy, dtype, keep_previous=True)
    for version in (4, 5):
        step(trainer, version)
        publisher.publish()
        if version == 4:
            drawn_by_four = trainer.predict()
    assert publisher.previous_version == 4
    save_file(publisher.previous_tensors(), tmp_path / "previous.safetensors")

    resumed = make_side(lora, name)
    resumed.policy.load(trainer.weights(), source="checkpoint")
    resumed.policy.version = 5
    again, before = Publisher(resumed.policy, dtype, keep_previous=True), resumed.weights()
    four = again.published_from(load_file(tmp_path / "previous.safetensors"), 4)
    five = again.publish()
    assert resumed.is_unchanged_since(before)
    assert five.manifest == publisher.last.manifest
    assert again.previous_version == 4
    assert all(torch.equal(t, again.previous_tensors()[k]) for k, t in publisher.previous_tensors().items())

    held = HeldWeights(generator.policy, dtype)
    held.load(four.manifest, four.buckets)
    assert torch.equal(generator.predict(), drawn_by_four)
    held.load(five.manifest, five.buckets)
    assert torch.equal(generator.predict(), trainer.predict())


def test_the_order_in_which_two_versions_are_published_does_not_matter(make_side: SideMaker) -> None:
    side = make_side()
    publisher = Publisher(side.policy, torch.float32, keep_previous=True)
    four = side.weights()
    step(side, 5)
    publisher.publish()
    publisher.published_from(four, 4)
    assert (publisher.previous_version, publisher.last.manifest.version) == (4, 5)
    assert all(torch.equal(t, four[name]) for name, t in publisher.previous_tensors().items())


def test_what_is_remembered_does_not_change_with_what_was_given_out(make_side: SideMaker) -> None:
    side = make_side()
    publisher = Publisher(side.policy, torch.float32, keep_previous=True)
    publisher.publish()
    step(side, 1)
    publisher.publish()
    for tensor in publisher.previous_tensors().values():
        tensor.fill_(7)
    assert not any((tensor == 7).all() for tensor in publisher.previous_tensors().values())


@pytest.mark.parametrize("kind", ["missing", "foreign", "shape", "dtype"])
def test_weights_of_another_model_are_not_published(kind: str, make_side: SideMaker) -> None:
    side = make_side()
    publisher = Publisher(side.policy, torch.float32, keep_previous=True)
    tensors = side.weights()
    odd = "transformer_blocks.1.attn.to_k.lora_A.default.weight"
    if kind == "missing":
        del tensors[odd]
    elif kind == "foreign":
        odd = "transformer_blocks.7.attn.to_k.lora_A.default.weight"
        tensors[odd] = torch.zeros(2)
    elif kind == "shape":
        tensors[odd] = tensors[odd].T
    else:
        tensors[odd] = tensors[odd].to(torch.bfloat16)
    with pytest.raises(RunFailed, match=odd):
        publisher.published_from(tensors, 3)
    assert publisher.last is None
