"""From a YAML file and ``a.b=value`` overrides to a checked, frozen recipe.

Invariants: nothing is guessed: unknown keys, wrong types and bad values are errors that name the nearest known key and
the place where they stand, all of them at once (an unknown component alone: without it its keys have no meaning).
"""

from __future__ import annotations

import copy
import difflib
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from digenrl.config.builtin_recipes import recipe_file
from digenrl.config.registry import KINDS, settings_class
from digenrl.config.retyped import leave_out_keys_of_old_types
from digenrl.config.reward_list import RewardSpec
from digenrl.config.schema import ModelSection, Recipe
from digenrl.config.section import ComponentSpec, Section
from digenrl.config.source import KeyPath, Source, apply_override, parse_yaml
from digenrl.config.text import read_text
from digenrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class _Problem:
    path: KeyPath
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Component:
    """A component of the recipe: where it stands, and which keys are the recipe's own and not of its settings."""

    kind: str
    path: KeyPath
    own_keys: frozenset[str]


_OWN_KEYS = {
    "model": frozenset(ModelSection.model_fields) - {"settings"},
    "algorithm": frozenset(ComponentSpec.model_fields) - {"settings"},
    "reward": frozenset(RewardSpec.model_fields) - {"settings"},
}
_SECTIONS_WITH_DEFAULTS = {name for name, info in Recipe.model_fields.items() if not info.is_required() and name != "eval"}


def load_recipe(path: str | Path, overrides: Sequence[str] = (), *, say: Callable[[str], object] | None = None) -> Recipe:
    """Read, override and validate one recipe. Raises ConfigError with every problem found, each with its line.

    path: a file, or the name of a built-in recipe. say: hears of each component whose type an override changes and which has
    keys of the old type alone, which are left out.
    """
    file = recipe_file(path)
    source = Source(file=str(file))
    data = parse_yaml(read_text(file), source)
    written = copy.deepcopy(data)
    for override in overrides:
        apply_override(data, override, source)
    for sentence in leave_out_keys_of_old_types(written, data, source):
        if say is not None:
            say(sentence)
    return recipe_from_plain(data, source)


def load_reward(name: str, overrides: Sequence[str] = ()) -> RewardSpec:
    """One reward by name, with its settings as ``key=value``. Raises ConfigError with every problem found."""
    source, problems = Source(file="command line"), list[_Problem]()
    plain: dict[str, Any] = {"type": name}
    for override in overrides:
        apply_override(plain, override, source)
    nested = _nested(plain, _Component(kind="reward", path=(), own_keys=_OWN_KEYS["reward"]), source, problems)
    try:
        reward = RewardSpec.model_validate(nested)
    except ValidationError as error:
        problems.extend(_problems(error, (), RewardSpec))
    if problems:
        raise _as_config_error(problems, source)
    return reward if reward.name else reward.model_copy(update={"name": reward.default_name})


def recipe_from_plain(data: Mapping[str, Any], source: Source | None = None) -> Recipe:
    """Validate a recipe that is already a plain mapping (``Recipe.to_plain`` gives one)."""
    source = source or Source(file="recipe")
    problems: list[_Problem] = []
    prepared = {key: ({} if value is None and key in _SECTIONS_WITH_DEFAULTS else value) for key, value in data.items()}
    for kind in ("model", "algorithm"):
        if kind in prepared:
            component = _Component(kind=kind, path=(kind,), own_keys=_OWN_KEYS[kind])
            prepared[kind] = _nested(prepared[kind], component, source, problems)
    if isinstance(prepared.get("rewards"), list):
        prepared["rewards"] = _nested_rewards(prepared["rewards"], ("rewards",), source, problems)
    held_out = prepared.get("eval")
    if isinstance(held_out, Mapping) and isinstance(held_out.get("rewards"), list):
        prepared["eval"] = {**held_out, "rewards": _nested_rewards(held_out["rewards"], ("eval", "rewards"), source, problems)}
    try:
        recipe = Recipe.model_validate(prepared)
    except ValidationError as error:
        found = {problem.path for problem in problems}
        problems.extend(problem for problem in _problems(error, (), Recipe) if problem.path not in found)
    else:
        problems.extend(_truths_as_numbers(data, recipe, ()))
    if problems:
        raise _as_config_error(problems, source)
    return recipe


