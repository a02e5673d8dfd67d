"""Events and commands as JSON objects and back; the file format of a trace.

Line 1: {"format": "digenrl-trace", "version": 1, "source": "run", "settings": {...}}; then a line per instant:
{"events": [...], "commands": [...]}.
What is read is checked against the dataclass, field by field, so that a damaged trace is an error here and not later.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from enum import StrEnum
from typing import Any

from digenrl.errors import ConfigError
from digenrl.scheduling import commands, events
from digenrl.scheduling.commands import Command
from digenrl.scheduling.events import Event

FORMAT = "digenrl-trace"
VERSION = 1


def to_json(item: Event | Command) -> dict[str, Any]:
    """An event or command as a JSON object with its ``type``."""
    plain: dict[str, Any] = {"type": type(item).__name__}
    for field in dataclasses.fields(item):
        value = getattr(item, field.name)
        if isinstance(value, commands.WorkerCommand):
            value = to_json(value)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = dataclasses.asdict(value)
        plain[field.name] = value
    return plain


def event_from_json(plain: Any) -> Event:
    """The inverse of ``to_json`` for events. Raises ConfigError on anything else."""
    event: Event = _one_of(typing.get_args(events.Event), plain)
    return event


def command_from_json(plain: Any) -> Command:
    """The inverse of ``to_json`` for commands. Raises ConfigError on anything else."""
    command: Command = _one_of(typing.get_args(commands.Command), plain)
    return command


def from_plain(cls: type, plain: Any) -> Any:
    """Build a frozen dataclass of this package from a JSON object. Raises ConfigError where a field does not fit."""
    if not isinstance(plain, dict):
        raise ConfigError(f"{plain!r} is not a {cls.__name__}.")
    hints = _hints(cls)
    if unknown := set(plain) - set(hints):
        raise ConfigError(f"{cls.__name__} has no {', '.join(sorted(unknown))}.")
    try:
        return cls(**{name: _value(hints[name], value) for name, value in plain.items()})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{plain!r} is not a {cls.__name__}: {error}.") from error


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _one_of(classes: tuple[type, ...], plain: Any) -> Any:
    known = {cls.__name__: cls for cls in classes}
    name = plain.get("type") if isinstance(plain, dict) else None
    if not isinstance(name, str) or name not in known:
        raise ConfigError(f"{plain!r} is none of {', '.join(known)}.")
    return from_plain(known[name], {key: value for key, value in plain.items() if key != "type"})


def _value(hint: Any, value: Any) -> Any:
    """``value`` as the type hint asks for it, or ValueError. Knows the hints that events, commands and settings have."""
    members = typing.get_args(hint)
    if isinstance(hint, typing.NewType):
        return _value(hint.__supertype__, value)
    if isinstance(hint, types.UnionType):
        if value is None and type(None) in members:
            return None
        present = tuple(member for member in members if member is not type(None))
        several = len(present) > 1 and dataclasses.is_dataclass(present[0])
        return _one_of(present, value) if several else _value(present[0], value)
    if typing.get_origin(hint) is tuple and isinstance(value, list):
        return tuple(_value(members[0], item) for item in value)
    if typing.get_origin(hint) is typing.Literal and value in members:
        return value
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return from_plain(hint, value)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return hint(value)
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:  # not isinstance: a bool is an int
        raise ValueError(f"{value!r} is not {getattr(hint, '__name__', hint)}")
    return value
