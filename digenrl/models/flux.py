"""FLUX.1-dev and FLUX.1-schnell, on top of diffusers' FluxPipeline.

Conventions (measured against diffusers 0.42): the network is given timestep / 1000 and multiplies it itself; latents are packed
2 x 2 (here only on the way into the network and out of it); the distilled dev is given its guidance as a number for each row,
schnell none; true CFG is two passes. Text is T5's tokens, padded and not masked, and CLIP's pooled vector. The sigma table of
dev shifts with the number of image tokens, that of schnell not at all.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from digenrl.config.checks import check_guidance
from digenrl.config.families import FAMILIES
from digenrl.config.schema import Recipe
from digenrl.diffusion.noise_schedule import NoiseSchedule
from digenrl.models.base import Conditioning, Guidance
from digenrl.models.packing import pack, unpack
from digenrl.models.pipeline_adapter import JOINT_ATTENTION, PipelineAdapter, Reader

_FAMILY = FAMILIES["flux"]


class FluxAdapter(PipelineAdapter):
    """One loaded FLUX.1, or parts of one."""

    pipeline_class = "FluxPipeline"
    text_components = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    default_lora_targets = JOINT_ATTENTION
    packing = 2
    sharded_blocks = ("FluxTransformerBlock", "FluxSingleTransformerBlock")

    @torch.no_grad()
    def encode_prompts(self, prompts: Sequence[str], negative_prompts: Sequence[str]) -> Conditioning:
        """prompt_embeds [P, L, D] and pooled_prompt_embeds [P, D'], and their negative twins where CFG is used."""
        tensors: dict[str, Tensor] = {}
        with self._encoding(prompts):
            for prefix, texts in (("", prompts), ("negative_", negative_prompts))[: 1 + self._cfg]:
                tensors[f"{prefix}prompt_embeds"], tensors[f"{prefix}pooled_prompt_embeds"], _ = self._pipeline.encode_prompt(
                    prompt=list(texts), device=self.device, max_sequence_length=self._settings.max_sequence_length
                )
        return Conditioning(tensors)

    def noise_schedule(self, num_inference_steps: int, height: int, width: int) -> NoiseSchedule:
        """See ModelAdapter.noise_schedule."""
        sigmas = np.linspace(1.0, 1 / num_inference_steps, num_inference_steps).tolist()
        tokens = self._image_tokens(height, width, patch=self.packing)
        return self._flow_match_schedule(num_inference_steps, image_tokens=tokens, sigmas=sigmas)

    def predict(self, latents: Tensor, timesteps: Tensor, conditioning: Conditioning, guidance: Guidance) -> Tensor:
        """See ModelAdapter.predict."""
        height, width = latents.shape[-2:]
        text, tokens, embedded = conditioning.tensors, pack(latents), None
        if self._pipeline.transformer.config.guidance_embeds:
            scale = _FAMILY.embedded_guidance if guidance.embedded is None else guidance.embedded
            embedded = torch.full((len(latents),), float(scale or 0.0), device=latents.device)

        def velocity(prefix: str) -> Tensor:
            embeds = text[f"{prefix}prompt_embeds"]
            return self._run(
                tokens,
                timestep=timesteps / 1000,
                guidance=embedded,
                pooled_projections=text[f"{prefix}pooled_prompt_embeds"],
                encoder_hidden_states=embeds,
                txt_ids=torch.zeros(embeds.shape[1], 3, device=latents.device),
                img_ids=_image_ids(height // 2, width // 2, latents.device),
            )

        found = velocity("")
        if guidance.true_cfg_scale > 1:
            negative = velocity("negative_")
            found = negative + guidance.true_cfg_scale * (found - negative)
        return unpack(found, height, width)

    def _readers(self) -> Sequence[Reader]:
        pipeline = self._pipeline
        return (
            Reader(pipeline.tokenizer, pipeline.tokenizer_max_length),
            Reader(pipeline.tokenizer_2, self._settings.max_sequence_length),
        )

    def _check(self, recipe: Recipe) -> None:
        check_guidance(recipe, _FAMILY, distilled=self._pipeline.transformer.config.guidance_embeds)


def _image_ids(height: int, width: int, device: torch.device) -> Tensor:
    """Row and column of every token, behind a 0. Returns [height * width, 3] float32."""
    ids = torch.zeros(height, width, 3, device=device)
    ids[..., 1] = torch.arange(height, device=device)[:, None]
    ids[..., 2] = torch.arange(width, device=device)
    return ids.view(-1, 3)
