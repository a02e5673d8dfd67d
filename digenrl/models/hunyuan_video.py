"""HunyuanVideo text to video, 13B, on top of diffusers' HunyuanVideoPipeline.

Conventions (measured against diffusers 0.42): timesteps 0..1000; embedded guidance as scale x 1000 in the compute type; true CFG
optional, as two passes; text is Llama's third-last layer over instructions and prompt, of which the instructions are cut off,
with an attention mask, and CLIP's pooled vector; sigmas are linspace(1, 0, T + 1) without the 0, then shifted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from digenrl.config.families import FAMILIES
from digenrl.config.schema import Recipe
from digenrl.diffusion.noise_schedule import NoiseSchedule
from digenrl.errors import ConfigError
from digenrl.models.base import Conditioning, Guidance
from digenrl.models.pipeline_adapter import JOINT_ATTENTION, PipelineAdapter, Reader
from digenrl.models.video import frames_first, latent_shape

_FRAME_TOLERANCE = 8
"""Tokens by which the instructions may differ from what is cut off: a few more or less are no other template."""


class HunyuanVideoAdapter(PipelineAdapter):
    """One loaded HunyuanVideo, or parts of one."""

    pipeline_class = "HunyuanVideoPipeline"
    text_components = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    media = ("image", "video")
    default_lora_targets = JOINT_ATTENTION
    sharded_blocks = ("HunyuanVideoTransformerBlock", "HunyuanVideoSingleTransformerBlock")

    @torch.no_grad()
    def encode_prompts(self, prompts: Sequence[str], negative_prompts: Sequence[str]) -> Conditioning:
        """prompt_embeds [P, L, D], prompt_attention_mask [P, L], pooled_prompt_embeds [P, D'], and negative twins with CFG."""
        with self._encoding(prompts):
            tensors = self._encode(prompts, "")
            if self._cfg:
                tensors |= self._encode(negative_prompts, "negative_")
        return Conditioning(tensors)

    def latent_shape(self, height: int, width: int, num_frames: int = 1) -> tuple[int, ...]:
        """See video.latent_shape."""
        return latent_shape(self._pipeline, height, width, num_frames)

    def noise_schedule(self, num_inference_steps: int, height: int, width: int) -> NoiseSchedule:
        """See ModelAdapter.noise_schedule."""
        sigmas = np.linspace(1.0, 0.0, num_inference_steps + 1)[:-1]
        return self._flow_match_schedule(num_inference_steps, image_tokens=0, sigmas=sigmas.tolist())

    def predict(self, latents: Tensor, timesteps: Tensor, conditioning: Conditioning, guidance: Guidance) -> Tensor:
        """See ModelAdapter.predict."""
        scale = FAMILIES["hunyuan_video"].embedded_guidance if guidance.embedded is None else guidance.embedded
        # In the compute type before it is multiplied, as the pipeline has it: 6.018 is 6016 in bfloat16.
        embedded = torch.tensor([scale] * len(latents), dtype=self._dtype, device=latents.device) * 1000.0
        shared = {"timestep": timesteps, "guidance": embedded}
        positive = self._run(latents, **shared, **_text(conditioning, ""))
        if guidance.true_cfg_scale <= 1:
            return positive
        negative = self._run(latents, **shared, **_text(conditioning, "negative_"))
        return negative + guidance.true_cfg_scale * (positive - negative)

    def _encode(self, prompts: Sequence[str], prefix: str) -> dict[str, Tensor]:
        embeds, pooled, mask = self._pipeline.encode_prompt(
            prompt=list(prompts),
            prompt_template=self._template,
            device=self.device,
            max_sequence_length=self._settings.max_sequence_length,
        )
        return {
            f"{prefix}prompt_embeds": embeds,
            f"{prefix}prompt_attention_mask": mask.to(embeds.dtype),
            f"{prefix}pooled_prompt_embeds": pooled,
        }

    @property
    def _template(self) -> dict[str, Any]:
        """The instructions around a prompt, by diffusers' names: ``template``, and ``crop_start`` tokens to cut off."""
        from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE

        own = self._settings.prompt_template
        return dict(DEFAULT_PROMPT_TEMPLATE) if own is None else {"template": own.template, "crop_start": own.crop_start}

    def _decode(self, latents: Tensor) -> Tensor:
        vae = self._pipeline.vae
        return frames_first(vae.decode(latents / vae.config.scaling_factor, return_dict=False)[0])

    def _check(self, recipe: Recipe) -> None:
        config = self._pipeline.transformer.config
        if config.image_condition_type is not None:
            raise ConfigError(
                "model.path holds a HunyuanVideo that starts from an image, and model.type hunyuan_video is for text to video.",
                fix="Use hunyuanvideo-community/HunyuanVideo.",
            )
        if "text_encoders" not in self._parts:
            return
        template = self._template
        tokens = len(self._pipeline.tokenizer(template["template"].partition("{}")[0]).input_ids)
        if abs(tokens - template["crop_start"]) > _FRAME_TOLERANCE:
            raise ConfigError(
                f"model.prompt_template: its instructions are {tokens} tokens, and {template['crop_start']} are cut off.",
                why="The network would read instructions in the place of the prompt, or a prompt without its beginning.",
                fix=f"Use a template of your own with model.prompt_template.crop_start={tokens}, or mend the folder's tokenizer.",
            )

    def _readers(self) -> Sequence[Reader]:
        pipeline, template = self._pipeline, self._template
        limit = self._settings.max_sequence_length + template["crop_start"]
        return [Reader(pipeline.tokenizer, limit, template["template"]), Reader(pipeline.tokenizer_2, 77)]


def _text(conditioning: Conditioning, prefix: str) -> dict[str, Tensor]:
    """Encoded prompts by the network's names."""
    tensors = conditioning.tensors
    return {
        "encoder_hidden_states": tensors[f"{prefix}prompt_embeds"],
        "encoder_attention_mask": tensors[f"{prefix}prompt_attention_mask"],
        "pooled_projections": tensors[f"{prefix}pooled_prompt_embeds"],
    }
