"""Adapters bind what they name, every one of them learns, and the base stays as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from digenrl.errors import ConfigError

RigMaker = Callable[..., Any]
LORA = {"rank": 4, "alpha": 8}
# The text of the last block is not used any more: its queries reach nothing, and its output projection does not exist.
NEVER_TRAINED = {"transformer_blocks.1.attn.add_q_proj.lora_B.default.weight"}


def one_step(rig: Any) -> None:
    rig.trainer.accumulate(rig.trajectory(), rig.conditioning(), rig.advantages([0, 1, 3], [2, 5, 1]))
    rig.trainer.optimizer_step()


def copy_of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def test_by_default_all_attention_projections_get_an_adapter(make_rig: RigMaker) -> None:
    rig = make_rig(model={"lora": LORA})
    bound = {name.partition(".lora_")[0] for name in rig.policy.parameters}
    everywhere = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj"]
    wanted = {f"transformer_blocks.{block}.attn.{name}" for block in (0, 1) for name in everywhere}
    assert bound == wanted | {"transformer_blocks.0.attn.to_add_out"}
    assert rig.policy.num_parameters == sum(p.numel() for p in rig.adapter.transformer.parameters() if p.requires_grad)


@pytest.mark.parametrize("target", ["attn.to_qq", "o_q", "transformer_blocks", "ransformer_blocks.0.attn.to_q", "pos_embed.proj"])
def test_a_target_that_binds_no_linear_layer_is_refused_with_the_names_that_would(target: str, make_rig: RigMaker) -> None:
    with pytest.raises(ConfigError, match="target_modules") as caught:
        make_rig(model={"lora": {**LORA, "target_modules": ["attn.to_k", target]}})
    assert repr(target) in caught.value.what
    assert "attn.to_q" in caught.value.fix


def test_targets_are_matched_by_the_end_of_the_name(make_rig: RigMaker) -> None:
    rig = make_rig(model={"lora": {**LORA, "target_modules": ["1.attn.to_out.0", "ff.net.2"]}})
    bound = {name.partition(".lora_")[0] for name in rig.policy.parameters}
    assert bound == {"transformer_blocks.1.attn.to_out.0", "transformer_blocks.0.ff.net.2", "transformer_blocks.1.ff.net.2"}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_every_adapter_learns_in_one_step_and_the_base_does_not_change(checkpointing: bool, make_rig: RigMaker) -> None:
    rig = make_rig(model={"lora": LORA, "gradient_checkpointing": checkpointing})
    everything = dict(rig.adapter.transformer.named_parameters())
    before = copy_of(everything)
    one_step(rig)
    changed = {name for name, parameter in everything.items() if not torch.equal(parameter, before[name])}
    lora_b = {name for name in everything if "lora_B" in name}
    assert changed & lora_b == lora_b - NEVER_TRAINED
    assert all("lora_" in name for name in changed)


def test_the_effect_of_an_adapter_is_alpha_over_rank(make_rig: RigMaker) -> None:
    rig = make_rig(model={"lora": {"rank": 4, "alpha": 6, "target_modules": ["proj_out"]}})
    layer = rig.adapter.transformer.proj_out
    with torch.no_grad():
        layer.lora_B["default"].weight.normal_(generator=torch.Generator().manual_seed(0))
        x = torch.randn(3, 32, generator=torch.Generator().manual_seed(1))
        effect = layer(x) - layer.base_layer(x)
        expected = (x @ layer.lora_A["default"].weight.T @ layer.lora_B["default"].weight.T) * (6 / 4)
    torch.testing.assert_close(effect, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lora", [None, LORA])
def test_gradient_checkpointing_changes_no_gradient(lora: dict[str, Any] | None, make_rig: RigMaker) -> None:
    gradients = []
    for checkpointing in (False, True):
        rig = make_rig(model={"lora": lora, "gradient_checkpointing": checkpointing})
        calls = count_blocks(rig)
        rig.trainer.accumulate(rig.trajectory(), rig.conditioning(), rig.advantages([0, 1, 3], [2, 5, 1]))
        gradients.append((rig.gradient(), len(calls)))
    (plain, plain_calls), (recomputed, recomputed_calls) = gradients
    assert recomputed_calls > plain_calls, "checkpointing recomputes the blocks in backward"
    assert any(bool(g.any()) for g in plain.values())
    for name, gradient in plain.items():
        assert torch.equal(gradient, recomputed[name]), name


def count_blocks(rig: Any) -> list[int]:
    calls: list[int] = []
    rig.adapter.transformer.transformer_blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))
    return calls
