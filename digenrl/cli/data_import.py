"""``digenrl data import``."""

from __future__ import annotations

import json

from digenrl.config.text import expand_home
from digenrl.data.importers import import_prompts
from digenrl.data.prompts import load_prompts
from digenrl.errors import ConfigError


def run(kind: str, file: str, out: str) -> None:
    """Write a jsonl prompt file from one of another trainer, and check that it is one."""
    target = expand_home(out, where="OUT")
    if target.suffix != ".jsonl":
        raise ConfigError(
            f"OUT ({out!r}) has to end with .jsonl.", why="A prompt file with fields is named so.", fix=f"Use {out}.jsonl."
        )
    rows = import_prompts(kind, expand_home(file, where="FILE"))
    try:
        text = "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{file!r} holds what JSON cannot say: {error}.", fix="Take that column out of the file.") from error
    try:
        with target.open("x", encoding="utf-8", newline="\n") as opened:
            opened.write(text)
    except OSError as error:
        raise ConfigError(
            f"Cannot write {str(target)!r}: {error.strerror}.", fix="Name a new file in a folder that is there."
        ) from error
    try:
        count = len(load_prompts(target).prompts)
    except ConfigError:
        target.unlink()  # a prompt that no prompt file may hold; the message has said which
        raise
    print(f"{count} prompts in {target}")
