"""A worker holds a published version completely, or says that it holds none."""

from __future__ import annotations

import pickle
import random
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from digenrl.errors import DigenError, ProtocolError, RunFailed, WorkerError
from digenrl.training.digest import digest
from digenrl.training.policy import Policy
from digenrl.weight_sync.held import HeldWeights
from digenrl.weight_sync.publication import DamagedWeights, Published, digest_of, pack, publish
from digenrl.weight_sync.wire import wire_dtypes

SideMaker = Callable[..., Any]
LORA = {"rank": 4, "alpha": 8}
F32 = torch.float32


def published(side: Any, version: int, bucket_bytes: int = 4096) -> Published:
    return publish(side.policy, version, compute_dtype=F32, bucket_bytes=bucket_bytes)


def load(held: HeldWeights, sent: Published) -> None:
    held.load(sent.manifest, sent.buckets)


def as_published(side: Any, version: int) -> dict[str, torch.Tensor]:
    """What version v of the racing test is: all numbers equal to v."""
    return {name: torch.full_like(p, float(version)) for name, p in side.policy.parameters.items()}


@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])
def test_after_every_sync_both_sides_have_one_digest_and_it_moves_with_the_weights(lora: Any, make_side: SideMaker) -> None:
    trainer, generator = make_side(lora), make_side(lora)
    held = HeldWeights(generator.policy, F32)
    seen = {}
    for version in range(3):
        sent = published(trainer, version)
        before = generator.predict()
        load(held, sent)
        dtypes = wire_dtypes(trainer.policy, F32)
        assert digest_of(generator.policy, dtypes) == digest_of(trainer.policy, dtypes) == sent.manifest.digest == held.digest
        assert digest(generator.policy.parameters) == digest(trainer.policy.parameters)
        assert held.version == generator.policy.version == version
        assert torch.equal(generator.predict(), before) == (version == 0), "the starting model is the same on both sides"
        seen[sent.manifest.digest] = version
        trainer.move(seed=version)
    assert len(seen) == 3


def test_one_optimizer_step_of_the_trainer_reaches_the_generator(make_rig: Callable[..., Any]) -> None:
    trainer, generator = (make_rig(model={"lora": LORA}, train={"steps": 4, "learning_rate": 1e-2}) for _ in range(2))
    held = HeldWeights(generator.policy, F32)
    held.load(*parts(publish(trainer.policy, 0, compute_dtype=F32)))
    start = generator.generator.generate(generator.samples(), generator.conditioning(), rows(generator), 0)
    trainer.trainer.accumulate(trainer.trajectory(), trainer.conditioning(), trainer.advantages([0, 1, 3], [2, 5, 1]))
    trainer.trainer.optimizer_step()
    assert trainer.policy.version == 1
    held.load(*parts(publish(trainer.policy, 1, compute_dtype=F32)))
    here = generator.generator.generate(generator.samples(), generator.conditioning(), rows(generator), 1)
    there = trainer.generator.generate(trainer.samples(), trainer.conditioning(), rows(trainer), 1)
    assert torch.equal(here.final_latents, there.final_latents)
    assert torch.equal(here.log_probs, there.log_probs)
    assert not torch.equal(here.final_latents, start.final_latents)


def parts(sent: Published) -> tuple[Any, Any]:
    return sent.manifest, sent.buckets


def rows(rig: Any) -> torch.Tensor:
    return torch.tensor([sample.prompt for sample in rig.samples()])


def test_a_fresh_worker_generates_nothing_before_its_first_load(make_rig: Callable[..., Any]) -> None:
    rig = make_rig(model={"lora": LORA})
    held = HeldWeights(rig.policy, F32)
    assert (held.version, held.digest) == (-1, "")
    with pytest.raises(ProtocolError, match="version -1 is held"):
        rig.generator.generate(rig.samples(), rig.conditioning(), rows(rig), 0)
    held.load(*parts(publish(rig.policy, 0, compute_dtype=F32)))
    rig.generator.generate(rig.samples(), rig.conditioning(), rows(rig), 0)


