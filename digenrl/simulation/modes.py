"""The ways to run a step, as settings and costs of one scheduler. No mode has code of its own in the scheduler or simulator.

From mode to mode of the ladder naive, gap, tsp, tag, tcss exactly one thing changes, which is the paper's ablation.
Where an execution differs only in how work is cut (naive, batch_axis), it is the cost and the number of micro-batches that
differ; where it differs in who may do what (colocated, tag, tcss), it is a setting.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from digenrl.ids import WorkerId
from digenrl.scheduling.settings import SchedulerSettings, TagPolicy
from digenrl.simulation.cost_model import Pool
from digenrl.simulation.costs import SimulationCosts

Mode = Literal["colocated", "colocated+tsp", "naive", "batch_axis", "gap", "tsp", "tag", "tcss"]
MODES: tuple[Mode, ...] = get_args(Mode)
TRAINER, ONE_POOL = WorkerId("trainer"), WorkerId("pool")


class StageModel(Protocol):
    """Seconds that each kind of work takes on n devices; see CostModel, which is one, for what the methods mean."""

    @property
    def groups(self) -> int:
        """Prompt groups of one step, or the smallest micro-batches that were measured."""
        ...

    @property
    def samples_per_group(self) -> int | None:
        """Samples of one group; None where it is not known."""
        ...

    @property
    def mixed(self) -> bool:
        """Whether generators and trainer are different kinds of device."""
        ...

    def generate(self, groups: int, ranks: int, pool: Pool) -> float:
        """All denoising steps of some groups."""
        ...

    def score(self, groups: int, ranks: int, pool: Pool) -> float | None:
        """Decoding and rewards of some groups; None where generation includes them."""
        ...

    def update(self, groups: int, ranks: int, pool: Pool, *, tsp: bool) -> float:
        """Forward and backward passes of some groups."""
        ...

    def switch(self, ranks: int) -> tuple[float, float]:
        """The trainer from training to generation, and back."""
        ...

    def optimizer(self, ranks: int, pool: Pool) -> float:
        """One optimizer step."""
        ...

    def sync(self) -> float:
        """Publishing or loading a version."""
        ...

    def encode(self, ranks: int, pool: Pool) -> float:
        """Text encoding of a step."""
        ...

    def fits(self, pool: Pool, ranks: int, *, tag: bool = False) -> bool:
        """Whether the devices have the memory for it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How devices are shared out, and how a step is cut."""

    replicas: int
    """Generator replicas."""
    ranks: int
    """Devices of one replica."""
    trainer_ranks: int
    groups_per_micro_batch: int

    @property
    def devices(self) -> int:
        """All of them."""
        return self.replicas * self.ranks + self.trainer_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is the same in all modes that are compared."""

    steps: int = 8
    max_stale_fraction: float = 0.25
    """Of ``tcss``."""
    tag: TagPolicy = "bts_plus"
    """Of ``tag`` and ``tcss``."""
    update_order: Literal["arrival", "index"] = "arrival"
    update_after: Literal["group", "step"] = "group"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What a simulation needs."""

    settings: SchedulerSettings
    costs: SimulationCosts


def schedule_of(mode: Mode, model: StageModel, layout: Layout, options: Options | None = None) -> Schedule:
    """The settings and costs of one mode."""
    options = options or Options()
    if mode in ("colocated", "colocated+tsp"):
        return _colocated(model, layout, options, tsp=mode == "colocated+tsp")
    if mode == "naive":
        return _naive(model, layout, options)
    if mode == "batch_axis":
        return _batch_axis(model, layout, options)
    tag: TagPolicy = options.tag if mode in ("tag", "tcss") else "never"
    stale = options.max_stale_fraction if mode == "tcss" else 0.0
    return pipelined(model, layout, options, tsp=mode != "gap", tag=tag, max_stale_fraction=stale)


def pipelined(
    model: StageModel, layout: Layout, options: Options, *, tsp: bool, tag: TagPolicy, max_stale_fraction: float
) -> Schedule:
    """Two pools, micro-batches of whole prompt groups whose samples are spread over a replica's ranks (GAP).

    ``gap``: the trainer works on a micro-batch as soon as it is scored, while the next ones are generated.
    ``tsp``: the same, and the trained denoising steps of a sample share one pass (TSP).
    ``tag``: the same, and the trainer generates while it has nothing to update (TAG).
    ``tcss``: the same, and generators that have nothing left of this step begin the next one with the weights that they have,
    for a bounded share of its micro-batches (TCSS).
    """
    groups = layout.groups_per_micro_batch
    count, share = cut(model.groups, groups)
    switch_in, switch_out = model.switch(layout.trainer_ranks)
    costs = SimulationCosts(
        generate=(model.generate(groups, layout.ranks, "generators"),) * layout.replicas,
        score=_on_each(model.score(groups, layout.ranks, "generators"), layout.replicas),
        update=model.update(groups, layout.trainer_ranks, "trainer", tsp=tsp),
        tag=model.generate(groups, layout.trainer_ranks, "trainer"),
        switch_in=switch_in,
        switch_out=switch_out,
        last_share=share,
        **_once(model, layout),
    )
    return _two_pools(costs, count, options, tag=tag, max_stale_fraction=max_stale_fraction)


def _colocated(model: StageModel, layout: Layout, options: Options, *, tsp: bool) -> Schedule:
    """Every device in both roles: all generate and score the whole step, then all train on it.

    One worker in the scheduler's sense, which does everything in turn: micro-batches are only a way to write its work down, so
    ``update_after`` is ``step`` and a micro-batch costs its share of the whole step, in which the samples are spread over all
    devices at once (no rounding per micro-batch: the best that a colocated system can do). Its weights need no sync, but
    the pool turns from training to generation and back once a step, as a trainer does for TAG; that stands in ``sync``.
    ``colocated`` trains pair by pair, as the paper's baseline does; with TSP it is the fairer one.
    """
    devices = layout.devices
    count, share = cut(model.groups, layout.groups_per_micro_batch)
    whole = count - 1 + share
    score = model.score(model.groups, devices, "all")
    costs = SimulationCosts(
        generate=(model.generate(model.groups, devices, "all") / whole,),
        score=None if score is None else (score / whole,),
        update=model.update(model.groups, devices, "all", tsp=tsp) / whole,
        encode=model.encode(devices, "all"),
        optimizer=model.optimizer(devices, "all"),
        sync=model.sync(),
        last_share=share,
    )
    settings = SchedulerSettings(
        steps=options.steps,
        micro_batches=count,
        generators=(ONE_POOL,),
        trainer=ONE_POOL,
        scoring="generator" if costs.score is not None else "inline",
        update_order=options.update_order,
        update_after="step",
        partial_last=share < 1,
    )
    return Schedule(settings=settings, costs=costs)


def _naive(model: StageModel, layout: Layout, options: Options) -> Schedule:
    """Two pools that wait for one another: the whole step is one micro-batch, generated by all generators as one replica.

    No overlap is possible with one micro-batch, and there is no TSP: this is the paper's 1.
    """
    ranks = layout.replicas * layout.ranks
    costs = SimulationCosts(
        generate=(model.generate(model.groups, ranks, "generators"),),
        score=_on_each(model.score(model.groups, ranks, "generators"), 1),
        update=model.update(model.groups, layout.trainer_ranks, "trainer", tsp=False),
        **_once(model, layout),
    )
    return _two_pools(costs, 1, options)


def _batch_axis(model: StageModel, layout: Layout, options: Options) -> Schedule:
    """A pipeline whose micro-batches are cut along the batch axis: each rank of a replica takes another prompt.

    A micro-batch is then as many prompt groups as there are ranks and lasts as long as all samples of one prompt on one
    rank: few, long micro-batches, and so a long wait for the first one. No TSP.
    """
    groups = min(layout.ranks, model.groups)
    count, share = cut(model.groups, groups)
    costs = SimulationCosts(
        generate=(model.generate(1, 1, "generators"),) * layout.replicas,
        score=_on_each(model.score(1, 1, "generators"), layout.replicas),
        update=model.update(groups, layout.trainer_ranks, "trainer", tsp=False),
        last_share=share,
        **_once(model, layout),
    )
    return _two_pools(costs, count, options)


def cut(groups: int, per_micro_batch: int) -> tuple[int, float]:
    """Micro-batches of a step, and the last one's size as a share of a full one."""
    count = math.ceil(groups / per_micro_batch)
    return count, (groups - (count - 1) * per_micro_batch) / per_micro_batch


def _once(model: StageModel, layout: Layout) -> dict[str, float]:
    """What happens once a step with two pools."""
    return {
        "encode": model.encode(layout.ranks, "generators"),
        "optimizer": model.optimizer(layout.trainer_ranks, "trainer"),
        "sync": model.sync(),
    }


def _on_each(seconds: float | None, replicas: int) -> tuple[float, ...] | None:
    return None if seconds is None else (seconds,) * replicas


def _two_pools(
    costs: SimulationCosts, micro_batches: int, options: Options, *, tag: TagPolicy = "never", max_stale_fraction: float = 0.0
) -> Schedule:
    settings = SchedulerSettings(
        steps=options.steps,
        micro_batches=micro_batches,
        generators=tuple(WorkerId(f"generator-{index}") for index in range(len(costs.generate))),
        trainer=TRAINER,
        scoring="generator" if costs.score is not None else "inline",
        update_order=options.update_order,
        update_after=options.update_after,
        tag=tag,
        max_stale_fraction=max_stale_fraction,
        costs=costs.step_costs(),
        partial_last=costs.last_share < 1,
    )
    return Schedule(settings=settings, costs=costs)
