"""Prompt files of other trainers, as lines of a jsonl prompt file.

What each format is taken to be: flow_grpo and flow_factory, a txt file with a prompt a line or a jsonl file with `prompt`;
dance_grpo, such a txt file, or the JSON list that its preprocessing writes, with `caption`; verl, a parquet file with a chat in
`prompt` (and in `negative_prompt`) and with `reward_model.ground_truth`. All further fields are kept for the rewards, but the
names of files with precomputed embeddings (.pt). Invariant: no prompt is dropped or changed in silence; what cannot be taken
over is an error with its line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from digenrl.config.text import read_text
from digenrl.data.prompts import load_prompts
from digenrl.errors import ConfigError

Row = dict[str, Any]


def import_prompts(kind: str, path: Path) -> list[Row]:
    """The prompts of a file of this format. Raises ConfigError naming file and row."""
    reader = FORMATS.get(kind)
    if reader is None:
        raise ConfigError(f"There is no format {kind!r} to import.", fix=f"Known are {', '.join(FORMATS)}.")
    if not path.is_file():
        raise ConfigError(f"There is no file {str(path)!r}.", fix="Name an existing file.")
    rows = list(reader(path))
    if not rows:
        raise ConfigError(f"{str(path)!r} holds no prompts.", fix="Name the file with the prompts.")
    return rows


def _lines(path: Path) -> Iterator[Row]:
    for prompt in load_prompts(path).prompts:
        yield {"prompt": prompt.text, **({"negative_prompt": prompt.negative} if prompt.negative else {}), **prompt.metadata}


def _dance_grpo(path: Path) -> Iterator[Row]:
    if path.suffix.lower() != ".json":
        yield from _lines(path)
        return
    try:
        plain = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{str(path)!r} is not JSON: {error}.", fix="Name the list that the preprocessing wrote.") from error
    if not isinstance(plain, list):
        raise ConfigError(f"{str(path)!r} is not a list.", fix="Name the list that the preprocessing wrote.")
    for number, item in enumerate(plain):
        caption = item.get("caption") if isinstance(item, dict) else None
        if not isinstance(caption, str):
            raise _no_prompt(path, number, "caption")
        if item.get("prompt", caption) != caption:
            raise ConfigError(
                f"{path}: row {number} (from 0) has another `prompt` beside its `caption`.",
                why="The caption is what this format is trained on, and a prompt file has one prompt a line.",
                fix="Take one of them out, or choose the format that the file has.",
            )
        # Embeddings of one text encoder, in fields with and without a _path: prompts are encoded anew here.
        rest = {key: value for key, value in item.items() if not (isinstance(value, str) and value.endswith(".pt"))}
        yield {"prompt": rest.pop("caption"), **rest}


def _verl(path: Path) -> Iterator[Row]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError("Reading parquet needs the package pyarrow.", fix='pip install "digenrl[parquet]".') from error
    try:
        table = parquet.read_table(path).to_pylist()
    except Exception as error:  # pyarrow raises classes of its own for files that are damaged or something else
        raise ConfigError(f"{str(path)!r} is not a parquet file: {error}", fix="Name a .parquet file of verl.") from error
    for number, row in enumerate(table):
        prompt = _last_user_text(row.pop("prompt", None))
        if prompt is None:
            raise _no_prompt(path, number, "prompt")
        model = row.pop("reward_model", None) or {}
        truth = {"ground_truth": model["ground_truth"]} if model.get("ground_truth") is not None else {}
        negative = _last_user_text(row.pop("negative_prompt", None))
        yield {"prompt": prompt, **({"negative_prompt": negative} if negative else {}), **_without_nulls(row), **truth}


def _last_user_text(chat: object) -> str | None:
    """The text that a chat ends with: a plain text, or the content of the last message of the user."""
    if isinstance(chat, str):
        return chat
    if not isinstance(chat, list):
        return None
    said = [message.get("content") for message in chat if isinstance(message, Mapping) and message.get("role") == "user"]
    return said[-1] if said and isinstance(said[-1], str) else None


def _without_nulls(row: Row) -> Row:
    """Columns that a row does not have are null in a table."""
    return {key: value for key, value in row.items() if not (value is None or (isinstance(value, float) and math.isnan(value)))}


def _no_prompt(path: Path, number: int, field: str) -> ConfigError:
    return ConfigError(
        f"{path}: row {number} (from 0) has no text in `{field}`.",
        why="Every row of this format is a prompt.",
        fix="Take the row out, or choose the format that the file has.",
    )


FORMATS: dict[str, Callable[[Path], Iterator[Row]]] = {
    "flow_grpo": _lines,
    "flow_factory": _lines,
    "dance_grpo": _dance_grpo,
    "verl": _verl,
}
