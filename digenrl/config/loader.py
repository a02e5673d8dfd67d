"""From a YAML file and ``a.b=value`` overrides to a checked, frozen recipe.

Invariants: nothing is guessed (unknown keys, duplicate keys and wrong types are errors that name file and line, all of
them at once); values of overrides are parsed as YAML, so any Unicode text passes unchanged; no code is executed.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from digenrl.config.registry import settings_class
from digenrl.config.schema import ComponentSpec, LoraSection, ModelSection, Recipe, RewardSpec
from digenrl.config.text import read_text
from digenrl.errors import ConfigError

Path_ = tuple[str | int, ...]


@dataclass(slots=True)
class _Source:
    """Where each value came from, for messages."""

    file: str
    lines: dict[Path_, int] = field(default_factory=dict)
    overrides: dict[Path_, str] = field(default_factory=dict)

    def of(self, path: Path_) -> str:
        for length in range(len(path), 0, -1):
            if path[:length] in self.overrides:
                return f"command line, {self.overrides[path[:length]]}"
            if path[:length] in self.lines:
                return f"{self.file}:{self.lines[path[:length]]}"
        return self.file


@dataclass(frozen=True, slots=True)
class _Problem:
    path: Path_
    message: str


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read, override and validate one recipe. Raises ConfigError with every problem found, each with its line."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(
            f"There is no recipe {str(path)!r}.",
            why="A recipe is a YAML file; the shipped ones are in recipes/.",
            fix="Name an existing file.",
        )
    source = _Source(file=str(path))
    data = _parse_yaml(read_text(file), source)
    for override in overrides:
        _apply_override(data, override, source)
    return recipe_from_plain(data, source)


def recipe_from_plain(data: Mapping[str, Any], source: _Source | None = None) -> Recipe:
    """Validate a recipe that is already a plain mapping (``Recipe.to_plain`` gives one)."""
    source = source or _Source(file="recipe")
    problems: list[_Problem] = []
    prepared = {key: ({} if value is None and key in _SECTIONS_WITH_DEFAULTS else value) for key, value in data.items()}
    _nest_component(prepared, ("model",), "model", set(ModelSection.model_fields) - {"settings"}, source, problems)
    _nest_component(prepared, ("algorithm",), "algorithm", {"type"}, source, problems)
    if isinstance(prepared.get("rewards"), list):
        prepared["rewards"] = list(prepared["rewards"])
        for index in range(len(prepared["rewards"])):
            own_keys = set(RewardSpec.model_fields) - {"settings"}
            _nest_component(prepared["rewards"], ("rewards", index), "reward", own_keys, source, problems)
    try:
        recipe = Recipe.model_validate(prepared)
    except ValidationError as error:
        problems.extend(_problems(error, ()))
    if problems:
        raise _as_config_error(problems, source)
    return recipe


_SECTIONS_WITH_DEFAULTS = {name for name, info in Recipe.model_fields.items() if not info.is_required() and name != "eval"}


def _parse_yaml(text: str, source: _Source) -> dict[str, Any]:
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source.file}:{mark.line + 1}" if mark else source.file
        raise ConfigError(
            f"{where}: this is not YAML: {getattr(error, 'problem', error)}.",
            fix="Mend the line; a value with a colon or a hash sign needs quotes.",
        ) from error
    if not isinstance(data, dict):
        raise ConfigError(
            f"{source.file}: a recipe is a mapping of sections, and this {'is empty' if data is None else 'is something else'}.",
            fix="Start from one of the files in recipes/.",
        )
    for path, line in _lines(root, (), source):
        source.lines[path] = line
    return data


def _lines(node: Any, path: Path_, source: _Source) -> Iterator[tuple[Path_, int]]:
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key_node, value_node in node.value:
            key, line = str(key_node.value), key_node.start_mark.line + 1
            if key in seen:
                raise ConfigError(
                    f"{source.file}:{line}: the key {'.'.join(map(str, (*path, key)))} stands here a second time.",
                    why=f"It was first given in line {seen[key]}; YAML would silently keep the last one.",
                    fix="Delete one of the two.",
                )
            seen[key] = line
            yield (*path, key), line
            yield from _lines(value_node, (*path, key), source)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield (*path, index), item.start_mark.line + 1
            yield from _lines(item, (*path, index), source)


def _apply_override(data: dict[str, Any], override: str, source: _Source) -> None:
    dotted, equals, text = override.partition("=")
    if not equals or not dotted:
        raise ConfigError(
            f"Cannot read the override {override!r}.", why="An override is key=value.", fix="Write it like train.steps=3."
        )
    try:
        value = yaml.safe_load(text) if text else ""
    except yaml.YAMLError as error:
        raise ConfigError(
            f"Cannot read the value of {override!r}: {getattr(error, 'problem', error)}.",
            why="Values are read as YAML.",
            fix=f"Put the value in quotes: {dotted}='\"...\"'.",
        ) from error
    path: list[str | int] = []
    here: Any = data
    parts = dotted.split(".")
    for position, part in enumerate(parts):
        last = position == len(parts) - 1
        key: str | int = part
        if isinstance(here, list):
            if not part.isdigit() or int(part) >= len(here):
                raise ConfigError(
                    f"{override!r}: {'.'.join(map(str, path))} is a list of {len(here)}, and {part!r} is not an index of it.",
                    fix=f"Use a number from 0 to {len(here) - 1}.",
                )
            key = int(part)
        elif not isinstance(here, dict):
            raise ConfigError(
                f"{override!r}: {'.'.join(map(str, path))} is a value, not a section, so it has no {part!r}.",
                fix="Check the key against `digenrl show recipe`.",
            )
        path.append(key)
        if last:
            here[key] = value
            source.overrides[tuple(path)] = override
        else:
            if isinstance(here, dict) and here.get(part) is None:
                here[part] = {}
            here = here[key]


def _nest_component(
    container: Any, path: Path_, kind: str, own_keys: set[str], source: _Source, problems: list[_Problem]
) -> None:
    """Replace a flat component (type, own keys, settings beside them) by one whose settings are validated."""
    key: Any = path[-1]
    if isinstance(container, dict) and key not in container:
        return
    flat = container[key]
    if not isinstance(flat, Mapping):
        problems.append(_Problem(path, "must be a mapping with a `type`"))
        if isinstance(container, dict):
            del container[key]
        return
    if "settings" in flat:
        problems.append(_Problem((*path, "settings"), "is not a key of its own: settings stand directly beside `type`"))
    name = str(flat.get("type", "sd3" if kind == "model" else ""))
    if not name:
        problems.append(_Problem((*path, "type"), "is required: it names the component"))
        return
    cls = settings_class(kind, name, where=f"{'.'.join(map(str, path))}.type ({source.of((*path, 'type'))})")
    settings = {k: v for k, v in flat.items() if k not in own_keys and k != "settings"}
    nested = {k: v for k, v in flat.items() if k in own_keys}
    try:
        nested["settings"] = cls.model_validate(settings)
    except ValidationError as error:
        problems.extend(_problems(error, path, cls, own_keys))
        nested["settings"] = cls.model_construct()
    container[key] = nested


def _problems(
    error: ValidationError,
    prefix: Path_,
    cls: type[BaseModel] | None = None,
    own_keys: set[str] = frozenset(),  # type: ignore[assignment]
) -> list[_Problem]:
    found: dict[Path_, str] = {}
    for item in error.errors(include_url=False):
        path = prefix + tuple(part for part in item["loc"] if not _is_union_tag(part))
        if path and path[-1] == "settings":
            continue
        if item["type"] == "extra_forbidden":
            message = "is not a known key" + _nearest(path, cls, own_keys)
        elif item["type"] == "missing":
            message = "is required and missing"
        else:
            text = item["msg"].removeprefix("Value error, ")
            message = f"cannot be {item['input']!r}: {text[0].lower()}{text[1:]}"
            if path in found:
                message = f"{found[path]}; or {text[0].lower()}{text[1:]}"
        found[path] = message
    return [_Problem(path, message) for path, message in found.items()]


def _is_union_tag(part: str | int) -> bool:
    """pydantic puts the member of a union (``constrained-int``, ``literal['all']``) into the location."""
    return isinstance(part, str) and ("[" in part or part.startswith("constrained-") or part in {"int", "str", "float"})


def _nearest(path: Path_, cls: type[BaseModel] | None, own_keys: set[str]) -> str:
    wrong = str(path[-1])
    siblings = set(own_keys) | (set(cls.model_fields) if cls else _fields_at(path[:-1]))
    close = difflib.get_close_matches(wrong, siblings, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]}?"
    everywhere = dict(_all_keys())
    close = difflib.get_close_matches(wrong, everywhere, n=1, cutoff=0.8)
    return f"; did you mean {everywhere[close[0]]}?" if close else f"; known are: {', '.join(sorted(siblings))}"


def _fields_at(path: Path_) -> set[str]:
    model: type[BaseModel] = Recipe
    for part in path:
        info = model.model_fields.get(str(part))
        nested = _section_class(info.annotation) if info else None
        if nested is None:
            return set()
        model = nested
    return set(model.model_fields)


def _section_class(annotation: Any) -> type[BaseModel] | None:
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _all_keys() -> Iterator[tuple[str, str]]:
    for name, info in Recipe.model_fields.items():
        section = _section_class(info.annotation)
        if section is not None and not issubclass(section, ComponentSpec | LoraSection):
            for key in section.model_fields:
                yield key, f"{name}.{key}"


def _as_config_error(problems: Sequence[_Problem], source: _Source) -> ConfigError:
    lines = [f"{'.'.join(map(str, p.path)) or 'recipe'} {p.message} ({source.of(p.path)})" for p in problems]
    head = lines[0] if len(lines) == 1 else "The recipe has several problems:\n  - " + "\n  - ".join(lines)
    return ConfigError(
        head, why="Every key is checked before anything starts.", fix="`digenrl show recipe` lists all keys with their meaning."
    )