def test_a_change_of_one_layer_whose_name_ends_in_a_number_reaches_the_generator(make_side: SideMaker) -> None:
    lora = {**LORA, "target_modules": ["attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"]}
    trainer, generator = make_side(lora), make_side(lora)
    held = HeldWeights(generator.policy, F32)
    load(held, published(trainer, 0))
    start, weights = generator.predict(), generator.weights()
    trainer.move(seed=0, size=0.1, only="to_out.0.lora_B")
    sent = published(trainer, 1)
    load(held, sent)
    changed = {name for name, tensor in weights.items() if not torch.equal(tensor, generator.policy.parameters[name])}
    assert changed == {f"transformer_blocks.{i}.attn.to_out.0.lora_B.default.weight" for i in (0, 1)}
    assert not torch.equal(generator.predict(), start)
    assert torch.equal(generator.predict(), trainer.predict())
    assert {spec.name for spec in sent.manifest.tensors} == set(generator.policy.parameters)


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
def test_a_frozen_second_adapter_arrives_whole(make_side: SideMaker) -> None:
    from peft import LoraConfig

    sides = [make_side(), make_side()]
    for side in sides:
        network = side.rig.adapter.transformer
        network.add_adapter(LoraConfig(r=2, target_modules=["attn.to_q"], init_lora_weights=False), adapter_name="old")
        named = {name: p.requires_grad_(False) for name, p in network.named_parameters() if ".old." in name}
        assert len(named) == 4
        side.policy.parameters = named
    trainer, generator = sides
    trainer.move(seed=3)
    load(HeldWeights(generator.policy, F32), published(trainer, 0))
    assert generator.is_unchanged_since(trainer.weights())


def test_a_worker_whose_model_has_one_module_under_another_name_is_told_the_names(make_side: SideMaker) -> None:
    trainer, generator = make_side(), make_side()
    attention = generator.rig.adapter.transformer.transformer_blocks[0].attn
    attention.to_query = attention.to_q
    del attention.to_q
    network = generator.rig.adapter.transformer
    generator.policy.parameters = {name: p for name, p in network.named_parameters() if p.requires_grad}
    held, before = HeldWeights(generator.policy, F32), generator.weights()
    with pytest.raises(RunFailed) as caught:
        load(held, published(trainer, 0))
    assert not isinstance(caught.value, WorkerError), "a restart would not help"
    assert "transformer_blocks.0.attn.to_query.lora_A.default.weight" in caught.value.what
    assert "transformer_blocks.0.attn.to_q.lora_A.default.weight" in caught.value.what
    assert "transformer_blocks.1" not in caught.value.what
    assert held.version == -1
    assert generator.is_unchanged_since(before)


@pytest.mark.parametrize("kind", ["missing", "foreign", "shape", "dtype"])
def test_weights_are_bound_completely_or_not_at_all(kind: str, make_side: SideMaker) -> None:
    side = make_side()
    tensors, dtypes = side.weights(), wire_dtypes(side.policy, F32)
    odd = "transformer_blocks.1.attn.to_k.lora_A.default.weight"
    if kind == "missing":
        del tensors[odd]
    elif kind == "foreign":
        odd = "transformer_blocks.7.attn.to_k.lora_A.default.weight"
        tensors[odd], dtypes[odd] = torch.zeros(2), F32
    elif kind == "shape":
        tensors[odd] = tensors[odd].T
    else:
        dtypes[odd] = torch.bfloat16
    side.move(seed=0)
    held, before = HeldWeights(side.policy, F32), side.weights()
    with pytest.raises(RunFailed, match=odd):
        load(held, pack(tensors, dtypes, version=0))
    assert held.version == -1
    assert side.is_unchanged_since(before)


