"""Events and commands as JSON objects and back; the file format of a trace.

Line 1: {"format": "digenrl-trace", "version": 1, "settings": {...}}; then a line per event: {"event": ..., "commands": [...]}.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

from digenrl.errors import ConfigError
from digenrl.scheduling import commands, events
from digenrl.scheduling.commands import Command
from digenrl.scheduling.events import Event

FORMAT = "digenrl-trace"
VERSION = 1
_EVENTS: dict[str, type] = {cls.__name__: cls for cls in typing.get_args(events.Event)}
_COMMANDS: dict[str, type] = {cls.__name__: cls for cls in typing.get_args(commands.Command)}


def to_json(item: Event | Command) -> dict[str, Any]:
    """An event or command as a JSON object with its ``type``."""
    plain: dict[str, Any] = {"type": type(item).__name__}
    for field in dataclasses.fields(item):
        value = getattr(item, field.name)
        if type(value).__name__ in _COMMANDS:
            value = to_json(value)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = dataclasses.asdict(value)
        plain[field.name] = value
    return plain


def event_from_json(plain: Any) -> Event:
    """The inverse of ``to_json`` for events. Raises ConfigError on anything else."""
    event: Event = _build(_EVENTS, plain)
    return event


def command_from_json(plain: Any) -> Command:
    """The inverse of ``to_json`` for commands. Raises ConfigError on anything else."""
    command: Command = _build(_COMMANDS, plain)
    return command


def from_plain(cls: type, plain: Any) -> Any:
    """Build a frozen dataclass of this package from a JSON object, with lists turned back into tuples."""
    if not isinstance(plain, dict):
        raise ConfigError(f"{plain!r} is not a {cls.__name__}.")
    hints = typing.get_type_hints(cls)
    names = {field.name for field in dataclasses.fields(cls)}
    if unknown := set(plain) - names:
        raise ConfigError(f"{cls.__name__} has no {', '.join(sorted(unknown))}.")
    try:
        return cls(**{name: _value(hints[name], value) for name, value in plain.items()})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{plain!r} is not a {cls.__name__}: {error}.") from error


def _build(known: dict[str, type], plain: Any) -> Any:
    if not isinstance(plain, dict) or plain.get("type") not in known:
        raise ConfigError(f"{plain!r} is none of {', '.join(known)}.")
    return from_plain(known[plain["type"]], {key: value for key, value in plain.items() if key != "type"})


def _value(hint: Any, value: Any) -> Any:
    if value is None:
        return None
    members = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if isinstance(value, dict) and "type" in value:
        return command_from_json(value)
    for member in members:
        if dataclasses.is_dataclass(member) and isinstance(member, type):
            return from_plain(member, value)
        if isinstance(member, type) and issubclass(member, events.StepOutcome):
            return events.StepOutcome(value)
    return tuple(value) if isinstance(value, list) else value
