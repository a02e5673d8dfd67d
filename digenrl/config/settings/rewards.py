"""Settings of the built-in rewards; the weight of a reward against the others stands beside these in the recipe."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator


class ShapesSettings(BaseModel):
    """How ``shapes`` mixes its two verdicts: value = (strict_weight * strict + soft_weight * soft) / their sum."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    strict_weight: float = Field(default=0.5, ge=0, description="Weight of the 0-or-1 verdict: is all of the caption right?")
    soft_weight: float = Field(
        default=0.5,
        ge=0,
        description="Weight of the share in [0, 1] of the caption that is right.",
    )

    @model_validator(mode="after")
    def _one_weight_is_positive(self) -> ShapesSettings:
        if self.strict_weight + self.soft_weight == 0:
            raise ValueError("strict_weight and soft_weight are both 0: the reward would be 0/0. Make one positive.")
        return self


class JpegSettings(BaseModel):
    """How ``jpeg`` compresses an image before it counts the kilobytes."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    quality: int = Field(
        default=75,
        ge=1,
        le=100,
        description="JPEG quality on libjpeg's scale without a unit: 1 is the smallest file, 100 the best picture.",
    )


class BrightnessSettings(BaseModel):
    """``brightness`` has no settings."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class SharpnessSettings(BaseModel):
    """``sharpness`` has no settings."""

    model_config = ConfigDict(frozen=True, extra="forbid")