def test_a_flipped_bit_in_any_bucket_is_refused_with_nothing_changed_and_the_intact_one_loads(make_side: SideMaker) -> None:
    trainer, generator = make_side(), make_side()
    held = HeldWeights(generator.policy, F32)
    load(held, published(trainer, 4))
    trainer.move(seed=0)
    sent, before = published(trainer, 5, bucket_bytes=1024), generator.weights()
    assert len(sent.buckets) > 5
    draw = random.Random(0)
    for index, bucket in enumerate(sent.buckets):
        damaged = [b.copy() for b in sent.buckets]
        damaged[index][draw.randrange(bucket.nbytes)] ^= 1 << draw.randrange(8)
        with pytest.raises(DamagedWeights, match=f"bucket {index} "):
            held.load(sent.manifest, damaged)
        assert held.version == 4
        assert generator.is_unchanged_since(before)
    load(held, sent)
    assert held.version == 5
    assert torch.equal(generator.predict(), trainer.predict())


def test_read_only_buckets_at_any_address_load(make_side: SideMaker) -> None:
    trainer, generator = make_side(), make_side()
    trainer.move(seed=0)
    sent = published(trainer, 0)
    crooked = []
    for bucket in sent.buckets:
        memory = np.empty(bucket.nbytes + 1, dtype=np.uint8)
        memory[1:] = bucket
        memory.flags.writeable = False
        crooked.append(memory[1:])
    HeldWeights(generator.policy, F32).load(sent.manifest, crooked)
    assert torch.equal(generator.predict(), trainer.predict())


def test_weights_keep_their_memory(make_side: SideMaker) -> None:
    trainer, generator = make_side(), make_side()
    places = {name: p.data_ptr() for name, p in generator.policy.parameters.items()}
    parameters = dict(generator.rig.adapter.transformer.named_parameters())
    trainer.move(seed=0)
    load(HeldWeights(generator.policy, F32), published(trainer, 0))
    assert {name: parameters[name].data_ptr() for name in places} == places
    assert all(p.requires_grad and p.grad is None for p in generator.policy.parameters.values())


def test_an_older_version_is_refused_and_the_same_one_changes_nothing(make_side: SideMaker) -> None:
    trainer, generator = make_side(), make_side()
    held = HeldWeights(generator.policy, F32)
    old = published(trainer, 1)
    trainer.move(seed=0)
    new = published(trainer, 2)
    load(held, new)
    before = generator.weights()
    with pytest.raises(ProtocolError, match=r"Version 1 .* has been at version 2"):
        load(held, old)
    load(held, new)
    held.load(new.manifest, [])  # nothing is read of what is held already
    assert held.version == 2
    assert generator.is_unchanged_since(before)


def test_other_weights_under_the_version_that_is_held_are_refused(make_side: SideMaker) -> None:
    trainer, generator = make_side(), make_side()
    held = HeldWeights(generator.policy, F32)
    load(held, published(trainer, 2))
    before = generator.weights()
    trainer.move(seed=0)
    with pytest.raises(ProtocolError, match="Two different weights were published as version 2"):
        load(held, published(trainer, 2))
    assert held.version == 2
    assert generator.is_unchanged_since(before)


def test_weights_that_changed_after_loading_are_found_when_the_version_comes_again(make_side: SideMaker) -> None:
    side = make_side()
    held, sent = HeldWeights(side.policy, F32), published(side, 2)
    load(held, sent)
    side.move(seed=0)
    with pytest.raises(WorkerError, match="changed after they were loaded"):
        load(held, sent)
    assert (held.version, held.digest) == (-1, "")
    load(held, sent)
    assert held.version == 2


