"""Settings of the built-in model families, beyond those that every family shares (config/schema.py)."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, field_validator


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


class WanSettings(BaseModel):
    """Wan2.1 text to video, 1.3B and 14B."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    max_sequence_length: int = Field(default=512, ge=1, le=512, description="Text tokens; longer prompts are cut off.")
    flow_shift: float | None = Field(
        default=None,
        gt=0,
        description="Shift of the sigma schedule; the model folder's own when not given. Published: 3 at 480p, 5 at 720p.",
    )


class PromptTemplate(BaseModel):
    """Instructions that a language model reads around a prompt."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    template: str = Field(description="Text around the prompt, whose place is {}.")
    crop_start: int = Field(ge=0, le=4096, description="Tokens before the prompt, which the network does not see.")

    @field_validator("template")
    @classmethod
    def _has_one_place(cls, template: str) -> str:
        try:
            one, two = template.format("1"), template.format("12")
        except (IndexError, KeyError, ValueError) as error:
            raise ValueError(f"it has braces other than one {{}} ({error}); write {{{{ and }}}} for braces") from error
        if len(two) - len(one) != 1:
            raise ValueError("it needs exactly one {}, the place of the prompt")
        return template


class HunyuanVideoSettings(BaseModel):
    """HunyuanVideo text to video."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    max_sequence_length: int = Field(
        default=256, ge=1, le=2048, description="Text tokens after the instructions; longer prompts are cut off."
    )
    flow_shift: float | None = Field(
        default=None, gt=0, description="Shift of the sigma schedule; the model folder's own (7) when not given."
    )
    prompt_template: PromptTemplate | None = Field(
        default=None, description="Instructions around the prompt: template and crop_start; the published ones when not given."
    )
