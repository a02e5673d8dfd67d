"""From what a user names to a simulation: a preset, a costs file, the trace of a run, or a recipe, with overrides.

A costs file is YAML. Only ``costs`` and ``schedule.micro_batches`` are required; times are seconds::

    costs:                      # keys of SimulationCosts, of one micro-batch
      generate: [10.0, 12.5]    # by generator replica; one number stands for cluster.replicas equal ones
      score: 0.5                # by replica, or one number for all; left out: generation includes scoring
      update: 3.0
      tag: 10.0                 # generation by the trainer; left out: it cannot
      switch_in: 0.5            # trainer to generation, and switch_out back
      encode: 0.1               # once a step, as optimizer, sync and evaluate
    schedule:                   # all keys: sections.ScheduleInput
      steps: 8
      micro_batches: 12
      tag: bts_plus             # never, static (with tag_static), greedy, bts, bts_plus
      max_stale_fraction: 0.25
      mode: tcss                # instead of tag and staleness: one of modes.MODES
    cluster: {ranks: 4, trainer_ranks: 8}    # devices of one replica and of the trainer, for `digenrl plan`
    disturbance:
      jitter: 0.1               # coefficient of variation
      straggler_share: 0.01
      straggler_factor: 5
      seed: 0
      incidents: [{at_s: 100, worker: generator-1}, {at_s: 160, worker: generator-1, joins: true}]

Workers are called ``generator-0``, ``scorer-0`` and so on, and ``trainer``. Presets also have a ``workload`` section.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from digenrl.config.builtin_recipes import builtin_recipes
from digenrl.config.loader import recipe_from_plain
from digenrl.config.retyped import leave_out_keys_of_old_types
from digenrl.config.schema import Recipe, ScheduleSection
from digenrl.config.source import Source, apply_override, parse_yaml
from digenrl.config.text import read_text
from digenrl.errors import ConfigError
from digenrl.scheduling.settings import SchedulerSettings
from digenrl.simulation import sections
from digenrl.simulation.assembly import checked, costs_of, generators_of, mapping_of, settings_of
from digenrl.simulation.costs import SimulationCosts
from digenrl.simulation.executor import Disturbance
from digenrl.simulation.measured import costs_of_trace, model_of_costs, model_of_recipe
from digenrl.simulation.modes import Layout, Mode, Options, Schedule, StageModel, schedule_of
from digenrl.simulation.presets import Preset, preset
from digenrl.simulation.run import check_fit
from digenrl.trace.record import read_trace

_SECTIONS = ("costs", "schedule", "cluster", "disturbance")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Everything that a simulation or a plan starts from."""

    settings: SchedulerSettings
    costs: SimulationCosts
    label: str
    """What it is and where its durations come from, in words."""
    disturbance: Disturbance
    model: StageModel
    """What a step would cost with other devices."""
    layout: Layout
    mode: Mode | None = None
    """Where the schedule is one of the execution modes."""
    preset: Preset | None = None
    recipe: Recipe | None = None
    """Where it is one."""
    notes: tuple[str, ...] = ()
    """What the overrides have done beyond their own keys."""

    @property
    def samples_per_step(self) -> int | None:
        """Samples of one RL step, where they are known."""
        each = self.model.samples_per_group
        return None if each is None else each * self.model.groups


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draft:
    """A source whose schedule still lacks what the user says about it."""

    label: str
    data: Mapping[str, Any]
    source: Source
    asked: sections.ScheduleInput
    base: Schedule
    model: StageModel
    layout: Layout
    preset: Preset | None = None


def load_source(name: str, overrides: Sequence[str] = (), *, steps: int | None = None) -> Loaded:
    """The simulation that ``name`` and the overrides describe. Raises ConfigError naming the field, and the line of a file."""
    if steps is not None:
        overrides = [*overrides, f"schedule.steps={steps}"]
    if os.path.isfile(name):
        return _from_file(name, overrides)
    if name in builtin_recipes():
        return _from_file(str(builtin_recipes()[name]), overrides)
    if os.path.isdir(name) or os.sep in name or Path(name).suffix in {".yaml", ".yml", ".jsonl"}:
        raise ConfigError(
            f"There is no file {name!r}.",
            why="A source is a preset, a costs file, the trace.jsonl of a run, or a recipe.",
            fix="Name an existing file; of a run folder, its trace.jsonl.",
        )
    return _from_preset(preset(name), overrides)


