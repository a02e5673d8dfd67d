"""One step of every family on a GPU, with its text encoders and VAE offloaded. Numbers are checked on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from digenrl.ids import StepOutcome
from tests.families import FAMILIES, FamilyCase

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("case", FAMILIES, ids=lambda case: case.name)
@pytest.mark.parametrize("lora", [{"rank": 4, "alpha": 8}, None], ids=["lora", "full"])
def test_one_step_on_a_gpu_is_finite_and_leaves_no_text_encoder_there(
    lora: dict[str, int] | None, case: FamilyCase, make_rig: Callable[..., Any], tiny_folder: Callable[[str], Path]
) -> None:
    model = {"lora": lora, "dtype": "bfloat16", "gradient_checkpointing": True, "offload": True}
    rig = make_rig(
        run={"device": "cuda", "seed": 11},
        **case.sections(str(tiny_folder(case.name)), model=model, rollout={"true_cfg_scale": 2.0}),
    )
    trajectory = rig.trajectory()
    pictures = rig.adapter.decode(trajectory.final_latents)
    assert pictures.is_cuda
    assert bool(torch.isfinite(pictures).all())
    components = rig.adapter._pipeline.components
    waiting = [module for name, module in components.items() if isinstance(module, torch.nn.Module) and name != "transformer"]
    assert not any(parameter.is_cuda for module in waiting for parameter in module.parameters())
    rig.trainer.accumulate(trajectory, rig.conditioning(), rig.advantages([0, 1, 3], [2, 5, 1]))
    assert all(bool(torch.isfinite(each).all()) for each in rig.gradient().values())
    assert rig.trainer.optimizer_step().outcome is StepOutcome.APPLIED
