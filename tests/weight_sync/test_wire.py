"""Generators run the policy that the trainer runs, in bfloat16 too; what travels rounded is what both round anyway."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from digenrl.weight_sync.held import HeldWeights
from digenrl.weight_sync.publication import pack, publish
from digenrl.weight_sync.wire import wire_dtypes

SideMaker = Callable[..., Any]
LORA = {"rank": 4, "alpha": 8}
COMPUTE = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.mark.parametrize("dtype", COMPUTE)
@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])
def test_both_sides_run_the_same_policy_bit_for_bit(lora: dict[str, Any] | None, dtype: str, make_side: SideMaker) -> None:
    trainer, generator = make_side(lora, dtype), make_side(lora, dtype)
    held = HeldWeights(generator.policy, COMPUTE[dtype])
    for version in range(3):
        trainer.move(seed=version)
        before = generator.predict()
        published = publish(trainer.policy, version, compute_dtype=COMPUTE[dtype])
        held.load(published.manifest, published.buckets)
        assert torch.equal(generator.predict(), trainer.predict())
        assert not torch.equal(generator.predict(), before)


def test_rounding_every_weight_would_be_another_policy(make_side: SideMaker) -> None:
    """So the test above fails when norms travel in bfloat16."""
    trainer = make_side(None, "bfloat16")
    trainer.move(seed=0)
    before = trainer.predict()
    with torch.no_grad():
        for parameter in trainer.policy.parameters.values():
            parameter.copy_(parameter.to(torch.bfloat16))
    assert not torch.equal(trainer.predict(), before)


def test_linear_and_convolution_weights_travel_in_bfloat16_and_all_others_in_float32(make_side: SideMaker) -> None:
    side = make_side(None, "bfloat16")
    dtypes = wire_dtypes(side.policy, torch.bfloat16)
    assert list(dtypes) == sorted(side.policy.parameters)
    exact = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    assert exact == {name for name in dtypes if ".norm_q." in name or ".norm_k." in name or ".norm_added_" in name}
    assert exact
    assert dtypes["pos_embed.proj.weight"] == dtypes["pos_embed.proj.bias"] == torch.bfloat16
    assert dtypes["transformer_blocks.0.attn.to_out.0.bias"] == torch.bfloat16


def test_adapters_travel_in_the_compute_dtype(make_side: SideMaker) -> None:
    policy = make_side(LORA, "bfloat16").policy
    assert set(wire_dtypes(policy, torch.bfloat16).values()) == {torch.bfloat16}
    assert set(wire_dtypes(policy, torch.float32).values()) == {torch.float32}


def test_a_weight_that_is_also_used_as_it_is_travels_as_it_is(make_side: SideMaker) -> None:
    side = make_side(None, "bfloat16")
    network = side.rig.adapter.transformer
    network.table = nn.Embedding(4, 4)
    network.tied = nn.Linear(4, 4, bias=False)
    network.tied.weight = network.table.weight
    network.scale_shift_table = nn.Parameter(torch.zeros(6))
    side.policy.parameters = dict(network.named_parameters())
    dtypes = wire_dtypes(side.policy, torch.bfloat16)
    assert dtypes["table.weight"] == dtypes["scale_shift_table"] == torch.float32


def test_casting_rounds_to_the_nearest_even_as_autocast_does() -> None:
    values = torch.tensor([1.0, 1.00390625, 1.01171875, -1.00390625, 3e-39, 65504.0, float("inf")])
    published = pack({"a": values}, {"a": torch.bfloat16}, version=0)
    sent = torch.from_numpy(published.buckets[0].copy()).view(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        used = nn.functional.linear(torch.ones(1, 1), values[:-1, None])[0]
    assert torch.equal(sent[:-1], used)
    assert sent[1] == 1.0
    assert sent[2] == 1.015625