def _from_file(name: str, overrides: Sequence[str]) -> Loaded:
    text = read_text(Path(name))
    if name.endswith(".jsonl") or text.startswith("{"):
        return _from_trace(name, overrides)
    source = Source(file=name)
    data = parse_yaml(text, source)
    if "costs" in data or not {"model", "rollout", "train"} & set(data):
        return _from_costs(f"costs file {name}", data, source, overrides)
    return _from_recipe(name, data, source, overrides)


def _from_preset(found: Preset, overrides: Sequence[str]) -> Loaded:
    source = Source(file=f"preset {found.name}")
    cluster = {key: getattr(found.layout, key) for key in sections.ClusterInput.model_fields}
    data: dict[str, Any] = {"workload": sections.as_plain(found.model.workload), "cluster": cluster, "schedule": {"mode": "tcss"}}
    for override in overrides:
        apply_override(data, override, source)
    sections.refuse_unknown_sections(data, (*_SECTIONS, "workload"), source)
    sizes = sections.section(sections.WorkloadInput, "workload", data, source)
    with sections.placed(source):
        work = sizes.workload()
    layout = sections.section(sections.ClusterInput, "cluster", data, source).layout(work.groups_per_micro_batch)
    model = dataclasses.replace(found.model, workload=work)
    return _of_model(f"preset {found.name}: {found.description}", data, source, model, layout, found)


def _from_recipe(name: str, data: dict[str, Any], source: Source, overrides: Sequence[str]) -> Loaded:
    """A recipe on the devices of its ``cluster.placement``: one worker in turn, all devices in turn, or its pools."""
    written, ours = copy.deepcopy(data), dict[str, Any]()
    for override in overrides:
        head, _, rest = override.partition("=")[0].partition(".")
        for_recipe = rest in ScheduleSection.model_fields if head == "schedule" else head not in ("costs", "disturbance")
        apply_override(data if for_recipe else ours, override, source)
    notes = tuple(leave_out_keys_of_old_types(written, data, source))
    recipe = recipe_from_plain(data, source)
    sections.section(sections.ScheduleInput, "schedule", ours, source)
    placement = recipe.cluster.placement
    usual = "tcss" if placement == "disaggregated" else "colocated+tsp"
    asked: dict[str, Any] = {"mode": usual, **(ours.get("schedule") or {})}
    one_pool = str(asked["mode"]).startswith("colocated")
    layout = _layout_in_turn(recipe) if one_pool and placement != "disaggregated" else _layout_of(recipe)
    where = "one worker that does" if layout.devices == 1 else f"{layout.devices} devices that do"
    where = f"{where} everything in turn" if one_pool else f"{layout.devices} devices"
    label = f"recipe {name} on {where}, with default durations of the shipped tiny model on CPU cores (not measured in a run)"
    data = {**ours, "schedule": _schedule_of(recipe, asked["mode"]) | asked}
    return dataclasses.replace(_of_model(label, data, source, model_of_recipe(recipe), layout), recipe=recipe, notes=notes)


def _layout_in_turn(recipe: Recipe) -> Layout:
    """Devices that generate and then train, as `digenrl train` takes them: one process, or all ranks of the trainer."""
    ranks = recipe.cluster.trainer.ranks if recipe.cluster.placement == "colocated" else 1
    return Layout(replicas=1, ranks=ranks, trainer_ranks=0, groups_per_micro_batch=recipe.groups_in_micro_batch)


def _layout_of(recipe: Recipe) -> Layout:
    """The pools of a recipe's ``cluster``. Raises ConfigError for pools of unlike replicas, which have unlike durations."""
    groups, pools = recipe.groups_in_micro_batch, recipe.cluster.generators
    if len({pool.ranks for pool in pools}) > 1:
        raise ConfigError(
            "cluster.generators has pools of unlike replicas, whose durations a recipe does not say.",
            fix="Give their durations in a costs file: costs.generate takes one for each replica.",
        )
    return Layout(
        replicas=sum(pool.replicas for pool in pools),
        ranks=pools[0].ranks,
        trainer_ranks=recipe.cluster.trainer.ranks,
        groups_per_micro_batch=groups,
    )


def _schedule_of(recipe: Recipe, mode: Any) -> dict[str, Any]:
    """What the recipe says about its schedule, as far as the mode leaves it open, in the words of ``schedule`` here."""
    known = set(sections.ScheduleInput.model_fields)
    if mode not in ("tag", "tcss"):
        known -= {"tag", "tag_static", "max_stale_fraction"}
    if str(mode).startswith("colocated") and recipe.cluster.placement != "inline":
        known -= {"update_after"}  # devices that take turns generate a whole step before they train
    plain = {key: value for key, value in recipe.schedule.model_dump().items() if key in known}
    if "tag" in known:
        plain["tag"] = recipe.tag
    plain["updates_per_rollout"] = recipe.updates_per_rollout
    return {**plain, "update_order": recipe.update_order, "steps": max(1, recipe.train.steps)}


