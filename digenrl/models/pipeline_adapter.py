"""What all families on top of a diffusers pipeline share: loading parts of it, where they live, precision, prompts cut short.

Invariants: trained weights stay float32, frozen ones are stored in the compute type; the network runs under autocast and its
answer is float32; images are decoded in float32. With ``model.offload`` text encoders and the VAE are on the device only while
they are used, and compute the same there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from digenrl.config.checks import check_recipe
from digenrl.config.registry import Medium
from digenrl.config.schema import Recipe
from digenrl.diffusion.noise_schedule import NoiseSchedule
from digenrl.errors import ConfigError
from digenrl.models.base import ALL_PARTS, Part, part_not_loaded
from digenrl.models.loading import load_pipeline, own_memory, quiet_libraries


@dataclass(frozen=True, slots=True)
class Reader:
    """A text encoder's tokenizer and how much of a prompt it lets through."""

    tokenizer: Any
    limit: int
    """Most tokens, those that come with the text included."""
    template: str = "{}"
    """What stands before the prompt when it is read, and the place of the prompt."""


class PipelineAdapter:
    """One loaded diffusers pipeline, or parts of one. A family says what it calls its components and how it calls its network."""

    pipeline_class: ClassVar[str]
    """diffusers' class of the whole pipeline."""
    text_components: ClassVar[tuple[str, ...]]
    """The pipeline's text encoders and tokenizers."""
    media: ClassVar[tuple[Medium, ...]] = ("image",)
    """What the family can make."""
    default_lora_targets: tuple[str, ...]
    sharded_blocks: tuple[str, ...]

    def __init__(
        self,
        pipeline: Any,
        settings: Any,
        *,
        device: torch.device,
        dtype: torch.dtype,
        cfg: bool,
        parts: frozenset[Part],
        offload: bool = False,
    ) -> None:
        """settings: the family's own. cfg: whether anything will ask for classifier-free guidance."""
        self.device = device
        self.truncated_prompts: set[str] = set()
        """Prompts so far that no text encoder saw to their end; each once, however often it is encoded or pads a batch."""
        self._transformer: nn.Module | None = pipeline.transformer if "transformer" in parts else None
        self._pipeline = pipeline
        self._settings = settings
        self._dtype = dtype
        self._cfg = cfg
        self._parts = parts
        self._offload = offload

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
    def load(cls, recipe: Recipe, device: torch.device, parts: frozenset[Part] = ALL_PARTS) -> Self:
        """See ModelAdapter.load."""
        quiet_libraries()
        import diffusers

        model = recipe.model
        folder = check_recipe(recipe)
        absent = folder.absent if folder is not None else ()
        components: dict[Part, tuple[str, ...]] = {
            "text_encoders": cls.text_components,
            "transformer": ("transformer",),
            "vae": ("vae",),
        }
        without = [name for part in ALL_PARTS - parts for name in components[part]]
        pipeline = load_pipeline(getattr(diffusers, cls.pipeline_class), model.path, absent=absent, without=without)
        dtype = torch.bfloat16 if model.dtype == "bfloat16" else torch.float32
        scales = [recipe.rollout.true_cfg_scale, recipe.eval.true_cfg_scale if recipe.eval else 1.0]
        adapter = cls(
            pipeline, model.settings, device=device, dtype=dtype, cfg=max(scales) > 1, parts=parts, offload=model.offload
        )
        adapter._check(recipe)
        adapter._place(recipe)
        return adapter

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """See ModelAdapter.decode."""
        if "vae" not in self._parts:
            raise part_not_loaded("vae", self._parts, needed_for="decoding latents")
        with self._on_device(self._pipeline.vae):
            return (self._decode(latents) * 0.5 + 0.5).clamp(0, 1)

    def _check(self, recipe: Recipe) -> None:
        """Raise ConfigError where what was loaded does not fit the recipe or itself."""

    def _decode(self, latents: Tensor) -> Tensor:
        """What the VAE makes of final latents, in [-1, 1]."""
        vae = self._pipeline.vae
        decoded: Tensor = vae.decode(latents / vae.config.scaling_factor + vae.config.shift_factor, return_dict=False)[0]
        return decoded

    def _readers(self) -> Sequence[Reader]:
        """Who reads a prompt."""
        raise NotImplementedError

    def _place(self, recipe: Recipe) -> None:
        """Freeze everything, and put it where it is used in the type it is stored in."""
        pipeline, model = self._pipeline, recipe.model
        waiting = torch.device("cpu") if self._offload else self.device
        if "transformer" in self._parts:
            # Weights that are trained stay float32 and are cast in the forward pass; frozen ones are stored in the compute type.
            pipeline.transformer.to(self._dtype if model.lora is not None else torch.float32)
            if model.gradient_checkpointing:
                pipeline.transformer.enable_gradient_checkpointing()
        if "vae" in self._parts:
            pipeline.vae.to(waiting, torch.float32)
            if model.vae_tiling:
                pipeline.vae.enable_tiling()
            if model.vae_slicing:
                pipeline.vae.enable_slicing()
        for encoder in self._text_encoders():
            encoder.to(waiting, self._dtype)
        for component in pipeline.components.values():
            if isinstance(component, nn.Module):
                own_memory(component.requires_grad_(False).eval())

    def _text_encoders(self) -> list[nn.Module]:
        components = self._pipeline.components
        return [components[name] for name in self.text_components if isinstance(components.get(name), nn.Module)]

    @contextmanager
    def _encoding(self, prompts: Sequence[str]) -> Iterator[None]:
        """Note the prompts that are cut short, and have the text encoders on the device."""
        if "text_encoders" not in self._parts:
            raise part_not_loaded("text_encoders", self._parts, needed_for="encoding prompts")
        self.truncated_prompts |= self._truncated(prompts)
        with self._on_device(*self._text_encoders()):
            yield

    @contextmanager
    def _on_device(self, *modules: nn.Module) -> Iterator[None]:
        """Inside, these are where they compute; with ``model.offload`` not for longer."""
        if not self._offload:
            yield
            return
        for module in modules:
            module.to(self.device)
        try:
            yield
        finally:
            for module in modules:
                module.to("cpu")

    def _run(self, latents: Tensor, **inputs: Any) -> Tensor:
        """The network's answer in float32. inputs: its further arguments, by diffusers' names."""
        # Without autocast's cache, which would keep a rounded copy of all trained weights for as long as the pass takes.
        with torch.autocast(self.device.type, self._dtype, enabled=self._dtype != torch.float32, cache_enabled=False):
            answer: Tensor = self.transformer(hidden_states=latents.to(self._dtype), return_dict=False, **inputs)[0]
        return answer.float()

    def _flow_match_schedule(
        self, num_inference_steps: int, *, image_tokens: int, sigmas: Sequence[float] | None = None
    ) -> NoiseSchedule:
        """The folder's FlowMatchEuler schedule, with ``model.flow_shift`` where the recipe gives one.

        image_tokens: the length on which a shift that grows with the image depends. sigmas: before they are shifted, where the
        family's pipeline brings its own.
        """
        from diffusers import FlowMatchEulerDiscreteScheduler
        from diffusers.pipelines.flux.pipeline_flux import calculate_shift

        shift = self._settings.flow_shift
        # A fixed shift replaces one that grows with the image, under which diffusers would ignore it.
        changes = {} if shift is None else {"shift": shift, "use_dynamic_shifting": False}
        scheduler = FlowMatchEulerDiscreteScheduler.from_config(self._pipeline.scheduler.config, **changes)
        config = scheduler.config
        if config.shift_terminal and num_inference_steps == 1:
            raise ConfigError(
                "A schedule of 1 denoising step is not defined for this model.",
                why=f"Its noise scheduler stretches the sigmas to end at {config.shift_terminal:g}, which needs two of them.",
                fix="Use at least 2: rollout.num_inference_steps and eval.num_inference_steps.",
            )
        arguments: dict[str, Any] = {}
        if config.use_dynamic_shifting:
            lengths = config.base_image_seq_len, config.max_image_seq_len
            arguments["mu"] = calculate_shift(image_tokens, *lengths, config.base_shift, config.max_shift)
        if sigmas is not None:
            arguments["sigmas"] = sigmas
        scheduler.set_timesteps(num_inference_steps, device="cpu", **arguments)
        return NoiseSchedule(sigmas=scheduler.sigmas.float(), timesteps=scheduler.timesteps.float())

    def _truncated(self, prompts: Sequence[str]) -> set[str]:
        """The prompts that are longer than every text encoder reads."""
        cut = set(prompts)
        for reader in self._readers():
            texts = sorted(cut)
            framed = [reader.template.format(text) for text in texts]
            ids = reader.tokenizer(framed, truncation=False, verbose=False).input_ids if framed else []
            cut = {text for text, tokens in zip(texts, ids, strict=True) if len(tokens) > reader.limit}
        return cut
