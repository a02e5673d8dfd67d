"""Wan2.1 text to video, 1.3B and 14B, on top of diffusers' WanPipeline.

Conventions (measured against diffusers 0.42): timesteps 0..1000; true CFG as two passes, positive and negative; text is UMT5's
tokens padded with zeros, no mask; latents [B, 16, (F - 1) / 4 + 1, H / 8, W / 8] are normalised by the VAE's mean and deviation
of each channel.

The published folders name UniPC, a solver of second order that looks back at earlier steps. A policy gradient needs each step
as a Gaussian of the latents before it alone, so sampling here is on the grid of the flow-match Euler scheduler with the folder's
shift, in rollout, evaluation and training. It starts at sigma 1; UniPC's starts at 1 - 1e-6 and its timesteps are rounded to
integers, so its table would not say which sigma a timestep belongs to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from digenrl.config.schema import Recipe
from digenrl.diffusion.noise_schedule import NoiseSchedule
from digenrl.errors import ConfigError
from digenrl.models.base import Conditioning, Guidance
from digenrl.models.pipeline_adapter import PipelineAdapter, Reader
from digenrl.models.video import frames_first, latent_shape


class WanAdapter(PipelineAdapter):
    """One loaded Wan2.1, or parts of one."""

    pipeline_class = "WanPipeline"
    text_components = ("text_encoder", "tokenizer")
    media = ("image", "video")
    default_lora_targets = tuple(
        f"{attention}.{name}" for attention in ("attn1", "attn2") for name in ("to_q", "to_k", "to_v", "to_out.0")
    )
    sharded_blocks = ("WanTransformerBlock",)

    @torch.no_grad()
    def encode_prompts(self, prompts: Sequence[str], negative_prompts: Sequence[str]) -> Conditioning:
        """prompt_embeds [P, L, D], and negative_prompt_embeds where CFG is used."""
        with self._encoding(prompts):
            embeds, negative = self._pipeline.encode_prompt(
                prompt=list(prompts),
                negative_prompt=list(negative_prompts) if self._cfg else None,
                do_classifier_free_guidance=self._cfg,
                max_sequence_length=self._settings.max_sequence_length,
                device=self.device,
            )
        return Conditioning({"prompt_embeds": embeds} | ({"negative_prompt_embeds": negative} if self._cfg else {}))

    def latent_shape(self, height: int, width: int, num_frames: int = 1) -> tuple[int, ...]:
        """See video.latent_shape."""
        return latent_shape(self._pipeline, height, width, num_frames)

    def noise_schedule(self, num_inference_steps: int, height: int, width: int) -> NoiseSchedule:
        """The flow-match Euler grid with ``model.flow_shift``, or the shift of the scheduler that the folder names."""
        from diffusers import FlowMatchEulerDiscreteScheduler

        config = self._pipeline.scheduler.config
        shift = self._settings.flow_shift or config.get("flow_shift") or config.get("shift") or 1.0
        scheduler = FlowMatchEulerDiscreteScheduler(num_train_timesteps=config.num_train_timesteps, shift=shift)
        scheduler.set_timesteps(num_inference_steps, device="cpu")
        return NoiseSchedule(sigmas=scheduler.sigmas.float(), timesteps=scheduler.timesteps.float())

    def predict(self, latents: Tensor, timesteps: Tensor, conditioning: Conditioning, guidance: Guidance) -> Tensor:
        """See ModelAdapter.predict."""
        text = conditioning.tensors
        positive = self._run(latents, timestep=timesteps, encoder_hidden_states=text["prompt_embeds"])
        if guidance.true_cfg_scale <= 1:
            return positive
        negative = self._run(latents, timestep=timesteps, encoder_hidden_states=text["negative_prompt_embeds"])
        return negative + guidance.true_cfg_scale * (positive - negative)

    def _decode(self, latents: Tensor) -> Tensor:
        vae = self._pipeline.vae
        per_channel = (1, vae.config.z_dim, 1, 1, 1)
        mean = torch.tensor(vae.config.latents_mean, device=latents.device).view(per_channel)
        # As the pipeline has it, by the reciprocal: the last bits of a product would be others.
        inverse = 1.0 / torch.tensor(vae.config.latents_std, device=latents.device).view(per_channel)
        return frames_first(vae.decode(latents / inverse + mean, return_dict=False)[0])

    def _place(self, recipe: Recipe) -> None:
        """As other families, but for the small layers that the published model keeps in float32 in any compute type."""
        kept = {}
        if "transformer" in self._parts:
            network: Any = self.transformer
            names, parameters = network._keep_in_fp32_modules, dict(network.named_parameters())
            kept = {name: p.detach().clone() for name, p in parameters.items() if any(part in name for part in names)}
        super()._place(recipe)
        for name, value in kept.items():
            self.transformer.get_parameter(name).data = value.to(self.device)

    def _check(self, recipe: Recipe) -> None:
        pipeline, rollout = self._pipeline, recipe.rollout
        _refuse_other_wans(pipeline)
        config = pipeline.transformer.config
        _, *lengths = self.latent_shape(rollout.height, rollout.width, rollout.num_frames)
        sides = zip(("num_frames", "height", "width"), lengths, config.patch_size, strict=True)
        for name, latents, patch in sides:
            if latents // patch > config.rope_max_seq_len:
                raise ConfigError(
                    f"rollout.{name} ({getattr(rollout, name)}) is more than this model has positions for.",
                    why=f"It makes {latents // patch} tokens along that side, and the model knows {config.rope_max_seq_len}.",
                    fix=f"Use a smaller rollout.{name}.",
                )

    def _readers(self) -> Sequence[Reader]:
        return [Reader(self._pipeline.tokenizer, self._settings.max_sequence_length)]

    def _truncated(self, prompts: Sequence[str]) -> set[str]:
        from diffusers.pipelines.wan.pipeline_wan import prompt_clean

        # The tokenizer reads prompts with blanks and HTML signs put in order.
        cut = super()._truncated([prompt_clean(prompt) for prompt in prompts])
        return {prompt for prompt in prompts if prompt_clean(prompt) in cut}


def _refuse_other_wans(pipeline: Any) -> None:
    """Raise ConfigError for later and other members of the family, whose pipelines have the same class."""
    components, config = pipeline.components, pipeline.config
    if components.get("transformer_2") is not None or config.get("boundary_ratio") is not None or config.get("expand_timesteps"):
        raise ConfigError(
            "model.path holds a Wan2.2, and model.type wan is for Wan2.1 text to video.",
            why="Wan2.2 has two transformers, or a timestep for each token; one policy is trained here.",
            fix="Use Wan-AI/Wan2.1-T2V-1.3B-Diffusers or Wan-AI/Wan2.1-T2V-14B-Diffusers.",
        )
