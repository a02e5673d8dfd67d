"""``digenrl show``: components and their documented settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel

from digenrl.config.builtin_recipes import builtin_recipes
from digenrl.config.registry import KINDS, settings_class
from digenrl.config.schema import Recipe
from digenrl.config.section import ComponentSpec
from digenrl.errors import ConfigError


def run(kind: str | None, name: str | None) -> None:
    """Print the list or the settings asked for."""
    if kind is not None and kind.removesuffix("s") in KINDS:
        kind = kind.removesuffix("s")  # `digenrl show algorithms` is what one says for the list
    if kind is None:
        for each, known in KINDS.items():
            print(f"{each}:")
            wide = max(map(len, known))
            for component, registered in sorted(known.items()):
                print(f"  {component:{wide}} {registered.summary}")
        print("`digenrl show KIND NAME` shows one's settings, `digenrl show recipe` all keys of a recipe.")
        print("`digenrl show recipes` lists the built-in ones.")
    elif kind == "recipes":
        for each, file in builtin_recipes().items():
            print(f"{each:24} {_first_comment(file)}")
        print("`digenrl train NAME` runs one, `digenrl show recipe NAME` prints it.")
    elif kind == "recipe" and name in builtin_recipes():
        print(builtin_recipes()[name].read_text(encoding="utf-8"), end="")
    elif kind == "recipe":
        _show_recipe(name)
    elif kind not in KINDS:
        raise ConfigError(f"There is nothing called {kind!r} to show.", fix=f"Use recipe, recipes, {', '.join(KINDS)}.")
    elif name is None:
        wide = max(map(len, KINDS[kind]))
        for component, registered in sorted(KINDS[kind].items()):
            print(f"{component:{wide}} {registered.summary}")
    else:
        _show_fields(settings_class(kind, name, where="show"), "")


def _first_comment(recipe: Path) -> str:
    """What the recipe's file says of itself in its first line."""
    return recipe.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")


def _show_recipe(section: str | None) -> None:
    sections = {name: info for name, info in Recipe.model_fields.items() if section in (None, name)}
    if not sections:
        raise ConfigError(
            f"A recipe has no section {section!r}.",
            why=f"Sections are {', '.join(Recipe.model_fields)}.",
            fix=f"Use one of these, or a built-in recipe: {', '.join(builtin_recipes())}.",
        )
    for name, info in sections.items():
        model = _model_of(info.annotation)
        if model is not None and issubclass(model, ComponentSpec):
            kind = name.rstrip("s")
            print(f"{name}.type (required): name of the {kind}; its own keys stand beside it (`digenrl show {kind}`)")
        if model is not None:
            _show_fields(model, f"{name}.")


def _show_fields(model: type[BaseModel], prefix: str) -> None:
    for name, info in model.model_fields.items():
        if name == "settings" or (name == "type" and info.description is None):
            continue
        nested = _model_of(info.annotation)
        if nested is not None:
            absent = " (default null)" if not info.is_required() and info.get_default(call_default_factory=True) is None else ""
            print(f"{prefix}{name}{absent}: {info.description or ''}".rstrip())
            _show_fields(nested, f"{prefix}{name}.")
        else:
            default = "required" if info.is_required() else f"default {_plain(info.get_default(call_default_factory=True))}"
            print(f"{prefix}{name} ({default}): {info.description or '(no description)'}")


def _model_of(annotation: Any) -> type[BaseModel] | None:
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _plain(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
