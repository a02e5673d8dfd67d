"""Recipes by name: those shipped inside the package need no path."""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path

from digenrl.errors import ConfigError

_SUFFIXES = (".yaml", ".yml")


def builtin_recipes() -> dict[str, Path]:
    """Name -> file of every recipe that is shipped, in alphabetical order."""
    folder = Path(str(files("digenrl.recipes")))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def names_recipe(text: str) -> bool:
    """Whether an argument of the command line can only be meant as a recipe."""
    return text.endswith(_SUFFIXES) or text in builtin_recipes()


def recipe_file(name: str | Path) -> Path:
    """The file that a path or the name of a built-in recipe means; a file of that name comes first.

    Raises ConfigError, naming the built-in recipes, where it means none.
    """
    if os.path.isfile(name):  # unlike Path.is_file, False for every path that cannot exist, too
        return Path(name)
    shipped = builtin_recipes()
    if str(name) in shipped:
        return shipped[str(name)]
    raise ConfigError(
        f"There is no recipe {str(name)!r}.",
        why=f"A recipe is a YAML file, or the name of a built-in one: {', '.join(shipped)}.",
        fix="Name an existing file or one of these; `digenrl show recipes` says what they are.",
    )
