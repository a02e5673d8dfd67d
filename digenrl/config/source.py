"""Where a recipe's values come from: a YAML file, with the line of every key, and ``a.b=value`` overrides.

Invariants: a key that stands twice is an error; whatever PyYAML raises becomes a ConfigError with the line; the value of
an override that is not clearly YAML (a number, true, null, a quoted text, a [list], a {mapping}) is text, byte for byte;
no code is executed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from digenrl.errors import ConfigError

KeyPath = tuple[str | int, ...]
_BAD_SCALAR = (ValueError, LookupError, AttributeError, TypeError, OverflowError)
"""What PyYAML's constructors let through instead of a YAMLError: a number of 5000 digits, ``!!bool x``, ``!!int ''``."""


class _Loader(yaml.SafeLoader):
    """YAML without dates and without the ``=`` value: 2026-01-31 is a fine name for a run."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] not in {"timestamp", "value"}]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


@dataclass(slots=True)
class Source:
    """Where each value came from, for messages."""

    file: str
    lines: dict[KeyPath, int] = field(default_factory=dict)
    overrides: dict[KeyPath, str] = field(default_factory=dict)

    def of(self, path: KeyPath) -> str:
        """The place of a value, or of the nearest section around it that has one."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.overrides:
                return f"command line, {self.overrides[path[:length]]}"
            if path[:length] in self.lines:
                return f"{self.file}:{self.lines[path[:length]]}"
        return self.file


def parse_yaml(text: str, source: Source) -> dict[str, Any]:
    """The recipe as plain data; notes the line of every key in ``source``."""
    root = None
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        source.lines.update(_lines(root, (), source, {}))
        data = loader.construct_document(root) if root is not None else None
    except yaml.YAMLError as error:
        raise ConfigError(
            f"{source.file}{_line_of(error, text)}: this is not YAML: {getattr(error, 'problem', None) or error}.",
            fix="Mend the line; a value with a colon or a hash sign needs quotes.",
        ) from error
    except RecursionError as error:
        raise ConfigError(f"{source.file}: the sections are nested too deeply.", fix="A recipe has three levels.") from error
    except _BAD_SCALAR as error:
        raise ConfigError(
            f"{source.file}:{_bad_scalar_line(root)}: this value cannot be read: {error}.", fix="Mend it, or put it in quotes."
        ) from error
    if not isinstance(data, dict):
        raise ConfigError(
            f"{source.file}: a recipe is a mapping of sections, and this {'is empty' if data is None else 'is something else'}.",
            fix="Start from a built-in recipe: `digenrl show recipes`.",
        )
    return data


def apply_override(data: dict[str, Any], override: str, source: Source) -> None:
    """Set one ``a.b=value``; a number in the key is the index of a list."""
    dotted, equals, text = override.partition("=")
    if not equals or not dotted:
        raise ConfigError(
            f"Cannot read the override {override!r}.", why="An override is key=value.", fix="Write it like train.steps=3."
        )
    value = _override_value(text, override)
    path: list[str | int] = []
    here: Any = data
    parts = dotted.split(".")
    for position, part in enumerate(parts):
        key: str | int = part
        if isinstance(here, list):
            key = _index(part, here, path, override)
        elif not isinstance(here, dict):
            raise ConfigError(
                f"{override!r}: {_dotted(path)} is a value, not a section, so it has no {part!r}.",
                fix="Check the key against `digenrl show recipe`.",
            )
        path.append(key)
        if position == len(parts) - 1:
            here[key] = value
            source.overrides[tuple(path)] = override
        else:
            # A copy: with a YAML alias the same section may stand in a second place, which the override does not name.
            inner = here.get(key) if isinstance(here, dict) else here[int(key)]
            # A list that the recipe leaves out begins with the item that is named: cluster.generators.0.replicas=2.
            absent: dict[str, Any] | list[Any] = [{}] if parts[position + 1] == "0" else {}
            here[key] = absent if inner is None else inner.copy() if isinstance(inner, dict | list) else inner
            here = here[key]


