"""Settings of the built-in model families, beyond those that every family shares (config/schema.py)."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class SD3Settings(BaseModel):
    """Stable Diffusion 3 and 3.5."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    max_sequence_length: int = Field(
        default=256,
        ge=0,
        le=512,
        description="Text tokens of the third encoder (T5). Without that encoder, as many zero tokens, as diffusers has it; "
        "0 leaves them out.",
    )
    flow_shift: float | None = Field(
        default=None, gt=0, description="Shift of the sigma schedule; the model folder's own when not given."
    )


_FLOW_SHIFT = (
    "Fixed shift of the sigma schedule, in the place of the model folder's own, which may grow with the image; the folder's own "
    "when not given."
)


class FluxSettings(BaseModel):
    """FLUX.1-dev and FLUX.1-schnell."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    max_sequence_length: int = Field(
        default=512, ge=1, le=512, description="Text tokens of the T5 encoder; schnell was trained with 256."
    )
    flow_shift: float | None = Field(default=None, gt=0, description=_FLOW_SHIFT)


class QwenImageSettings(BaseModel):
    """Qwen-Image."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    max_sequence_length: int = Field(
        default=512,
        ge=1,
        le=1024,
        description="Most text tokens of a prompt, its template's last five included. A pass computes no more than it has.",
    )
    flow_shift: float | None = Field(default=None, gt=0, description=_FLOW_SHIFT)
