"""Stable Diffusion 3 and 3.5, on top of diffusers' StableDiffusion3Pipeline.

Conventions (measured against diffusers 0.42): timesteps 0..1000; true CFG as one batch [negative, positive]; text is the two
CLIP encoders' tokens padded to the width of T5, then T5's tokens, or zeros where the folder has no T5. What is known about
text (tokenizers, limits, whether there is a T5) is known only where the text encoders are loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from digenrl.config.checks import check_recipe
from digenrl.config.schema import Recipe
from digenrl.config.settings.models import SD3Settings
from digenrl.diffusion.noise_schedule import NoiseSchedule
from digenrl.errors import ConfigError
from digenrl.models.base import ALL_PARTS, Conditioning, Guidance, Part, part_not_loaded
from digenrl.models.loading import load_pipeline, own_memory, quiet_libraries

_COMPONENTS: dict[Part, tuple[str, ...]] = {
    "text_encoders": ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "text_encoder_3", "tokenizer_3"),
    "transformer": ("transformer",),
    "vae": ("vae",),
}


class SD3Adapter:
    """One loaded Stable Diffusion 3, or parts of one."""

    default_lora_targets: tuple[str, ...] = tuple(
        f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
    )

    sharded_blocks: tuple[str, ...] = ("JointTransformerBlock",)

    def __init__(
        self, pipeline: Any, settings: SD3Settings, *, device: torch.device, dtype: torch.dtype, cfg: bool, parts: frozenset[Part]
    ) -> None:
        self.device = device
        self.truncated_prompts: set[str] = set()
        """Prompts so far that no text encoder saw to their end; each once, however often it is encoded or pads a batch."""
        self._transformer: nn.Module | None = pipeline.transformer if "transformer" in parts else None
        self._pipeline = pipeline
        self._settings = settings
        self._dtype = dtype
        self._cfg = cfg
        self._parts = parts

    @property
    def transformer(self) -> nn.Module:
        """See ModelAdapter.transformer."""
        if self._transformer is None:
            raise part_not_loaded("transformer", self._parts, needed_for="denoising and training")
        return self._transformer

    @transformer.setter
    def transformer(self, network: nn.Module) -> None:
        self._transformer = network

    @classmethod
    def load(cls, recipe: Recipe, device: torch.device, parts: frozenset[Part] = ALL_PARTS) -> SD3Adapter:
        """See ModelAdapter.load."""
        quiet_libraries()
        from diffusers import StableDiffusion3Pipeline

        settings = recipe.model.settings
        assert isinstance(settings, SD3Settings), "the registry pairs this adapter with SD3Settings"
        folder = check_recipe(recipe)
        absent = folder.absent if folder is not None else ()
        without = [name for part in ALL_PARTS - parts for name in _COMPONENTS[part]]
        pipeline = load_pipeline(StableDiffusion3Pipeline, recipe.model.path, absent=absent, without=without)
        if "text_encoders" in parts:
            _check_text_components(pipeline, settings)
        _check_size(pipeline, recipe)
        dtype = torch.bfloat16 if recipe.model.dtype == "bfloat16" else torch.float32
        if "transformer" in parts:
            # Weights that are trained stay float32 and are cast in the forward pass; frozen ones are stored in the compute type.
            pipeline.transformer.to(dtype if recipe.model.lora is not None else torch.float32)
            if recipe.model.gradient_checkpointing:
                pipeline.transformer.enable_gradient_checkpointing()
        if "vae" in parts:
            pipeline.vae.to(device, torch.float32)
        for encoder in (pipeline.text_encoder, pipeline.text_encoder_2, pipeline.text_encoder_3):
            if encoder is not None:
                encoder.to(device, dtype)
        for component in pipeline.components.values():
            if isinstance(component, nn.Module):
                own_memory(component.requires_grad_(False).eval())
        scales = [recipe.rollout.true_cfg_scale, recipe.eval.true_cfg_scale if recipe.eval else 1.0]
        return cls(pipeline, settings, device=device, dtype=dtype, cfg=max(scales) > 1, parts=parts)

    @torch.no_grad()
    def encode_prompts(self, prompts: Sequence[str], negative_prompts: Sequence[str]) -> Conditioning:
        """prompt_embeds [P, L, D] and pooled_prompt_embeds [P, D'], and their negative twins where CFG is used."""
        if "text_encoders" not in self._parts:
            raise part_not_loaded("text_encoders", self._parts, needed_for="encoding prompts")
        self.truncated_prompts |= self._truncated(prompts)
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

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        """(channels, height / f, width / f), f the VAE's scale factor."""
        factor = self._pipeline.vae_scale_factor
        return (self._pipeline.transformer.config.in_channels, height // factor, width // factor)

    def noise_schedule(self, num_inference_steps: int, height: int, width: int) -> NoiseSchedule:
        """The folder's FlowMatchEuler schedule, with ``model.flow_shift`` where the recipe gives one."""
        from diffusers import FlowMatchEulerDiscreteScheduler

        shift = self._settings.flow_shift
        # A fixed shift replaces one that grows with the image, under which diffusers would ignore it.
        changes = {} if shift is None else {"shift": shift, "use_dynamic_shifting": False}
        scheduler = FlowMatchEulerDiscreteScheduler.from_config(self._pipeline.scheduler.config, **changes)
        arguments = {}
        if scheduler.config.use_dynamic_shifting:
            from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import calculate_shift

            _, latent_height, latent_width = self.latent_shape(height, width)
            patch, config = self._pipeline.transformer.config.patch_size, scheduler.config
            arguments["mu"] = calculate_shift(
                (latent_height // patch) * (latent_width // patch),
                config.base_image_seq_len,
                config.max_image_seq_len,
                config.base_shift,
                config.max_shift,
            )
        scheduler.set_timesteps(num_inference_steps, device="cpu", **arguments)
        return NoiseSchedule(sigmas=scheduler.sigmas.float(), timesteps=scheduler.timesteps.float())

    def predict(self, latents: Tensor, timesteps: Tensor, conditioning: Conditioning, guidance: Guidance) -> Tensor:
        """See ModelAdapter.predict."""
        transformer = self.transformer
        text = conditioning.tensors
        embeds, pooled = text["prompt_embeds"], text["pooled_prompt_embeds"]
        guided = guidance.true_cfg_scale > 1
        if guided:
            latents, timesteps = torch.cat([latents] * 2), torch.cat([timesteps] * 2)
            embeds = torch.cat([text["negative_prompt_embeds"], embeds])
            pooled = torch.cat([text["negative_pooled_prompt_embeds"], pooled])
        with torch.autocast(self.device.type, self._dtype, enabled=self._dtype != torch.float32):
            velocity: Tensor = transformer(
                hidden_states=latents.to(self._dtype),
                timestep=timesteps,
                encoder_hidden_states=embeds,
                pooled_projections=pooled,
                return_dict=False,
            )[0]
        velocity = velocity.float()
        if guided:
            negative, positive = velocity.chunk(2)
            velocity = negative + guidance.true_cfg_scale * (positive - negative)
        return velocity

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """See ModelAdapter.decode."""
        if "vae" not in self._parts:
            raise part_not_loaded("vae", self._parts, needed_for="decoding latents")
        vae = self._pipeline.vae
        decoded: Tensor = vae.decode(latents / vae.config.scaling_factor + vae.config.shift_factor, return_dict=False)[0]
        return (decoded * 0.5 + 0.5).clamp(0, 1)

    def _truncated(self, prompts: Sequence[str]) -> set[str]:
        """The prompts that are longer than every text encoder reads."""
        pipeline = self._pipeline
        readers = [(tokenizer, pipeline.tokenizer_max_length) for tokenizer in (pipeline.tokenizer, pipeline.tokenizer_2)]
        if pipeline.text_encoder_3 is not None:
            readers.append((pipeline.tokenizer_3, self._settings.max_sequence_length))
        cut = set(prompts)
        for tokenizer, limit in readers:
            texts = sorted(cut)
            ids = tokenizer(texts, truncation=False, verbose=False).input_ids if texts else []
            cut = {text for text, tokens in zip(texts, ids, strict=True) if len(tokens) > limit}
        return cut


def _check_size(pipeline: Any, recipe: Recipe) -> None:
    config = pipeline.transformer.config
    limit = config.pos_embed_max_size * config.patch_size * pipeline.vae_scale_factor
    for side, pixels in (("height", recipe.rollout.height), ("width", recipe.rollout.width)):
        if pixels > limit:
            raise ConfigError(
                f"rollout.{side} ({pixels}) is more than the {limit} pixels that this model can draw.",
                why=f"It knows {config.pos_embed_max_size} positions per side.",
                fix=f"Use rollout.{side}={limit} or less.",
            )


def _check_text_components(pipeline: Any, settings: SD3Settings) -> None:
    """The third text encoder may be left out; the CLIP two may not, for diffusers has no way to do without them."""
    wanted = ["text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"]
    if pipeline.text_encoder_3 is not None:
        wanted.append("tokenizer_3")
    for name in wanted:
        if pipeline.components[name] is None:
            raise ConfigError(
                f"model.path: the model has no {name}.",
                why="Stable Diffusion 3 reads its prompts with two CLIP encoders; only the third encoder (T5) may be left out.",
                fix=f"Copy the folder {name}/ of the original model there, and name it in model_index.json.",
            )
    if pipeline.text_encoder_3 is not None and settings.max_sequence_length == 0:
        raise ConfigError(
            "model.max_sequence_length: 0 leaves no tokens for the third text encoder, which this model has.",
            fix="Use model.max_sequence_length=256.",
        )
