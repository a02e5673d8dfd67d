"""What commands cost in a simulation: durations by kind of command and worker, in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from digenrl.errors import ConfigError
from digenrl.scheduling.step_model import StepCosts

TICKS = 1_000_000
"""Microseconds in a second: the scheduler's ticks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationCosts:
    """Durations of one micro-batch of full size, and of what happens once a step. Seconds."""

    generate: tuple[float, ...]
    """By generator replica."""
    score: tuple[float, ...] | None = None
    """By generator replica, or by scorer with ``scoring: pool``; None where scoring is part of generation."""
    update: float
    tag: float | None = None
    """Generation of one micro-batch by the trainer; None where it cannot generate."""
    switch_in: float = 0.0
    switch_out: float = 0.0
    encode: float = 0.0
    """Prompts of one step."""
    optimizer: float = 0.0
    sync: float = 0.0
    evaluate: float = 0.0
    save: float = 0.0
    """A checkpoint."""
    last_share: float = 1.0
    """Size of the last micro-batch as a share of a full one."""

    def __post_init__(self) -> None:
        for name in ("generate", "score"):
            values = getattr(self, name)
            for index, value in enumerate(values or ()):
                _check(f"{name}[{index}]", value, allow_zero=False)
        for name in ("generate", "score"):
            if getattr(self, name) == ():
                raise ConfigError(f"costs.{name} is empty.", fix="Give one duration per replica.")
        _check("update", self.update, allow_zero=False)
        if self.tag is not None:
            _check("tag", self.tag, allow_zero=False)
        for name in ("switch_in", "switch_out", "encode", "optimizer", "sync", "evaluate", "save"):
            _check(name, getattr(self, name), allow_zero=True)
        if not 0 < self.last_share <= 1:
            raise ConfigError(f"costs.last_share ({self.last_share}) must be above 0 and at most 1.")

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> SimulationCosts:
        """From a mapping, as a YAML file holds it; one number for ``generate`` or ``score`` means one replica."""
        known = {field.name for field in fields(cls)}
        for name in plain:
            if name not in known:
                raise ConfigError(f"costs.{name} is not a known key.", fix=f"Known are: {', '.join(sorted(known))}.")
        for name in ("generate", "update"):
            if plain.get(name) is None:
                raise ConfigError(f"costs.{name} is missing.", fix="Give it in seconds per micro-batch.")
        values: dict[str, Any] = {}
        for name, value in plain.items():
            if name in ("generate", "score") and value is not None:
                items = value if isinstance(value, list | tuple) else [value]
                values[name] = tuple(_number(f"{name}[{i}]", item) for i, item in enumerate(items))
            else:
                values[name] = _number(name, value) if value is not None else None
        return cls(**{name: value for name, value in values.items() if value is not None or name in ("score", "tag")})

    def step_costs(self) -> StepCosts:
        """The same as the searches want them, in ticks. Without a ``tag`` cost the slowest replica's stands in."""
        return StepCosts(
            generate=tuple(ticks(value) for value in self.generate),
            score=tuple(ticks(value) for value in self.score) if self.score is not None else None,
            update=ticks(self.update),
            tag=ticks(self.tag if self.tag is not None else max(self.generate)),
            switch_in=ticks(self.switch_in),
            switch_out=ticks(self.switch_out),
            optimizer=ticks(self.optimizer),
            sync=ticks(self.sync),
        )


def ticks(seconds: float) -> int:
    """Whole microseconds."""
    return round(seconds * TICKS)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        try:
            return float(value)  # YAML reads 1e-3 as text
        except (TypeError, ValueError):
            raise ConfigError(f"costs.{name} cannot be {value!r}.", fix="Give a number of seconds.") from None
    return float(value)


def _check(name: str, value: float, *, allow_zero: bool) -> None:
    if not (0 <= value < float("inf")) or (value == 0 and not allow_zero):
        raise ConfigError(
            f"costs.{name} ({value}) must be {'at least 0' if allow_zero else 'above 0'}.",
            why="A duration is a number of seconds.",
            fix="Scoring that takes no time is written as score: null." if name.startswith("score") else "Mend the value.",
        )
