"""The policy and its reference: the starting model inside, the policy bit for bit afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from digenrl.config.schema import Recipe
from digenrl.models.base import Guidance
from digenrl.models.sd3 import SD3Adapter
from digenrl.training.policy import Policy

RigMaker = Callable[..., Any]
WITH_KL = {"type": "flow_grpo", "kl_beta": 0.1}


def predict(rig: Any) -> Tensor:
    latents = torch.randn(3, 4, 4, 4, generator=torch.Generator().manual_seed(0))
    text = rig.conditioning().select(torch.tensor([0, 1, 1]))
    with torch.no_grad():
        return rig.adapter.predict(latents, torch.tensor([900.0, 500.0, 20.0]), text, Guidance())


def disturb(rig: Any) -> None:
    with torch.no_grad():
        for parameter in rig.policy.parameters.values():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.1)


@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 8}])
def test_inside_reference_the_network_is_exactly_the_starting_model(lora: dict[str, Any] | None, make_rig: RigMaker) -> None:
    rig = make_rig(model={"lora": lora}, algorithm=WITH_KL)
    start = predict(rig)
    disturb(rig)
    moved = predict(rig)
    weights = {name: p.detach().clone() for name, p in rig.policy.parameters.items()}
    assert float((moved - start).abs().mean()) > 0.01
    with rig.policy.reference():
        assert torch.equal(predict(rig), start)
    assert torch.equal(predict(rig), moved)
    assert all(torch.equal(p, weights[name]) and p.requires_grad for name, p in rig.policy.parameters.items())


@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 8}])
def test_the_policy_comes_back_when_something_raises_inside_reference(lora: dict[str, Any] | None, make_rig: RigMaker) -> None:
    rig = make_rig(model={"lora": lora}, algorithm=WITH_KL)
    disturb(rig)
    moved, network = predict(rig), rig.adapter.transformer
    with pytest.raises(ZeroDivisionError), rig.policy.reference():
        _ = 1 / 0
    assert rig.adapter.transformer is network
    assert torch.equal(predict(rig), moved)
    assert all(p.requires_grad for p in rig.policy.parameters.values())


def test_the_reference_of_a_full_fine_tuning_shares_no_memory_with_the_policy(make_rig: RigMaker) -> None:
    rig = make_rig(algorithm=WITH_KL)
    policy = {p.data_ptr() for p in rig.adapter.transformer.parameters()}
    with rig.policy.reference():
        reference = list(rig.adapter.transformer.parameters())
    assert not policy & {p.data_ptr() for p in reference}
    assert not any(p.requires_grad for p in reference)


def test_full_fine_tuning_trains_every_parameter_in_float32(make_rig: RigMaker) -> None:
    rig = make_rig(model={"dtype": "bfloat16"})
    assert set(rig.policy.parameters) == {name for name, _ in rig.adapter.transformer.named_parameters()}
    assert all(p.dtype == torch.float32 and p.requires_grad for p in rig.policy.parameters.values())


def test_the_device_sees_nothing_of_the_network_before_a_policy_decides_how_much_of_it(
    tiny_recipe: Callable[..., Recipe],
) -> None:
    recipe, elsewhere = tiny_recipe(), torch.device("meta")  # stands for one that may have no room for the whole
    adapter = SD3Adapter.load(recipe, elsewhere, frozenset({"transformer"}))
    assert {p.device.type for p in adapter.transformer.parameters()} == {"cpu"}
    Policy(adapter, recipe, needs_reference=False)
    assert {p.device for p in adapter.transformer.parameters()} == {elsewhere}
