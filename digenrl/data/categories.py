"""Kinds of prompts, by which means are also told one by one."""

from __future__ import annotations

from collections.abc import Sequence

from digenrl.data.prompts import Prompt

CATEGORY_FIELDS = ("category", "tag")
"""Metadata fields that name a prompt's kind: ours and GenEval's."""


def categories_of(prompts: Sequence[Prompt]) -> tuple[str | None, list[str | None]]:
    """The metadata field that names the prompts' kinds, if any, and each prompt's kind."""
    for field in CATEGORY_FIELDS:
        if any(field in prompt.metadata for prompt in prompts):
            return field, [str(prompt.metadata[field]) if field in prompt.metadata else None for prompt in prompts]
    return None, [None] * len(prompts)
