"""Stable Diffusion 3 and 3.5, on top of diffusers' StableDiffusion3Pipeline.

Conventions (measured against diffusers 0.42): timesteps 0..1000; true CFG as one batch [negative, positive]; text is the two
CLIP encoders' tokens padded to the width of T5, then T5's tokens, or zeros where the folder has no T5. What is known about
text (tokenizers, limits, whether there is a T5) is known only where the text encoders are loaded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from digenrl.config.schema import Recipe
from digenrl.diffusion.noise_schedule import NoiseSchedule
from digenrl.errors import ConfigError
from digenrl.models.base import Conditioning, Guidance
from digenrl.models.pipeline_adapter import JOINT_ATTENTION, PipelineAdapter, Reader


class SD3Adapter(PipelineAdapter):
    """One loaded Stable Diffusion 3, or parts of one."""

    pipeline_class = "StableDiffusion3Pipeline"
    text_components = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "text_encoder_3", "tokenizer_3")
    default_lora_targets = JOINT_ATTENTION
    sharded_blocks = ("JointTransformerBlock",)

    @torch.no_grad()
    def encode_prompts(self, prompts: Sequence[str], negative_prompts: Sequence[str]) -> Conditioning:
        """prompt_embeds [P, L, D] and pooled_prompt_embeds [P, D'], and their negative twins where CFG is used."""
        with self._encoding(prompts):
            embeds, negative, pooled, negative_pooled = self._pipeline.encode_prompt(
                prompt=list(prompts),
                prompt_2=None,
                prompt_3=None,
                device=self.device,
                do_classifier_free_guidance=self._cfg,
                negative_prompt=list(negative_prompts) if self._cfg else None,
                max_sequence_length=self._settings.max_sequence_length,
            )
        tensors = {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}
        if self._cfg:
            tensors |= {"negative_prompt_embeds": negative, "negative_pooled_prompt_embeds": negative_pooled}
        return Conditioning(tensors)

    def noise_schedule(self, num_inference_steps: int, height: int, width: int) -> NoiseSchedule:
        """See ModelAdapter.noise_schedule."""
        tokens = self._image_tokens(height, width, patch=self._pipeline.transformer.config.patch_size)
        return self._flow_match_schedule(num_inference_steps, image_tokens=tokens)

    def predict(self, latents: Tensor, timesteps: Tensor, conditioning: Conditioning, guidance: Guidance) -> Tensor:
        """See ModelAdapter.predict."""
        text = conditioning.tensors
        embeds, pooled = text["prompt_embeds"], text["pooled_prompt_embeds"]
        guided = guidance.true_cfg_scale > 1
        if guided:
            latents, timesteps = torch.cat([latents] * 2), torch.cat([timesteps] * 2)
            embeds = torch.cat([text["negative_prompt_embeds"], embeds])
            pooled = torch.cat([text["negative_pooled_prompt_embeds"], pooled])
        velocity = self._run(latents, timestep=timesteps, encoder_hidden_states=embeds, pooled_projections=pooled)
        if guided:
            negative, positive = velocity.chunk(2)
            velocity = negative + guidance.true_cfg_scale * (positive - negative)
        return velocity

    def _readers(self) -> Sequence[Reader]:
        pipeline = self._pipeline
        readers = [Reader(tokenizer, pipeline.tokenizer_max_length) for tokenizer in (pipeline.tokenizer, pipeline.tokenizer_2)]
        if pipeline.text_encoder_3 is not None:
            readers.append(Reader(pipeline.tokenizer_3, self._settings.max_sequence_length))
        return readers

    def _check(self, recipe: Recipe) -> None:
        self._check_size(recipe)
        if "text_encoders" in self._parts:
            self._check_text_components()

    def _check_size(self, recipe: Recipe) -> None:
        config = self._pipeline.transformer.config
        limit = config.pos_embed_max_size * config.patch_size * self._pipeline.vae_scale_factor
        for side, pixels in (("height", recipe.rollout.height), ("width", recipe.rollout.width)):
            if pixels > limit:
                raise ConfigError(
                    f"rollout.{side} ({pixels}) is more than the {limit} pixels that this model can draw.",
                    why=f"It knows {config.pos_embed_max_size} positions per side.",
                    fix=f"Use rollout.{side}={limit} or less.",
                )

    def _check_text_components(self) -> None:
        """The third text encoder may be left out; the CLIP two may not, for diffusers has no way to do without them."""
        pipeline = self._pipeline
        wanted = ["text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"]
        if pipeline.text_encoder_3 is not None:
            wanted.append("tokenizer_3")
        for name in wanted:
            if pipeline.components[name] is None:
                raise ConfigError(
                    f"model.path: the model has no {name}.",
                    why="Stable Diffusion 3 reads its prompts with two CLIP encoders; only the third one (T5) may be left out.",
                    fix=f"Copy the folder {name}/ of the original model there, and name it in model_index.json.",
                )
        width = sum(encoder.config.hidden_size for encoder in (pipeline.text_encoder, pipeline.text_encoder_2))
        if width > pipeline.transformer.config.joint_attention_dim:
            raise ConfigError(
                f"model.path: the two CLIP encoders make text of width {width}, and the transformer takes "
                f"{pipeline.transformer.config.joint_attention_dim}.",
                why="diffusers would cut off the rest without a word.",
                fix="Put the text encoders and the transformer of one model there.",
            )
        if pipeline.text_encoder_3 is not None and self._settings.max_sequence_length == 0:
            raise ConfigError(
                "model.max_sequence_length: 0 leaves no tokens for the third text encoder, which this model has.",
                fix="Use model.max_sequence_length=256.",
            )