def _nested_rewards(flat: list[Any], path: KeyPath, source: Source, problems: list[_Problem]) -> list[Any]:
    own_keys = _OWN_KEYS["reward"]
    return [
        _nested(each, _Component(kind="reward", path=(*path, i), own_keys=own_keys), source, problems)
        for i, each in enumerate(flat)
    ]


def _nested(flat: Any, component: _Component, source: Source, problems: list[_Problem]) -> Any:
    """A flat component (type, own keys, settings beside them) with its settings validated and put under ``settings``."""
    path, own_keys = component.path, component.own_keys
    if not isinstance(flat, Mapping):
        problems.append(_Problem(path, "must be a mapping with a `type`"))
        return flat
    name = flat.get("type") or ("sd3" if component.kind == "model" else None)
    if not isinstance(name, str):
        message = "is required: it names the component" if name is None else f"cannot be {_short(name)}: a name is asked for"
        problems.append(_Problem((*path, "type"), message))
        return {"settings": Section()}
    cls = settings_class(component.kind, name, where=f"{_dotted((*path, 'type'))} ({source.of((*path, 'type'))})")
    if clash := sorted((own_keys | {"settings"}) & set(cls.model_fields)):
        problems.append(_Problem((*path, "type"), f"has settings of its own called {', '.join(clash)}, which the recipe keeps"))
    if "settings" in flat:
        problems.append(_Problem((*path, "settings"), "is not a key of its own: settings stand directly beside `type`"))
    settings = {k: v for k, v in flat.items() if k not in own_keys and k != "settings"}
    problems.extend(_dropped(settings, cls, path, own_keys))
    nested = {k: v for k, v in flat.items() if k in own_keys}
    try:
        nested["settings"] = cls.model_validate(settings)
    except ValidationError as error:
        problems.extend(_problems(error, path, cls, own_keys))
        nested["settings"] = cls.model_construct()
    return nested


def _problems(
    error: ValidationError, prefix: KeyPath, cls: type[BaseModel], own_keys: frozenset[str] = frozenset()
) -> list[_Problem]:
    found: dict[KeyPath, str] = {}
    items = error.errors(include_url=False)
    broken = [item["loc"] for item in items if item["type"] != "too_short"]
    for item in items:
        if item["type"] == "too_short" and any(loc[: len(item["loc"])] == item["loc"] for loc in broken):
            continue  # pydantic counts the valid items of a list; what is wrong with the others is said by itself
        is_key = item["type"] in {
            "extra_forbidden",
            "missing",
            "invalid_key",
        }  # then the last part is a key, whatever it looks like
        loc = item["loc"]
        inner = tuple(part for i, part in enumerate(loc) if (is_key and i == len(loc) - 1) or not _is_union_tag(part))
        path = prefix + inner
        text = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            message = _unknown(str(inner[-1]), _model_at(cls, inner[:-1]), own_keys if len(inner) == 1 else frozenset())
        elif item["type"] == "missing":
            message = "is required and missing"
        elif item["type"] == "value_error":
            message = f"cannot stand as it is: {text}"
        elif item["type"] == "too_short":
            message = f"cannot be {_short(item['input'])}: at least {item['ctx']['min_length']} is needed"
        else:
            message = f"cannot be {_short(item['input'])}: {text[0].lower()}{text[1:]}"
            if path in found:
                message = f"{found[path]}; or {text[0].lower()}{text[1:]}"
        found[path] = message
    return [_Problem(path, message) for path, message in found.items()]


def _is_union_tag(part: str | int) -> bool:
    """pydantic puts the member of a union (``constrained-int``, ``literal['all']``) into the location."""
    return isinstance(part, str) and ("[" in part or part.startswith("constrained-") or part in {"int", "str", "float"})


