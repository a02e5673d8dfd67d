"""The generator: encodes prompts and denoises samples, under a version of the policy that it holds.

Invariants: a trajectory is made by one version, stamped before its first forward pass; a request for a version that is
not held is refused; results depend on ids and weights alone, whoever asks and in which order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from digenrl.algorithms.base import Algorithm
from digenrl.config.schema import Recipe
from digenrl.data.prompts import Prompt
from digenrl.diffusion.batching import row_batches
from digenrl.diffusion.noise import initial_latents, sde_noise
from digenrl.diffusion.noise_schedule import NoiseSchedule
from digenrl.diffusion.sampler import denoise
from digenrl.diffusion.trajectory import Trajectory
from digenrl.errors import ProtocolError
from digenrl.ids import SampleId
from digenrl.models.base import Conditioning, Guidance, ModelAdapter, concatenate
from digenrl.training.policy import Policy


class Generator:
    """Generates training samples."""

    def __init__(self, policy: Policy, algorithm: Algorithm, recipe: Recipe, schedule: NoiseSchedule) -> None:
        self._policy = policy
        self._algorithm = algorithm
        self._recipe = recipe
        self._schedule = schedule
        self._guidance = Guidance(recipe.rollout.true_cfg_scale, recipe.rollout.guidance_scale)

    def encode(self, prompts: Sequence[Prompt]) -> Conditioning:
        """Encode prompts in canonical batches. Returns one row per prompt."""
        return encode_prompts(self._policy.adapter, prompts, text_batch_size(self._recipe))

    def generate(
        self, samples: Sequence[SampleId], conditioning: Conditioning, prompt_rows: Tensor, policy_version: int
    ) -> Trajectory:
        """Denoise samples. conditioning: the step's prompts; prompt_rows: [B] int64, each sample's row in it.

        Raises ProtocolError when the policy is not at ``policy_version``.
        """
        if policy_version != self._policy.version:
            raise ProtocolError(
                f"Generation under version {policy_version} was asked for, and version {self._policy.version} is held.",
                why="A trajectory of the wrong version would be trained with wrong importance ratios.",
                fix="Sync the weights before generating.",
            )
        if self._policy.between_updates:
            raise ProtocolError(
                f"Generation under version {policy_version} was asked for between two updates of the step after it.",
                why="The weights are of no version.",
                fix="Generate the whole step before its first update.",
            )
        rollout, adapter, seed = self._recipe.rollout, self._policy.adapter, self._recipe.run.seed
        shape = adapter.latent_shape(rollout.height, rollout.width, rollout.num_frames)
        plan = self._algorithm.plan_steps(samples, self._schedule.num_steps)

        def predict(latents: Tensor, timesteps: Tensor, rows: Tensor) -> Tensor:
            return adapter.predict(latents, timesteps, conditioning.select(prompt_rows[rows]), self._guidance)

        def noise(step: int, rows: Tensor) -> Tensor:
            return sde_noise([samples[row] for row in rows.tolist()], shape, step, seed=seed)

        initial = initial_latents(samples, shape, seed=seed, same_in_group=rollout.init_same_noise)
        result = denoise(
            predict,
            initial.to(adapter.device),
            self._schedule,
            plan,
            self._algorithm.dynamics,
            noise,
            forward_batch_size=rollout.forward_batch_size,
            log_prob_reduction=self._algorithm.log_prob_reduction,
        )
        return Trajectory(
            samples=tuple(samples),
            policy_version=policy_version,
            sigmas=self._schedule.sigmas,
            noise_levels=plan.noise_levels.gather(1, plan.trained),
            denoising_steps=plan.trained,
            latents=result.latents,
            next_latents=result.next_latents,
            log_probs=result.log_probs,
            final_latents=result.final_latents,
        )


def text_batch_size(recipe: Recipe) -> int:
    """Prompts in a pass of the text encoders: those of a step where they are fewer than a forward pass of the network takes."""
    return min(recipe.rollout.forward_batch_size, recipe.rollout.prompts_per_step)


@torch.no_grad()
def encode_prompts(adapter: ModelAdapter, prompts: Sequence[Prompt], batch_size: int) -> Conditioning:
    """Encode prompts in batches of exactly ``batch_size``, the last one padded. Returns one row per prompt."""
    parts = []
    for batch in row_batches(len(prompts), batch_size):
        chunk = [prompts[row] for row in batch.rows.tolist()]
        encoded = adapter.encode_prompts([p.text for p in chunk], [p.negative for p in chunk])
        parts.append(encoded.select(torch.arange(batch.count)))
    return concatenate(parts)
