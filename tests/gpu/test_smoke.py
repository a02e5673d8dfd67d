"""One step of everything on a GPU. Numbers are checked on the CPU; here it must run and stay finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from digenrl.ids import StepOutcome

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize(
    "model",
    [
        {"lora": {"rank": 4, "alpha": 8}, "dtype": "bfloat16", "gradient_checkpointing": True},
        {"lora": None, "dtype": "float32"},
    ],
    ids=["lora_bfloat16", "full_float32"],
)
def test_one_step_on_a_gpu_gives_finite_gradients_and_changes_the_weights(
    model: dict[str, Any], make_rig: Callable[..., Any]
) -> None:
    rig = make_rig(
        run={"device": "cuda", "seed": 11},
        model=model,
        algorithm={"type": "flow_grpo", "kl_beta": 0.01},
        rollout={"true_cfg_scale": 2.0},
        train={"steps": 1, "timestep_batch_size": 2, "ema": {}},
    )
    before = {name: p.detach().clone() for name, p in rig.policy.parameters.items()}
    trajectory = rig.trajectory()
    images = rig.adapter.decode(trajectory.final_latents)
    assert images.is_cuda
    assert torch.isfinite(images).all()
    rig.trainer.accumulate(trajectory, rig.conditioning(), rig.advantages([0, 1, 3], [2, 5, 1]))
    gradient = rig.gradient()
    assert all(bool(torch.isfinite(g).all()) for g in gradient.values())
    assert any(bool(g.any()) for g in gradient.values())
    report = rig.trainer.optimizer_step()
    assert report.outcome is StepOutcome.APPLIED
    assert any(not torch.equal(p, before[name]) for name, p in rig.policy.parameters.items())


def test_the_same_noise_and_adapters_are_drawn_for_a_gpu_as_for_a_cpu(make_rig: Callable[..., Any]) -> None:
    state = torch.cuda.get_rng_state()
    rigs = [make_rig(run={"device": device, "seed": 11}, model={"lora": {"rank": 4, "alpha": 8}}) for device in ("cpu", "cuda")]
    assert torch.equal(torch.cuda.get_rng_state(), state)
    on_cpu, on_gpu = (rig.policy.parameters for rig in rigs)
    assert all(torch.equal(p, on_gpu[name].cpu()) for name, p in on_cpu.items())
    first, second = (rig.trajectory() for rig in rigs)
    assert torch.equal(first.latents[:, 0], second.latents[:, 0].cpu())