def _dropped(given: Any, cls: type[BaseModel], path: KeyPath, own_keys: frozenset[str] = frozenset()) -> Iterator[_Problem]:
    """Keys that pydantic would drop in silence, because a user's class forgets extra="forbid"."""
    if isinstance(given, list):
        for index, item in enumerate(given):
            yield from _dropped(item, cls, (*path, index))
    elif isinstance(given, Mapping):
        aliases = {info.alias: info for info in cls.model_fields.values() if info.alias}
        for key, value in given.items():
            info = cls.model_fields.get(key) or aliases.get(key)
            inner = _model_in(info.annotation) if info else None
            if inner is not None:
                yield from _dropped(value, inner, (*path, key))
            elif info is None and cls.model_config.get("extra", "ignore") == "ignore":
                yield _Problem((*path, key), _unknown(str(key), cls, own_keys))


def _truths_as_numbers(given: Any, taken: Any, path: KeyPath) -> Iterator[_Problem]:
    """pydantic takes ``true`` (and YAML's yes, on) as the number 1; nobody means that."""
    if isinstance(given, bool) and isinstance(taken, int | float) and not isinstance(taken, bool):
        yield _Problem(path, f"cannot be {str(given).lower()}: a number is asked for")
    elif isinstance(given, Mapping) and isinstance(taken, BaseModel):
        for key, value in given.items():
            owner = taken if key in type(taken).model_fields else getattr(taken, "settings", None)
            yield from _truths_as_numbers(value, getattr(owner, str(key), None), (*path, key))
    elif isinstance(given, list) and isinstance(taken, list | tuple):
        for index, (value, result) in enumerate(zip(given, taken, strict=False)):
            yield from _truths_as_numbers(value, result, (*path, index))


def _unknown(wrong: str, cls: type[BaseModel] | None, own_keys: frozenset[str]) -> str:
    siblings = own_keys | set(cls.model_fields if cls else ()) - {"settings"}
    everywhere = _all_keys()
    kind = everywhere.get(wrong, "").partition(".")[0]
    if own_keys and own_keys == _OWN_KEYS.get(kind):
        return f"is a key of another type of {kind}"
    close = difflib.get_close_matches(wrong, siblings, n=1, cutoff=0.6)
    if close:
        return f"is not a known key; did you mean {close[0]}?"
    close = difflib.get_close_matches(wrong, everywhere, n=1, cutoff=0.8)
    hint = f"did you mean {everywhere[close[0]]}?" if close else f"known are: {', '.join(sorted(siblings))}"
    return f"is not a known key; {hint}"


def _model_at(cls: type[BaseModel], path: KeyPath) -> type[BaseModel] | None:
    model: type[BaseModel] | None = cls
    for part in path:
        if isinstance(part, str) and model is not None:
            info = model.model_fields.get(part)
            model = _model_in(info.annotation) if info else None
    return model


def _model_in(annotation: Any) -> type[BaseModel] | None:
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _all_keys() -> dict[str, str]:
    """Every key of the recipe's sections and of the built-in components -> where it belongs; the first one counts."""
    keys: dict[str, str] = {}
    for name, info in Recipe.model_fields.items():
        section = _model_in(info.annotation)
        for key in section.model_fields if section else ():
            keys.setdefault(key, f"{name}.{key}")
    for kind in ("model", "algorithm"):
        for component in KINDS[kind]:
            for key in settings_class(kind, component, where=kind).model_fields:
                keys.setdefault(key, f"{kind}.{key}")
    return {key: path for key, path in keys.items() if key not in {"settings", "type"}}


def _short(value: Any) -> str:
    shortener = reprlib.Repr()
    shortener.maxstring = shortener.maxother = 100
    try:
        return shortener.repr(value)
    except ValueError:  # Python does not print integers of more than 4300 digits
        return f"a {type(value).__name__} of enormous size"


def _as_config_error(problems: Sequence[_Problem], source: Source) -> ConfigError:
    lines = [f"{_dotted(p.path)} {p.message} ({source.of(p.path)})" for p in problems]
    head = lines[0] if len(lines) == 1 else "The recipe has several problems:\n  - " + "\n  - ".join(lines)
    return ConfigError(
        head, why="Every key is checked before anything starts.", fix="`digenrl show recipe` lists all keys with their meaning."
    )


def _dotted(path: KeyPath) -> str:
    return ".".join(map(str, path)) or "recipe"
