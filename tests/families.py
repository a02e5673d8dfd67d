"""The model families that tests go through, each with a tiny folder: add one here, and all of them are tested on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from digenrl.models.packing import pack, unpack


def as_it_is(latents: Tensor) -> Tensor:
    return latents


def unpacked_like(latents: Tensor, tokens: Tensor) -> Tensor:
    return unpack(tokens, *latents.shape[-2:])


@dataclass(frozen=True, kw_only=True)
class FamilyCase:
    """A family, or a member of one that differs from others."""

    name: str
    """Of its builder in digenrl.testing.tiny_pipelines."""
    type: str
    """model.type."""
    pipeline: str
    """diffusers' class."""
    model: Mapping[str, Any] = field(default_factory=lambda: {"max_sequence_length": 24})
    rollout: Mapping[str, Any] = field(default_factory=dict)
    never_trained: tuple[str, ...] = ()
    """Beginnings of the names of weights that no loss can reach."""
    cfg_argument: str = "true_cfg_scale"
    call: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of a call of the pipeline."""
    to_pipeline: Callable[[Tensor], Tensor] = as_it_is
    """Latents as the pipeline takes them."""
    from_pipeline: Callable[[Tensor, Tensor], Tensor] = lambda _latents, theirs: theirs
    """(latents of ours, the pipeline's) -> the pipeline's in the shape of ours."""

    def sections(self, folder: str, **more: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Sections of a recipe for this family's folder, with further keys."""
        base: dict[str, Mapping[str, Any]] = {
            "model": {"type": self.type, "path": folder, **self.model},
            "rollout": self.rollout,
        }
        return {name: {**base.get(name, {}), **more.get(name, {})} for name in base.keys() | more.keys()}


_PACKED = {"to_pipeline": pack, "from_pipeline": unpacked_like}
_LAST = "transformer_blocks.1"
# The text of the last block is used by nothing that comes after it: its queries and all that follows them go nowhere.
_LAST_TEXT = (f"{_LAST}.attn.add_q_proj", f"{_LAST}.attn.norm_added_q", f"{_LAST}.attn.to_add_out", f"{_LAST}.txt_mlp")

IMAGES = (
    FamilyCase(
        name="sd3", type="sd3", pipeline="StableDiffusion3Pipeline", never_trained=_LAST_TEXT[:2], cfg_argument="guidance_scale"
    ),
    FamilyCase(
        name="flux",
        type="flux",
        pipeline="FluxPipeline",
        rollout={"guidance_scale": 2.5},
        call={"guidance_scale": 2.5},
        **_PACKED,
    ),
    FamilyCase(name="flux_schnell", type="flux", pipeline="FluxPipeline", **_PACKED),
    FamilyCase(name="qwen_image", type="qwen_image", pipeline="QwenImagePipeline", never_trained=_LAST_TEXT, **_PACKED),
)
VIDEOS = (
    FamilyCase(name="wan", type="wan", pipeline="WanPipeline", rollout={"num_frames": 5}),
    FamilyCase(
        name="hunyuan_video",
        type="hunyuan_video",
        pipeline="HunyuanVideoPipeline",
        rollout={"num_frames": 5, "guidance_scale": 6.0},
        # A softmax does not see what is added to all keys, and nothing normalises these: rounding errors are all there is.
        never_trained=("context_embedder.token_refiner.refiner_blocks.0.attn.to_k.bias",),
    ),
)
FAMILIES = IMAGES + VIDEOS
BY_NAME = {case.name: case for case in FAMILIES}
