"""What every section of a recipe is made of."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, SerializeAsAny


class Section(BaseModel):
    """One section of a recipe. Infinity and NaN are refused wherever a number is asked for."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ComponentSpec(Section):
    """A component chosen by ``type``, with settings validated against its own class."""

    type: str
    settings: SerializeAsAny[BaseModel]


MOST = 1_000_000
"""Upper bound of the counts that sizes are made of, so that a slipped digit is an error and not a hung machine."""
