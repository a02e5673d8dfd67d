"""Qwen-Image, on top of diffusers' QwenImagePipeline.

Conventions (measured against diffusers 0.42): the network is given timestep / 1000; latents are packed 2 x 2 (here only on the
way into the network and out of it); true CFG is two passes, and the combined prediction of every token is scaled to the norm of
the conditional one; sigmas shift with the number of image tokens and are stretched to end at a given one.

Text is the prompt in a template, of which the pipeline cuts off the first tokens. Each prompt is encoded by itself, so that its
embedding depends on no other, and stored with zeros up to ``model.max_sequence_length``. A forward pass sees the text up to its
longest prompt: where all rows are of one length, and so in all training, exactly that text and no mask, as in diffusers' call
with one prompt. Where prompts of different lengths share a pass, the mask changes the last bits of the shorter ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from digenrl.config.schema import Recipe
from digenrl.diffusion.noise_schedule import NoiseSchedule
from digenrl.errors import ConfigError
from digenrl.models.base import Conditioning, Guidance
from digenrl.models.packing import pack, unpack
from digenrl.models.pipeline_adapter import JOINT_ATTENTION, PipelineAdapter, Reader


class QwenImageAdapter(PipelineAdapter):
    """One loaded Qwen-Image, or parts of one."""

    pipeline_class = "QwenImagePipeline"
    text_components = ("text_encoder", "tokenizer")
    default_lora_targets = JOINT_ATTENTION
    packing = 2
    sharded_blocks = ("QwenImageTransformerBlock",)

    @torch.no_grad()
    def encode_prompts(self, prompts: Sequence[str], negative_prompts: Sequence[str]) -> Conditioning:
        """prompt_embeds [P, L, D] and prompt_embeds_mask [P, L], and their negative twins where CFG is used."""
        tensors: dict[str, Tensor] = {}
        with self._encoding(prompts):
            for prefix, texts in (("", prompts), ("negative_", negative_prompts))[: 1 + self._cfg]:
                tensors |= {f"{prefix}{name}": tensor for name, tensor in self._encode(texts).items()}
        return Conditioning(tensors)

    def noise_schedule(self, num_inference_steps: int, height: int, width: int) -> NoiseSchedule:
        """See ModelAdapter.noise_schedule."""
        sigmas = np.linspace(1.0, 1 / num_inference_steps, num_inference_steps).tolist()
        tokens = self._image_tokens(height, width, patch=self.packing)
        return self._flow_match_schedule(num_inference_steps, image_tokens=tokens, sigmas=sigmas)

    def predict(self, latents: Tensor, timesteps: Tensor, conditioning: Conditioning, guidance: Guidance) -> Tensor:
        """See ModelAdapter.predict."""
        height, width = latents.shape[-2:]
        text, tokens = conditioning.tensors, pack(latents)

        def velocity(prefix: str) -> Tensor:
            mask = text[f"{prefix}prompt_embeds_mask"]
            longest = int(mask.sum(1).max())
            mask = mask[:, :longest]
            return self._run(
                tokens,
                timestep=timesteps / 1000,
                encoder_hidden_states=text[f"{prefix}prompt_embeds"][:, :longest],
                encoder_hidden_states_mask=None if bool(mask.all()) else mask,
                img_shapes=[[(1, height // 2, width // 2)]] * len(latents),
            )

        found = velocity("")
        if guidance.true_cfg_scale > 1:
            negative = velocity("negative_")
            combined = negative + guidance.true_cfg_scale * (found - negative)
            norms = [torch.norm(each, dim=-1, keepdim=True) for each in (found, combined)]
            found = combined * (norms[0] / norms[1])
        return unpack(found, height, width)

    def _encode(self, texts: Sequence[str]) -> dict[str, Tensor]:
        limit, found = self._settings.max_sequence_length, {}
        for text in dict.fromkeys(texts):
            embeds = self._pipeline.encode_prompt(prompt=[text], device=self.device, max_sequence_length=limit)[0][0]
            found[text] = (functional.pad(embeds, (0, 0, 0, limit - len(embeds))), torch.arange(limit) < len(embeds))
        return {
            "prompt_embeds": torch.stack([found[text][0] for text in texts]),
            "prompt_embeds_mask": torch.stack([found[text][1] for text in texts]).to(self.device),
        }

    def _decode(self, latents: Tensor) -> Tensor:
        vae = self._pipeline.vae
        mean, std = (
            torch.tensor(values, device=latents.device).view(1, -1, 1, 1, 1)
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        # One frame of a video VAE. Divided by the inverse, as the pipeline does: the product has other last bits.
        decoded: Tensor = vae.decode(latents[:, :, None] / (1.0 / std) + mean, return_dict=False)[0]
        return decoded[:, :, 0]

    def _readers(self) -> Sequence[Reader]:
        pipeline = self._pipeline
        head = pipeline.prompt_template_encode.partition("{}")[0]
        limit = self._settings.max_sequence_length + pipeline.prompt_template_encode_start_idx
        return (Reader(pipeline.tokenizer, limit, template=f"{head}{{}}"),)

    def _check(self, recipe: Recipe) -> None:
        if self._pipeline.transformer.config.guidance_embeds:
            raise ConfigError(
                f"model.path: {recipe.model.path!r} is distilled for embedded guidance, which Qwen-Image's network in diffusers "
                "does not compute.",
                why="Its time embedding takes no guidance, and the first forward pass would fail.",
                fix="Use the model itself, with rollout.true_cfg_scale.",
            )
