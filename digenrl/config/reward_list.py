"""Rewards as a recipe lists them: those that are trained on, and those of held-out evaluation."""

from __future__ import annotations

from pydantic import Field, field_validator

from digenrl.config.section import MOST, ComponentSpec, Section


class NormalizeSection(Section):
    """Numbers that bring a reward to the size of the others, the same for all samples of a run."""

    mean: float = Field(default=0.0, description="Taken off the score.")
    std: float = Field(default=1.0, gt=0, description="The rest is divided by this.")


class RewardSpec(ComponentSpec):
    """One reward of the weighted sum."""

    weight: float = Field(default=1.0, description="Weight in the sum that is trained on.")
    name: str = Field(
        default="",
        pattern=r"^[^/\x00-\x1f]*$",
        description="Name in logs; the type when not given. Without `/`, which sets off a reward's parts.",
    )
    batch_size: int | None = Field(
        default=None,
        ge=1,
        le=MOST,
        description="Samples that the reward is asked for at once; all there are, if not given. A reward that compares the "
        "samples of a prompt gets whole groups all the same.",
    )
    clip: tuple[float, float] | None = Field(
        default=None, description="Bounds [low, high] that the score is cut to before it enters the sum; logs show it uncut."
    )
    normalize: NormalizeSection = Field(
        default_factory=NormalizeSection, description="(score - mean) / std enters the sum, after `clip`."
    )
    required: bool = Field(
        default=True,
        description="false, with a weight of 0: a reward to be watched alone; its failures stop no run and make no sample "
        "invalid.",
    )
    offload: bool = Field(
        default=False,
        description="Keep the reward's network on the CPU, and on its device only while it scores; for rewards that have one.",
    )

    @field_validator("clip")
    @classmethod
    def _low_before_high(cls, clip: tuple[float, float] | None) -> tuple[float, float] | None:
        if clip is not None and not clip[0] < clip[1]:
            raise ValueError(f"the lower bound {clip[0]:g} is not below the upper one {clip[1]:g}")
        return clip

    @property
    def default_name(self) -> str:
        """The type, of a class of the user's own without its module."""
        return self.type.rpartition(":")[2]


def named(rewards: tuple[RewardSpec, ...]) -> tuple[RewardSpec, ...]:
    """The rewards, each with a name of its own. Raises ValueError where there are none, or two of one name."""
    if not rewards:
        raise ValueError("a run needs at least one reward")
    result = tuple(r if r.name else r.model_copy(update={"name": r.default_name}) for r in rewards)
    if len({r.name for r in result}) != len(result):
        raise ValueError("two rewards have the same name; give them different `name`s, which the logs use")
    return result
