"""A run whose workers are emulated: the real driver, scheduler, executor and Ray actors, one for every worker.

Invariants: what stands between a command and its event is what stands there in a real run, but for the work itself; an actor
takes next to nothing of the cluster, so that 64 of them fit on two cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from ray import ObjectRef

from digenrl.config.schema import Recipe
from digenrl.runtime.build import Start
from digenrl.runtime.emulated import EmulatedCosts, EmulatedHost, Emulation
from digenrl.runtime.ray.answers import ScoringHost
from digenrl.runtime.ray.distribution import Distribution
from digenrl.runtime.ray.emulated_actor import EmulatedActor
from digenrl.runtime.ray.placement import DRIVER, Rank
from digenrl.runtime.ray.pool import Inbox, Process, WorkerPool
from digenrl.runtime.ray.shell import as_actor
from digenrl.runtime.ray.system import RaySystem
from digenrl.scheduling.settings import SchedulerSettings

_KEPT_VERSIONS = 2


class EmulatedSystem(RaySystem):
    """See System."""

    def __init__(self, recipe: Recipe, emulation: Emulation, address: str | None, stack: ExitStack) -> None:
        self._emulation = emulation
        super().__init__(recipe, address, stack)

    def describe(self) -> str:
        """See System.describe."""
        pools = ", ".join(f"{count} {kind}" for kind, count in self._kinds().items())
        return f"emulated workers: {pools}; {self._emulation.costs.time_scale:g} s for a second of {self._emulation.preset}"

    def settings(self, start: Start) -> SchedulerSettings:
        """See System.settings."""
        return replace(super().settings(start), costs=self._emulation.known)

    def _processes(self, group: Any) -> WorkerPool:
        return _EmulatedPool(self.recipe, self._ranks, group, self.inbox, self._emulation.costs)

    def _scorer_here(self) -> ScoringHost:
        return EmulatedHost(self._emulation.costs.plan(DRIVER, 0))

    def _distribution(self) -> Distribution:
        return _EmulatedDistribution(self.pool, self._trainer()[0])


class _EmulatedPool(WorkerPool):
    """See WorkerPool."""

    actor = as_actor(EmulatedActor)

    def __init__(self, recipe: Recipe, ranks: Sequence[Rank], group: Any, inbox: Inbox, costs: EmulatedCosts) -> None:
        super().__init__(recipe, ranks, group, inbox, keep_previous=False)
        self._costs, self._updates = costs, recipe.updates_per_rollout

    def set_up(self, process: Process) -> ObjectRef[Any]:
        """See WorkerPool.set_up."""
        rank = process.rank
        plan = self._costs.plan(rank.worker, process.incarnation)
        turns = rank.roles == {"generate", "train"}
        ref: ObjectRef[Any] = process.actor.setup.remote(replace(plan, takes_turns=turns, updates_per_rollout=self._updates))
        return ref


@dataclass(frozen=True, slots=True)
class _Staged:
    manifest: ObjectRef[Any]
    buckets: tuple[ObjectRef[Any], ...]


class _EmulatedDistribution:
    """See Distribution. Publishing and loading take their time beside each other, as the simulator has it.

    The bytes, if any are asked for, lie in the object store before either begins.
    """

    def __init__(self, pool: WorkerPool, trainer: Process) -> None:
        self._pool = pool
        self._trainer = trainer
        self._versions: dict[int, _Staged] = {}

    def publish(self, version: int, method: str, *arguments: Any) -> ObjectRef[Any]:
        """See Distribution.publish."""
        assert self._trainer.hello is not None, "the trainer is up"
        count = 1 + self._trainer.hello.num_buckets
        manifest, *buckets = self._pool.call(self._trainer, "stage", num_returns=count)
        self._versions[version] = _Staged(manifest, tuple(buckets))
        for old in sorted(self._versions)[:-_KEPT_VERSIONS]:
            del self._versions[old]
        return self._pool.call(self._trainer, "publish")[0]

    def has(self, version: int) -> bool:
        """See Distribution.has."""
        return version in self._versions

    def load(self, process: Process, version: int) -> ObjectRef[Any]:
        """See Distribution.load."""
        staged = self._versions[version]
        return self._pool.call(process, "load", staged.manifest, *staged.buckets)[0]

    def give_up(self, process: Process, version: int) -> bool:
        """See Distribution.give_up."""
        del process, version
        return False
