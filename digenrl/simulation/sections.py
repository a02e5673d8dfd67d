"""What a user may write about a simulation, section by section: keys, types, bounds; and how mistakes are reported.

The same sections stand in a costs file, and as ``a.b=value`` overrides of presets, traces and recipes.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidatorFunctionWrapHandler, field_validator

from digenrl.config.source import KeyPath, Source
from digenrl.errors import ConfigError
from digenrl.ids import WorkerId
from digenrl.scheduling.settings import SchedulerSettings, TagPolicy
from digenrl.simulation.cost_model import Workload
from digenrl.simulation.executor import Disturbance, Incident
from digenrl.simulation.modes import Layout, Mode

_MOST = 1_000_000


class _Input(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="wrap")
    @classmethod
    def _no_truth_as_number(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        taken = handler(value)
        if isinstance(value, bool) and not isinstance(taken, bool):
            raise ValueError("a number is asked for")
        return taken


class ScheduleInput(_Input):
    """``schedule``: what is not given is as the source has it."""

    mode: Mode | None = None
    """One of the execution modes (modes.py); the other keys then change it."""
    steps: int = Field(default=8, ge=1, le=_MOST)
    micro_batches: int | None = Field(default=None, ge=1, le=_MOST)
    samples_per_micro_batch: int | None = Field(default=None, ge=1, le=_MOST)
    """Only for samples per second."""
    tsp_factor: float = Field(default=1.0, ge=1.0)
    """How many times slower an update is without TSP (for the modes without it); ``costs.update`` is with it."""
    scoring: Literal["generator", "pool", "inline"] | None = None
    """Inferred when not given: inline without ``costs.score``, by the generators with it."""
    update_order: Literal["arrival", "index"] | None = None
    update_after: Literal["group", "step"] | None = None
    updates_per_rollout: int | None = Field(default=None, ge=1, le=_MOST)
    tag: TagPolicy | None = None
    tag_static: int | None = Field(default=None, ge=0, le=_MOST)
    replan: Literal["bubble", "step"] | None = None
    max_stale_fraction: float | None = Field(default=None, ge=0.0, le=1.0)
    max_attempts: int | None = Field(default=None, ge=1, le=_MOST)
    durations: Literal["auto", "known", "measured"] = "auto"
    """What the searches of TAG plan with: the costs, or estimates made as the run goes, as a real run has to. ``auto``: the
    costs, and estimates where durations scatter."""

    def changes(self) -> dict[str, Any]:
        """The given keys that are fields of SchedulerSettings."""
        names = {field.name for field in dataclasses.fields(SchedulerSettings)} & set(type(self).model_fields)
        return {name: value for name in sorted(names - {"steps"}) if (value := getattr(self, name)) is not None}


class ClusterInput(_Input):
    """``cluster``: the devices that the costs are for."""

    replicas: int = Field(default=1, ge=1, le=_MOST)
    """Generator replicas; counted from ``costs.generate`` where that is a list."""
    ranks: int = Field(default=1, ge=1, le=_MOST)
    """Devices of one generator replica."""
    trainer_ranks: int = Field(default=1, ge=1, le=_MOST)

    def layout(self, groups_per_micro_batch: int) -> Layout:
        """As the modes want it."""
        return Layout(**self.model_dump(), groups_per_micro_batch=groups_per_micro_batch)


class WorkloadInput(_Input):
    """``workload``: the sizes of a preset, with a recipe's names."""

    height: int = Field(ge=8, le=_MOST)
    width: int = Field(ge=8, le=_MOST)
    num_frames: int = Field(ge=1, le=_MOST)
    num_inference_steps: int = Field(ge=2, le=_MOST)
    timestep_fraction: float = Field(gt=0.0, le=1.0)
    prompts_per_step: int = Field(ge=1, le=_MOST)
    num_generations: int = Field(ge=1, le=_MOST)
    groups_per_micro_batch: int = Field(ge=1, le=_MOST)
    forward_batch_size: int = Field(ge=1, le=_MOST)

    def workload(self) -> Workload:
        """As the cost model wants it."""
        if self.groups_per_micro_batch > self.prompts_per_step:
            raise ConfigError(
                f"workload.groups_per_micro_batch ({self.groups_per_micro_batch}) is larger than workload.prompts_per_step "
                f"({self.prompts_per_step}).",
                why="A micro-batch is made of whole prompt groups of one step.",
                fix=f"Use at most {self.prompts_per_step}.",
            )
        return Workload(**self.model_dump())


