"""From the sections that a user writes to the settings and costs that the simulator takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from digenrl.errors import ConfigError
from digenrl.ids import WorkerId
from digenrl.scheduling.settings import SchedulerSettings
from digenrl.simulation import sections
from digenrl.simulation.costs import SimulationCosts
from digenrl.simulation.modes import TRAINER


def settings_of(
    asked: sections.ScheduleInput, costs: SimulationCosts, recorded: SchedulerSettings | None = None
) -> SchedulerSettings:
    """The settings of a costs file, or of a recorded run with what is asked for changed in them."""
    changes, count = asked.changes(), len(costs.generate)
    if recorded is not None:
        scoring = "inline" if costs.score is None else recorded.scoring
        changes = {"scoring": scoring, "scorers": recorded.scorers if scoring == "pool" else (), **changes}
        if asked.steps <= recorded.first_version:
            raise ConfigError(
                f"schedule.steps ({asked.steps}) leaves nothing to simulate: the trace begins at step {recorded.first_version}.",
                why="It is the record of a run that went on, and steps are counted from the run's first beginning.",
                fix=f"Use at least {recorded.first_version + 1}, or the trace of the run's first process.",
            )
        for name in ("evaluate_at", "save_at"):
            changes[name] = tuple(version for version in getattr(recorded, name) if version <= asked.steps)
        changes |= {"generators": generators_of(recorded, count), "costs": None}
        return checked(lambda: dataclasses.replace(recorded, steps=asked.steps, **changes))
    if "micro_batches" not in changes:
        raise ConfigError("schedule.micro_batches is missing.", fix="Give the number of micro-batches of one step.")
    changes.setdefault("scoring", "inline" if costs.score is None else "generator")
    changes.setdefault("tag", "never" if costs.tag is None else "bts_plus")
    if changes["scoring"] == "pool":
        changes["scorers"] = _names("scorer", len(costs.score or ()))
    generators = _names("generator", count)
    return checked(lambda: SchedulerSettings(steps=asked.steps, generators=generators, trainer=TRAINER, **changes))


def costs_of(given: Any, scoring: str | None, replicas: int | None) -> SimulationCosts:
    """``costs``, in which one number stands for all replicas; there are as many as durations where ``replicas`` is None."""
    plain = mapping_of(given)
    for key, value in plain.items():
        if isinstance(value, bool):
            raise ConfigError(f"costs.{key} cannot be {str(value).lower()}.", fix="Give a number of seconds.")
    generate = plain.get("generate")
    if isinstance(generate, list) and replicas not in (None, len(generate)):
        raise ConfigError(
            f"cluster.replicas ({replicas}) differs from the {len(generate)} durations of costs.generate.",
            fix="Give one of the two, or one number for all replicas.",
        )
    count = len(generate) if isinstance(generate, list) else replicas or 1
    if generate is not None and not isinstance(generate, list):
        plain["generate"] = [generate] * count
    if plain.get("score") is not None and not isinstance(plain["score"], list):
        plain["score"] = [plain["score"]] * (1 if scoring == "pool" else count)
    return SimulationCosts.from_plain(plain)


def mapping_of(given: Any) -> dict[str, Any]:
    """``costs`` as a mapping."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"costs cannot be {given!r}.", fix="It is a mapping: at least generate and update, in seconds.")
    return dict(given)


def checked(make: Callable[[], SchedulerSettings]) -> SchedulerSettings:
    """The settings that ``make`` makes, with what it refuses as a ConfigError; its messages begin with the field."""
    try:
        return make()
    except ValueError as error:
        raise ConfigError(f"schedule.{error}.", fix="Mend the value.") from error


def generators_of(settings: SchedulerSettings, count: int) -> tuple[WorkerId, ...]:
    """Names of so many generators; the present ones where there are as many."""
    same = settings.one_pool or len(settings.generators) == count
    return settings.generators if same else _names("generator", count)


def _names(kind: str, count: int) -> tuple[WorkerId, ...]:
    return tuple(WorkerId(f"{kind}-{index}") for index in range(count))