def _override_value(text: str, override: str) -> Any:
    """Numbers, true, null, quoted texts, lists and mappings as YAML has them; anything else is the text itself."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"The override {override!r} is not UTF-8.", fix="Use a terminal that sends UTF-8.") from error
    if text.lstrip()[:1] in {"&", "!"}:  # an anchor or a tag, which YAML would take away
        return text
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        whole = node is not None and text[node.start_mark.index : node.end_mark.index] == text.strip()
        value = loader.construct_document(node) if whole else text
    except (yaml.YAMLError, RecursionError, *_BAD_SCALAR) as error:
        if text.lstrip()[:1] not in {"[", "{"}:
            return text
        raise ConfigError(
            f"Cannot read the value of {override!r}: {getattr(error, 'problem', None) or error}.",
            why="A value that begins with a bracket is read as a YAML list or mapping.",
            fix=f"Close the bracket, or put a text in quotes: {override.partition('=')[0]}='\"...\"'.",
        ) from error
    if isinstance(node, yaml.ScalarNode):
        quoted = node.style in {"'", '"'}
        return value if quoted or not isinstance(value, str | bytes) else text
    return value if isinstance(node, yaml.CollectionNode) and node.flow_style else text


def _index(part: str, items: list[Any], path: list[str | int], override: str) -> int:
    if part.isascii() and part.isdecimal() and len(part) < 10 and int(part) < len(items):
        return int(part)
    raise ConfigError(
        f"{override!r}: {_dotted(path)} is a list of {len(items)}, and {part!r} is not an index of it.",
        fix=f"Use a number from 0 to {len(items) - 1}." if items else "The list is empty; give all of it, as [...].",
    )


def _lines(node: Any, path: KeyPath, source: Source, known: dict[int, bool]) -> Iterator[tuple[KeyPath, int]]:
    """Path and line of every key and item. known: id of each node met -> whether it is still open."""
    if isinstance(node, yaml.CollectionNode):
        if known.get(id(node)):
            raise ConfigError(
                f"{source.file}:{node.start_mark.line + 1}: {_dotted(path)} contains itself.", fix="Remove the alias (*name)."
            )
        if id(node) in known:
            return  # An alias: its lines are those of the place that it names.
        known[id(node)] = True
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key_node, value_node in node.value:
            key, line = str(key_node.value), key_node.start_mark.line + 1
            if key in seen:
                raise ConfigError(
                    f"{source.file}:{line}: the key {_dotted((*path, key))} stands here a second time.",
                    why=f"It was first given in line {seen[key]}; YAML would silently keep the last one.",
                    fix="Delete one of the two.",
                )
            seen[key] = line
            yield (*path, key), line
            yield from _lines(value_node, (*path, key), source, known)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield (*path, index), item.start_mark.line + 1
            yield from _lines(item, (*path, index), source, known)
    known[id(node)] = False


def _line_of(error: yaml.YAMLError, text: str) -> str:
    mark, position = getattr(error, "problem_mark", None), getattr(error, "position", None)
    if mark is not None:
        return f":{mark.line + 1}"
    return f":{text.count(chr(10), 0, position) + 1}" if isinstance(position, int) else ""


def _bad_scalar_line(root: Any) -> int:
    nodes = [root]
    while nodes:
        node = nodes.pop()
        if isinstance(node, yaml.CollectionNode):
            nodes.extend(n for item in node.value for n in (item if isinstance(item, tuple) else (item,)))
        elif node is not None:
            try:
                _Loader("").construct_document(node)
            except _BAD_SCALAR:
                return int(node.start_mark.line) + 1
    return 1


def _dotted(path: tuple[str | int, ...] | list[str | int]) -> str:
    return ".".join(map(str, path)) or "recipe"
