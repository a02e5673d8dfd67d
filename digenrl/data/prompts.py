r"""Prompt files: txt (one prompt a line), jsonl (``prompt`` and any other fields) and GenEval metadata (the same).

Invariants: UTF-8 whatever the locale; a line number in every complaint; blank lines are skipped and counted; only
``\n`` and ``\r\n`` end a line, so a prompt keeps its other Unicode separators; nothing but blank lines is dropped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from digenrl.config.text import read_text
from digenrl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One line of a prompt file."""

    text: str
    negative: str = ""
    """Prompt of the unconditional pass where true CFG is on (jsonl field ``negative_prompt``)."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The line's other fields, handed to rewards as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFile:
    """A prompt file in memory."""

    path: Path
    prompts: tuple[Prompt, ...]
    blank_lines: int


def load_prompts(path: Path) -> PromptFile:
    """Read a txt or jsonl prompt file. Raises ConfigError naming file and line, or the empty file."""
    kind = path.suffix.lower()
    if kind not in {".txt", ".jsonl"}:
        raise ConfigError(
            f"{str(path)!r} is not a prompt file.",
            why="Known are .txt (one prompt a line) and .jsonl (one object with a `prompt` a line).",
            fix="Rename or convert the file.",
        )
    prompts: list[Prompt] = []
    blank = 0
    lines = read_text(path).split("\n")
    for number, raw in enumerate(lines, start=1):
        line = raw.removesuffix("\r")
        if not line.strip():
            blank += number < len(lines) or bool(line)
            continue
        where = f"{path}:{number}"
        prompt = Prompt(text=line) if kind == ".txt" else _from_json(line, where)
        for text in (prompt.text, prompt.negative):
            _check_characters(text, where)
        prompts.append(prompt)
    if not prompts:
        raise ConfigError(f"{str(path)!r} holds no prompts.", fix="Write one prompt a line.")
    return PromptFile(path=path, prompts=tuple(prompts), blank_lines=blank)


def _check_characters(text: str, where: str) -> None:
    if "\x00" in text:
        raise ConfigError(
            f"{where}: the prompt holds a NUL character.",
            why="Tokenizers disagree about it, and it is nearly always a damaged file.",
            fix="Delete the character.",
        )
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ConfigError(
            f"{where}: the prompt holds half of a surrogate pair, which is no character.",
            why="JSON can spell it (\\ud83d alone), but it can be neither tokenized nor written to a file.",
            fix="Write the character itself, or both halves.",
        )


def _no_number(word: str) -> float:
    """Python reads NaN and Infinity where JSON has no such words, and no reward service could be told of them."""
    raise ValueError(f"{word} is no JSON number")


def _from_json(line: str, where: str) -> Prompt:
    try:
        item = json.loads(line, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: this line is not JSON: {error}.", fix="Write one JSON object a line.") from error
    if not isinstance(item, dict) or not isinstance(item.get("prompt"), str):
        raise ConfigError(
            f"{where}: this line has no `prompt` text.",
            why='Every line of a jsonl prompt file is an object like {"prompt": "a red circle"}.',
            fix="Add the field; other fields are kept for the rewards.",
        )
    negative = item.get("negative_prompt", "")
    if not isinstance(negative, str):
        raise ConfigError(f"{where}: `negative_prompt` is not a text.", fix="Write it as a string, or leave it out.")
    metadata = {key: value for key, value in item.items() if key not in {"prompt", "negative_prompt"}}
    return Prompt(text=item["prompt"], negative=negative, metadata=metadata)
