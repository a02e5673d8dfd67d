"""What a model family has to provide: encode prompts, shape latents, predict a velocity, decode.

Invariants: ``predict`` takes a batch of mixed timesteps and returns float32; a row's result depends on its own inputs
and on the batch's shape, never on its neighbours; rollout and training call the same ``predict``; a process that needs only
some parts of a model reads the weights of no other, and what it computes does not depend on which parts it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from digenrl.config.schema import Recipe
from digenrl.diffusion.noise_schedule import NoiseSchedule
from digenrl.errors import ProtocolError

Part = Literal["text_encoders", "transformer", "vae"]
"""What a process can hold of a model; the tokenizers go with the text encoders."""
ALL_PARTS: frozenset[Part] = frozenset(("text_encoders", "transformer", "vae"))


@dataclass(frozen=True, slots=True)
class Conditioning:
    """Encoded prompts: named tensors whose first dimension is the prompt."""

    tensors: dict[str, Tensor]
    """The family's own names, for example prompt_embeds [P, L, D]."""

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def select(self, rows: Tensor) -> Conditioning:
        """The prompts of these rows, which may repeat. rows: [B] int64. Returns tensors [B, ...]."""
        return Conditioning({name: tensor[rows.to(tensor.device)] for name, tensor in self.tensors.items()})


def concatenate(parts: Sequence[Conditioning]) -> Conditioning:
    """One conditioning for the prompts of all parts, in order."""
    return Conditioning({name: torch.cat([part.tensors[name] for part in parts]) for name in parts[0].tensors})


@dataclass(frozen=True, slots=True)
class Guidance:
    """Guidance of one activity; rollout and training share theirs, evaluation has its own."""

    true_cfg_scale: float = 1.0
    """Classifier-free guidance with a second pass; 1 is none."""
    embedded: float | None = None
    """Guidance value given to the network, for distilled models."""


def part_not_loaded(part: Part, parts: frozenset[Part], *, needed_for: str) -> ProtocolError:
    """The error of a call that needs ``part``, for an adapter that was loaded with ``parts``."""
    return ProtocolError(
        f"Part {part!r} of the model is needed for {needed_for}, and this adapter was loaded without it.",
        why=f"It was loaded with {', '.join(sorted(parts)) or 'no part at all'}; a process holds only what its own work needs.",
        fix=f"Send this work to a process that holds {part!r}, or name that part in ModelAdapter.load.",
    )


class ModelAdapter(Protocol):
    """One model family, or the parts of one that a process needs, for one device.

    A class that makes videos says so: ``media = ("image", "video")``.
    """

    transformer: nn.Module
    """The network that is trained; others may be put in its place. Raises ProtocolError where it was not loaded."""
    device: torch.device
    truncated_prompts: set[str]
    """Prompts that this adapter encoded so far and no text encoder saw to their end."""
    default_lora_targets: tuple[str, ...]
    """Ends of the module names that get an adapter when the recipe names none."""
    sharded_blocks: tuple[str, ...]
    """Class names of the transformer's repeated layers, which FSDP gathers one at a time."""

    @classmethod
    def load(cls, recipe: Recipe, device: torch.device, parts: frozenset[Part] = ALL_PARTS) -> ModelAdapter:
        """Load these parts, frozen and in eval mode; weights of the others are never read into memory.

        An adapter of your own must honour ``parts``: on a cluster, trainers and generators hold the transformer alone, and
        text encoders and the VAE live only where prompts are encoded and latents decoded. ``latent_shape``,
        ``noise_schedule`` and every number that other methods give must be the same with any parts, so read the configs of
        absent components too. A method whose part is absent raises ``part_not_loaded``.
        The transformer may stay on the CPU: Policy puts it on the device, or a share of it where ranks hold it together.
        Raises ConfigError when the folder or the recipe does not fit.
        """
        ...

    def encode_prompts(self, prompts: Sequence[str], negative_prompts: Sequence[str]) -> Conditioning:
        """Encode a batch of prompts with the text encoders; the caller keeps the batch's size canonical."""
        ...

    def latent_shape(self, height: int, width: int, num_frames: int = 1) -> tuple[int, ...]:
        """Shape of one sample's latents, without the batch; needs no part. height, width: pixels.

        A model of images is never asked for more than one frame.
        """
        ...

    def noise_schedule(self, num_inference_steps: int, height: int, width: int) -> NoiseSchedule:
        """The family's own sigma table; needs no part."""
        ...

    def predict(self, latents: Tensor, timesteps: Tensor, conditioning: Conditioning, guidance: Guidance) -> Tensor:
        """Velocity at x. latents: [B, *latent] float32; timesteps: [B]; conditioning: B rows. Returns [B, *latent] float32."""
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """Images or videos of final latents [B, *latent], by the VAE.

        Returns [B, 3, height, width] float32 in [0, 1]; [B, num_frames, 3, height, width] where there is more than one frame.
        """
        ...