def test_a_copy_that_breaks_off_leaves_no_version_until_it_is_sent_again(make_rig: Callable[..., Any]) -> None:
    rig = make_rig(model={"lora": LORA})
    held = HeldWeights(rig.policy, F32)
    older, same = (parts(publish(rig.policy, version, compute_dtype=F32)) for version in (2, 3))
    held.load(*same)
    with torch.no_grad():
        for parameter in rig.policy.parameters.values():
            parameter.add_(1)
    newer = parts(publish(rig.policy, 4, compute_dtype=F32))
    last = rig.policy.parameters[max(rig.policy.parameters)]
    whole = last.data
    last.data = torch.zeros(1, 1).expand(whole.shape)  # torch refuses to write into it
    with pytest.raises(WorkerError, match="the copy broke off"):
        held.load(*newer)
    assert held.version == -1
    for version in (3, 4):
        with pytest.raises(ProtocolError, match="version -1 is held"):
            rig.generator.generate(rig.samples(), rig.conditioning(), rows(rig), version)
    last.data = whole
    with pytest.raises(ProtocolError, match="has been at version 3"):
        held.load(*older)
    held.load(*newer)
    assert held.version == 4


def test_weights_that_are_not_the_published_bytes_after_the_copy_are_no_version(make_side: SideMaker) -> None:
    trainer, generator = make_side(), make_side()
    held = HeldWeights(generator.policy, F32)
    name = "transformer_blocks.1.attn.to_k.lora_A.default.weight"
    narrow = generator.policy.parameters[name]
    narrow.data = narrow.data.to(torch.bfloat16)  # stored with fewer bits than were sent
    with pytest.raises(WorkerError, match=f"1 of {len(generator.policy.parameters)} tensors differ .* {name}"):
        load(held, published(trainer, 0))
    assert held.version == -1


class Recorded(Policy):
    """A policy that writes down the versions that it is given."""

    assigned: list[int]

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "version":
            self.assigned.append(value)


def test_two_hundred_racing_deliveries_never_go_back(make_side: SideMaker) -> None:
    side = make_side({"rank": 1, "alpha": 1, "target_modules": ["attn.to_q", "attn.to_k"]})
    side.policy.__class__, side.policy.assigned = Recorded, []
    held, dtypes = HeldWeights(side.policy, F32), wire_dtypes(side.policy, F32)
    deliveries = [pack(as_published(side, version), dtypes, version=version) for version in range(100)] * 2
    random.Random(0).shuffle(deliveries)
    deliveries.sort(key=lambda sent: sent.manifest.version // 10)  # late by up to 10 versions
    waiting, refused = list(reversed(deliveries)), []

    def deliver() -> None:
        while waiting:
            try:
                load(held, waiting.pop())
            except ProtocolError as error:
                refused.append(error)

    racers = [threading.Thread(target=deliver) for _ in range(8)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # threads change places in the middle of a load, not after a hundred of them
    try:
        for thread in racers:
            thread.start()
        for thread in racers:
            thread.join(timeout=30)
    finally:
        sys.setswitchinterval(interval)
    assert not waiting
    assert not any(thread.is_alive() for thread in racers)
    known = [version for version in side.policy.assigned if version != -1]
    assert known == sorted(set(known))
    assert len(known) > 10
    assert all("has been at version" in error.what for error in refused)
    assert refused
    assert held.version == 99
    assert side.is_unchanged_since(as_published(side, 99))


def test_a_hundred_syncs_leave_the_frozen_base_as_it_was(make_side: SideMaker) -> None:
    trainer, generator = make_side(LORA, "bfloat16"), make_side(LORA, "bfloat16")
    held = HeldWeights(generator.policy, torch.bfloat16)
    base = digest(generator.frozen())
    for version in range(100):
        trainer.move(seed=version)
        load(held, publish(trainer.policy, version, compute_dtype=torch.bfloat16))
    assert digest(generator.frozen()) == digest(trainer.frozen()) == base
    assert torch.equal(generator.predict(), trainer.predict())


def test_a_negative_version_is_refused(make_side: SideMaker) -> None:
    side = make_side()
    sent = published(side, 0)
    with pytest.raises(ProtocolError, match="Version -1"):
        HeldWeights(side.policy, F32).load(replace(sent.manifest, version=-1), sent.buckets)


def test_errors_travel_between_processes_with_their_sentences() -> None:
    error = DamagedWeights("what", why="why", fix="fix")
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, DigenError) and type(copy) is DamagedWeights
    assert str(copy) == str(error)
