"""One step of everything on a GPU. Numbers are checked on the CPU; here it must run and stay finite."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from digenrl.config.loader import load_recipe
from digenrl.ids import StepOutcome
from digenrl.runtime.train import train
from digenrl.training.pairs import one_ahead
from digenrl.training.timestep_parallel import pack_pairs
from tests.runtime.ray.conftest import QUICKSTART, SMALL

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


def test_pairs_that_are_copied_ahead_are_the_ones_that_are_copied_in_turn(make_rig: Callable[..., Any]) -> None:
    rig = make_rig(run={"device": "cuda", "seed": 11}, model={"lora": {"rank": 4, "alpha": 8}})
    trajectory, device = rig.trajectory(), torch.device("cuda")
    batches = list(pack_pairs(torch.arange(3), trajectory.denoising_steps.shape[1], 2))
    advantages = torch.tensor([0.0, 1.0, 3.0, 2.0, 5.0, 1.0])
    gathered = [rig.trainer._gather(trajectory, batch, advantages) for batch in batches]
    ahead = list(one_ahead(batches, lambda batch: rig.trainer._gather(trajectory, batch, advantages), device))
    assert len(ahead) == len(gathered) > 1
    for ours, plain in zip(ahead, gathered, strict=True):
        assert ours.latents.is_cuda and torch.equal(ours.latents, plain.latents)
        assert torch.equal(ours.real, plain.real) and torch.equal(ours.old_log_prob, plain.old_log_prob)


def trained(folder: Path, *changes: str) -> dict[str, Any]:
    return train(load_recipe(QUICKSTART, [*SMALL, "run.device=auto", f"run.output_dir={folder}", *changes]))


def test_a_generator_and_a_trainer_share_a_gpu(tmp_path: Path) -> None:
    shares = ("cluster.generators.0.resources.gpus=0.5", "cluster.trainer.resources.gpus=0.5")
    together = trained(tmp_path / "together", "cluster.placement=disaggregated", *shares)
    assert together["digests"] == trained(tmp_path / "alone")["digests"]


@pytest.mark.skipif(torch.cuda.device_count() < 3, reason="needs three CUDA devices")
def test_a_generator_of_two_gpus_that_hold_one_network_gives_the_weights_of_one(tmp_path: Path) -> None:
    sharded = ("cluster.placement=disaggregated", "cluster.generators=[{ranks: 2, shard: 2}]")
    assert trained(tmp_path / "two", *sharded)["digests"] == trained(tmp_path / "alone")["digests"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("shard", [1, 2])
def test_two_trainer_ranks_on_two_gpus_step_and_agree(tmp_path: Path, shard: int) -> None:
    ranks = ("cluster.placement=colocated", "cluster.trainer.ranks=2", f"cluster.trainer.shard={shard}")
    two = trained(tmp_path / "two", *ranks)
    assert two["steps"] == 3 and two["skipped_steps"] == 0