def _from_trace(name: str, overrides: Sequence[str]) -> Loaded:
    trace = read_trace(Path(name))
    schedule = {"steps": max(1, trace.settings.steps), "micro_batches": trace.settings.micro_batches}
    data = {"costs": sections.as_plain(costs_of_trace(trace, name)), "schedule": schedule}
    made = f"{trace.made} run".strip()
    label = f"trace {name} of {'an' if made.startswith('e') else 'a'} {made}, with robust means of the durations in it"
    return _from_costs(label, data, Source(file=name), overrides, trace.settings)


def _from_costs(
    label: str, data: dict[str, Any], source: Source, overrides: Sequence[str], recorded: SchedulerSettings | None = None
) -> Loaded:
    for override in overrides:
        apply_override(data, override, source)
    sections.refuse_unknown_sections(data, _SECTIONS, source)
    asked = sections.section(sections.ScheduleInput, "schedule", data, source)
    cluster = sections.section(sections.ClusterInput, "cluster", data, source)
    with sections.placed(source):
        costs = costs_of(data.get("costs"), asked.scoring, cluster.replicas if cluster.model_fields_set else None)
        base = Schedule(settings=settings_of(asked, costs, recorded), costs=costs)
        check_fit(base.settings, costs)
    layout = cluster.model_copy(update={"replicas": len(costs.generate)}).layout(1)
    model = model_of_costs(
        costs,
        base.settings.micro_batches,
        layout,
        samples_per_micro_batch=asked.samples_per_micro_batch,
        tsp_factor=asked.tsp_factor,
    )
    if asked.mode is not None:
        schedule = {key: value for key, value in data["schedule"].items() if key != "micro_batches"}
        return _of_model(label, {**data, "costs": None, "schedule": schedule}, source, model, layout)
    layout = dataclasses.replace(layout, trainer_ranks=0) if base.settings.one_pool else layout
    return _finish(_Draft(label=label, data=data, source=source, asked=asked, base=base, model=model, layout=layout))


def _of_model(
    label: str, data: dict[str, Any], source: Source, model: StageModel, layout: Layout, found: Preset | None = None
) -> Loaded:
    """The mode that is asked for, with the user's other keys on top."""
    asked = sections.section(sections.ScheduleInput, "schedule", data, source)
    assert asked.mode is not None, "a source with a cost model has a mode"
    if asked.micro_batches is not None:
        raise ConfigError(
            f"schedule.micro_batches cannot be given here ({source.of(('schedule', 'micro_batches'))}).",
            why="It is the prompts of a step over the groups of a micro-batch.",
            fix="Change prompts_per_step or groups_per_micro_batch.",
        )
    with sections.placed(source):
        base = schedule_of(asked.mode, model, layout, Options(steps=asked.steps))
        plain = sections.as_plain(base.costs) | mapping_of(data.get("costs"))
        costs = costs_of(plain, asked.scoring, len(base.costs.generate))
    return _finish(
        _Draft(
            label=label,
            data=data,
            source=source,
            asked=asked,
            base=Schedule(settings=base.settings, costs=costs),
            model=model,
            layout=layout,
            preset=found,
        )
    )


def _finish(draft: _Draft) -> Loaded:
    asked, costs, base = draft.asked, draft.base.costs, draft.base.settings
    disturbance = sections.section(sections.DisturbanceInput, "disturbance", draft.data, draft.source).disturbance()
    scatter = disturbance.jitter or disturbance.straggler_share
    known = asked.durations == "known" or (asked.durations == "auto" and not scatter)
    planned = costs.step_costs()
    if base.scoring == "pool":  # the searches look at generators and trainer alone
        planned = dataclasses.replace(planned, score=None)
    with sections.placed(draft.source):
        settings = checked(
            lambda: dataclasses.replace(
                base,
                **asked.changes(),
                generators=generators_of(base, len(costs.generate)),
                partial_last=costs.last_share < 1,
                costs=planned if known and not base.one_pool else None,
            )
        )
        check_fit(settings, costs, disturbance)
    return Loaded(
        settings=settings,
        costs=costs,
        label=draft.label,
        disturbance=disturbance,
        model=draft.model,
        layout=draft.layout,
        mode=asked.mode,
        preset=draft.preset,
    )
