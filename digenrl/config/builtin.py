"""Paths that begin with ``builtin:`` name files shipped inside the package."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from digenrl.config.text import expand_home
from digenrl.errors import ConfigError

PREFIX = "builtin:"
_MODELS = {"shapes": "shapes/model"}


def resolve(path: str, *, where: str) -> Path:
    """The file or folder that a recipe names: shipped for ``builtin:NAME``, else relative to the working directory."""
    if not path.startswith(PREFIX):
        return expand_home(path, where=where)
    name = path.removeprefix(PREFIX)
    resolved = Path(str(files("digenrl.assets"))) / _MODELS.get(name, name)
    if not resolved.exists():
        shipped = ("shapes", "shapes/train.jsonl", "shapes/heldout.jsonl")
        raise ConfigError(
            f"{where}: {path!r} is not shipped with DigenRL.",
            fix=f"Use one of {', '.join(PREFIX + s for s in shipped)}, or a path of your own.",
        )
    return resolved
