"""An override of a component's ``type`` alone: keys of the file that only the old type has are left out, and it is said which."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from digenrl.config.registry import settings_class
from digenrl.config.source import KeyPath, Source
from digenrl.errors import ConfigError


def leave_out_keys_of_old_types(before: Mapping[str, Any], data: dict[str, Any], source: Source) -> Iterator[str]:
    """Take such keys out of ``data``; yields a sentence for each component that has lost some.

    A key that both types have stays, one that is given on the command line too (it is an error if the new type lacks it), and
    a key that neither type has (a mistake of the file's). ``before``: the file's own values.
    """
    for kind, path in _components(data):
        old, new = _at(before, path), _at(data, path)
        if not (isinstance(old, dict) and isinstance(new, dict)) or (*path, "type") not in source.overrides:
            continue
        names = old.get("type"), new.get("type")
        if names[0] == names[1] or not all(isinstance(name, str) for name in names):
            continue
        fields = [_fields(kind, str(name)) for name in names]
        if fields[0] is None or fields[1] is None:
            continue  # the loader says what is wrong with the name
        lost = [key for key in new if key in fields[0] - fields[1] and (*path, key) not in source.overrides]
        for key in lost:
            del new[key]
        if lost:
            dotted = ".".join(map(str, path))
            what, verb = ("keys", "are") if len(lost) > 1 else ("key", "is")
            yield f"{dotted}.type={names[1]}: {', '.join(lost)} of {source.file} {verb} left out, {what} of {names[0]} alone"


def _components(data: Mapping[str, Any]) -> Iterator[tuple[str, KeyPath]]:
    yield "model", ("model",)
    yield "algorithm", ("algorithm",)
    for path in (("rewards",), ("eval", "rewards")):
        rewards = _at(data, path)
        if isinstance(rewards, list):
            yield from (("reward", (*path, index)) for index in range(len(rewards)))


def _at(data: Any, path: KeyPath) -> Any:
    for part in path:
        try:
            data = data[part]
        except (LookupError, TypeError):
            return None
    return data


def _fields(kind: str, name: str) -> frozenset[str] | None:
    try:
        return frozenset(settings_class(kind, name, where=kind).model_fields)
    except ConfigError:
        return None
