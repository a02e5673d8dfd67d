"""Where the simulator's durations become those of emulated workers: of a recipe with ``cluster.emulate``, or of a schedule.

A recipe says who there is and how a step is cut: its cluster, schedule, prompts and samples. The preset says the rest of the
work (model, resolution, frames, denoising steps) and how long it takes on so many devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from digenrl.config.schema import EmulateSection, Recipe
from digenrl.errors import ConfigError
from digenrl.ids import WorkerId
from digenrl.runtime.emulated import Death, Durations, EmulatedCosts, Emulation, Scatter
from digenrl.runtime.ray.placement import DRIVER, POOL, TRAINER, ranks_of
from digenrl.scheduling.step_model import StepCosts
from digenrl.simulation.cost_model import CostModel
from digenrl.simulation.costs import SimulationCosts
from digenrl.simulation.modes import Layout, Options, pipelined, schedule_of
from digenrl.simulation.presets import preset

GENERATION_S = 0.5
"""Real seconds that a micro-batch is generated in where the recipe gives no time scale."""


def emulation_of(recipe: Recipe) -> Emulation | None:
    """What a recipe's ``cluster.emulate`` comes to; None without one.

    Raises ConfigError for a preset or a worker that is not there.
    """
    asked = recipe.cluster.emulate
    if asked is None:
        return None
    model = _at_recipe(preset(asked.preset).model, recipe)
    costs = _costs_of(recipe, model)
    durations = durations_of(_names(recipe), costs)
    _check_deaths(asked, durations)
    scale = asked.time_scale or GENERATION_S / min(costs.generate)
    known = asked.durations == "known" and recipe.cluster.placement == "disaggregated"
    return Emulation(
        preset=asked.preset,
        costs=EmulatedCosts(
            durations=durations,
            samples_per_micro_batch=recipe.groups_in_micro_batch * recipe.rollout.num_generations,
            time_scale=scale,
            scatter=Scatter(
                jitter=asked.jitter,
                straggler_share=asked.straggler_share,
                straggler_factor=asked.straggler_factor,
                seed=recipe.run.seed,
            ),
            deaths=tuple(Death(worker=WorkerId(each.worker), at_command=each.at_command) for each in asked.deaths),
            weight_bytes=asked.weight_bytes,
        ),
        known=_planned(costs, scale, recipe) if known else None,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Who there is."""

    generators: tuple[WorkerId, ...]
    trainer: WorkerId
    scorers: tuple[WorkerId, ...] = ()
    """Where it is not the generators that score."""


def durations_of(names: Names, costs: SimulationCosts) -> dict[WorkerId, Durations]:
    """Of every worker by name. In one pool that works in turn, trainer and generator are the same worker."""
    scorers = names.scorers or names.generators
    score = dict(zip(scorers, costs.score or (0.0,) * len(scorers), strict=True))
    generate = {names.trainer: costs.tag or 0.0, **dict(zip(names.generators, costs.generate, strict=True))}
    found = {}
    for name in dict.fromkeys((*names.generators, *names.scorers, names.trainer)):
        trains = name == names.trainer
        found[name] = Durations(
            encode=costs.encode if name in names.generators else 0.0,
            generate=generate.get(name, 0.0),
            score=score.get(name, 0.0),
            update=costs.update if trains else 0.0,
            switch_in=costs.switch_in if trains else 0.0,
            switch_out=costs.switch_out if trains else 0.0,
            optimizer=costs.optimizer if trains else 0.0,
            sync=costs.sync,
            save=costs.save if trains else 0.0,
        )
    return found


def _names(recipe: Recipe) -> Names:
    cluster = recipe.cluster
    if cluster.placement == "colocated":
        return Names(generators=(POOL,), trainer=POOL)
    workers = list(dict.fromkeys(rank.worker for rank in ranks_of(recipe, gpus=False)))
    scorers = tuple(name for name in workers if name.startswith("scorer-"))
    return Names(
        generators=tuple(name for name in workers if name.startswith("generator-")),
        trainer=TRAINER,
        scorers=(DRIVER,) if cluster.scorers.placement == "driver" else scorers,
    )


def _at_recipe(model: CostModel, recipe: Recipe) -> CostModel:
    """The preset's model with as many prompts and samples as the recipe has."""
    work = dataclasses.replace(
        model.workload,
        prompts_per_step=recipe.rollout.prompts_per_step,
        num_generations=recipe.rollout.num_generations,
        groups_per_micro_batch=recipe.groups_in_micro_batch,
    )
    return dataclasses.replace(model, workload=work)


def _costs_of(recipe: Recipe, model: CostModel) -> SimulationCosts:
    """Durations on the devices of the recipe's pools. Pairs are trained one by one where that is what it asks for."""
    cluster, groups, tsp = recipe.cluster, recipe.groups_in_micro_batch, recipe.train.timestep_batch_size != 1
    trainer, pools = cluster.trainer.ranks, cluster.generators
    if cluster.placement == "colocated":
        layout = Layout(replicas=1, ranks=trainer, trainer_ranks=0, groups_per_micro_batch=groups)
        return schedule_of("colocated+tsp" if tsp else "colocated", model, layout).costs
    layout = Layout(replicas=1, ranks=pools[0].ranks, trainer_ranks=trainer, groups_per_micro_batch=groups)
    costs = pipelined(model, layout, Options(), tsp=tsp, tag="never", max_stale_fraction=0.0).costs
    ranks = [pool.ranks for pool in pools for _ in range(pool.replicas)]
    score = [model.score(groups, n, "generators") for n in ranks]
    if cluster.scorers.placement != "generator":
        count = cluster.scorers.replicas if cluster.scorers.placement == "pool" else 1
        score = [model.score(groups, 1, "generators")] * count
    generate = tuple(model.generate(groups, n, "generators") for n in ranks)
    return dataclasses.replace(costs, generate=generate, score=tuple(score))


def _planned(costs: SimulationCosts, scale: float, recipe: Recipe) -> StepCosts:
    """What the searches look at: generators and trainer, in real time."""
    pool = recipe.cluster.scorers.placement != "generator"
    once = ("update", "tag", "switch_in", "switch_out", "encode", "optimizer", "sync")
    changes = {name: scale * (getattr(costs, name) or 0.0) for name in once}
    generate = tuple(scale * seconds for seconds in costs.generate)
    score = None if costs.score is None or pool else tuple(scale * seconds for seconds in costs.score)
    return dataclasses.replace(costs, generate=generate, score=score, **changes).step_costs()


def _check_deaths(asked: EmulateSection, durations: Mapping[WorkerId, Durations]) -> None:
    names = [name for name in durations if name != DRIVER]
    for number, death in enumerate(asked.deaths):
        if death.worker not in names:
            raise ConfigError(
                f"cluster.emulate.deaths.{number}.worker: there is no worker {death.worker!r}.",
                fix=f"The workers are: {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}.",
            )
