"""Settings of the reward ``ocr``, and where the text that an image is to show stands in its prompt."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

_QUOTED = re.compile(r'"([^"]*)"')


class OcrSettings(BaseModel):
    """How the text that is read is compared with the one that was asked for."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    case: Literal["ignore", "keep"] = Field(default="ignore", description="Whether capital and small letters are the same.")
    spaces: Literal["ignore", "keep"] = Field(
        default="ignore",
        description="Whether spaces count. The reader often drops them; `keep` counts runs of them as one.",
    )
    match: Literal["whole", "within"] = Field(
        default="whole",
        description="whole: text beside the target counts against it; within: the best place in all that is read counts.",
    )
    detection_side: int = Field(
        default=736,
        ge=32,
        le=2000,
        description="Pixels of the shorter side to which a smaller image is enlarged before text is looked for, which takes most "
        "of the time. RapidOCR's own is 736; less is faster and misses small letters.",
    )

    def check_prompt(self, text: str, metadata: Mapping[str, Any]) -> str | None:
        """What is wrong with a prompt; None if nothing is."""
        del metadata
        return None if target_of(text, self) else 'it has no text between double quotes, as in: a sign that says "OPEN"'


def target_of(prompt: str, settings: OcrSettings) -> str:
    """The text between the first pair of double quotes, as it is compared; empty where there is none."""
    found = _QUOTED.search(prompt)
    return comparable(found[1], settings) if found else ""


def comparable(text: str, settings: OcrSettings) -> str:
    """A text without what the settings ignore."""
    text = "".join(text.split()) if settings.spaces == "ignore" else " ".join(text.split())
    return text.casefold() if settings.case == "ignore" else text