class IncidentInput(_Input):
    """One item of ``disturbance.incidents``."""

    at_s: float = Field(ge=0.0)
    worker: str
    joins: bool = False


class DisturbanceInput(_Input):
    """``disturbance``: noise and failures."""

    jitter: float = Field(default=0.0, ge=0.0, le=10.0)
    straggler_share: float = Field(default=0.0, ge=0.0, le=1.0)
    straggler_factor: float = Field(default=5.0, ge=1.0)
    overdue_factor: float = Field(default=3.0, gt=1.0)
    incidents: tuple[IncidentInput, ...] = ()
    seed: int = 0

    def disturbance(self) -> Disturbance:
        """As the executor wants it."""
        incidents = tuple(Incident(at_s=item.at_s, worker=WorkerId(item.worker), joins=item.joins) for item in self.incidents)
        return Disturbance(**self.model_dump(exclude={"incidents"}), incidents=incidents)


_Section = TypeVar("_Section", bound=_Input)


def section(cls: type[_Section], name: str, data: Mapping[str, Any], source: Source) -> _Section:
    """One section, validated. Raises ConfigError naming the first wrong key and where it stands."""
    given = data.get(name)
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        raise ConfigError(f"{name} must be a mapping of keys ({source.of((name,))}).", fix=f"Known are: {_known(cls)}.")
    try:
        return cls.model_validate(dict(given))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path: KeyPath = (name, *first["loc"])
        dotted, text = ".".join(map(str, path)), first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            close = difflib.get_close_matches(str(path[-1]), cls.model_fields, n=1)
            fix = f"Did you mean {name}.{close[0]}?" if close and len(path) == 2 else f"Known are: {_known(cls)}."
            raise ConfigError(f"{dotted} is not a known key ({source.of(path)}).", fix=fix) from None
        what = "is missing" if first["type"] == "missing" else f"cannot be {first['input']!r}: {text[0].lower()}{text[1:]}"
        raise ConfigError(f"{dotted} {what} ({source.of(path)}).", fix="Mend the value.") from None


def refuse_unknown_sections(data: Mapping[str, Any], known: tuple[str, ...], source: Source) -> None:
    """Raise ConfigError for a section that the source does not have."""
    for name in data:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            hint = f"Did you mean {close[0]}? " if close else ""
            raise ConfigError(
                f"{name} is not a known section ({source.of((name,))}).", fix=f"{hint}Known are: {', '.join(known)}."
            )


@contextmanager
def placed(source: Source) -> Iterator[None]:
    """Add to an error that begins with a key (``costs.generate[1] ...``) the line or the override that the key stands in."""
    try:
        yield
    except ConfigError as error:
        key = re.match(r"(costs|schedule|cluster|workload|disturbance)((?:\.\w+|\[\d+\])*)", error.what)
        if key is None:
            raise
        parts = re.findall(r"\w+", key[0])
        path = tuple(int(part) if part.isdecimal() else part for part in parts)
        whole = next((path[:length] for length in range(len(path), 0, -1) if path[:length] in source.overrides), path)
        place = source.of(whole)
        raise ConfigError(f"{error.what.rstrip('.')} ({place}).", why=error.why, fix=error.fix) from None


def as_plain(item: Any) -> dict[str, Any]:
    """A dataclass of this package as a section has it."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in dataclasses.asdict(item).items()}


def _known(cls: type[BaseModel]) -> str:
    return ", ".join(sorted(cls.model_fields))
