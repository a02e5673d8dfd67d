"""Pictures for prompts: the ODE, keyed noise, the decoder; no reward and no training.

Invariant: a picture depends on the weights, its prompt, the settings, the seed and its own two numbers (prompt and sample),
and neither on how many others are drawn nor on their prompts; only the last bits depend on the batch's size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from digenrl.data.prompts import Prompt
from digenrl.diffusion.dynamics import ODE
from digenrl.diffusion.noise import Purpose, normal
from digenrl.diffusion.sampler import StepPlan, denoise
from digenrl.errors import RunFailed
from digenrl.ids import SampleId
from digenrl.models.base import Guidance
from digenrl.rewards.compose import WeightedRewards
from digenrl.runtime.saved_run import OpenedModel
from digenrl.workers.generator import encode_prompts
from digenrl.workers.scorer import Scorer


@torch.no_grad()
def draw(opened: OpenedModel, prompts: Sequence[Prompt], *, num: int) -> NDArray[np.uint8]:
    """Draw ``num`` pictures of each prompt. Returns [P * num, H, W, 3], of videos [P * num, F, H, W, 3], prompt by prompt.

    Raises RunFailed when a picture is not finite.
    """
    adapter, rollout, section = opened.adapter, opened.recipe.rollout, opened.saved.section
    samples = [SampleId(opened.saved.policy_version, prompt, sample) for prompt in range(len(prompts)) for sample in range(num)]
    rows_of_prompts = torch.tensor([sample.prompt for sample in samples])
    # Not padded to the run's batch: one picture would cost as much as a whole batch of them.
    size = min(rollout.forward_batch_size, len(samples))
    conditioning = encode_prompts(adapter, prompts, min(size, len(prompts)))
    schedule = adapter.noise_schedule(section.num_inference_steps, rollout.height, rollout.width)
    shape = adapter.latent_shape(rollout.height, rollout.width, rollout.num_frames)
    initial = torch.stack([normal(shape, section.seed, Purpose.EVALUATION, s.prompt, s.sample) for s in samples])
    guidance = Guidance(section.true_cfg_scale, section.guidance_scale)

    def predict(latents: Tensor, timesteps: Tensor, rows: Tensor) -> Tensor:
        return adapter.predict(latents, timesteps, conditioning.select(rows_of_prompts[rows]), guidance)

    plan = StepPlan(
        noise_levels=torch.zeros(len(samples), schedule.num_steps), trained=torch.empty(len(samples), 0, dtype=torch.int64)
    )
    result = denoise(predict, initial.to(adapter.device), schedule, plan, ODE(), _no_noise, forward_batch_size=size)
    # A scorer without rewards: the pixels are made by the very code that makes those which rewards see.
    scored = Scorer(adapter, WeightedRewards([]), forward_batch_size=size).score(
        samples, [prompts[sample.prompt] for sample in samples], result.final_latents
    )
    broken = int(np.isnan(scored.rewards.totals).sum())
    if broken:
        raise RunFailed(
            f"{broken} of {len(samples)} pictures are not finite.",
            why="The weights have diverged, or the compute type is too narrow for this model.",
            fix="Use the other weights (--weights raw or ema), or an earlier run.",
        )
    return scored.images


def _no_noise(_step: int, _rows: Tensor) -> Tensor:
    raise AssertionError("the ODE asks for no noise")
