"""A run on a Ray cluster: session, placement and processes, loaded before anything of the run is written."""

from __future__ import annotations

import secrets
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ray
import torch
from ray import ObjectRef
from ray.util.placement_group import remove_placement_group

from digenrl.config.schema import Recipe
from digenrl.errors import ConfigError
from digenrl.ids import WorkerId
from digenrl.runtime.build import Start, build_ledger, evaluation_prompts, schedule_settings
from digenrl.runtime.checkpointer import Checkpointer
from digenrl.runtime.interrupt import Interrupt
from digenrl.runtime.journal import Journal
from digenrl.runtime.ledger import Ledger
from digenrl.runtime.ray.answers import ScoringHost
from digenrl.runtime.ray.distribution import BroadcastDistribution, Distribution, ObjectStoreDistribution
from digenrl.runtime.ray.executor import RayExecutor, RemoteTrajectory
from digenrl.runtime.ray.host import WorkerHost
from digenrl.runtime.ray.placement import DRIVER, POOL, TRAINER, ranks_of, reserve
from digenrl.runtime.ray.pool import Inbox, Process, WorkerPool, worker_exception
from digenrl.runtime.ray.session import RaySession
from digenrl.runtime.system import Run
from digenrl.scheduling.scheduler import Scheduler
from digenrl.scheduling.settings import SchedulerSettings


class RaySystem:
    """Everything of one run that lives on the cluster. Ended when ``stack`` is closed."""

    def __init__(self, recipe: Recipe, address: str | None, stack: ExitStack) -> None:
        self.recipe = recipe
        self.ledger: Ledger[ObjectRef[Any], RemoteTrajectory] = build_ledger(recipe)
        self.held_out = evaluation_prompts(recipe)
        here = recipe.cluster.scorers.placement == "driver" and recipe.cluster.placement == "disaggregated"
        self.local_scorer: ScoringHost | None = self._scorer_here() if here else None
        session = stack.enter_context(RaySession(address))
        gpus = bool(ray.cluster_resources().get("GPU", 0))
        cores = float(ray.cluster_resources().get("CPU", 0)) if address is None else None
        self._ranks = ranks_of(recipe, gpus=gpus, cores=cores)
        group = reserve(self._ranks, timeout_s=recipe.cluster.start_timeout_s, may_grow=address is not None)
        stack.callback(remove_placement_group, group)
        self.inbox = Inbox()
        self.pool = self._processes(group)
        stack.callback(self.pool.close)
        self.pool.start()
        session.watch_processes()

    @property
    def warnings(self) -> tuple[str, ...]:
        """See System.warnings."""
        return self.ledger.warnings

    def describe(self) -> str:
        """See System.describe."""
        trainer = self._trainer()[0].hello
        assert trainer is not None, "loaded"
        pools = ", ".join(f"{count} {kind}" for kind, count in self._kinds().items())
        return f"training {trainer.num_parameters:,} parameters on {trainer.device}; workers: {pools}"

    def settings(self, start: Start) -> SchedulerSettings:
        """See System.settings."""
        return schedule_settings(self.recipe, start, **self._workers())

    def begin(self, settings: SchedulerSettings, start: Start, journal: Journal, interrupt: Interrupt, checkpoints: Path) -> Run:
        """See System.begin. All workers hold the version that the run begins with when this returns."""
        self._check_shared(checkpoints)
        if start.checkpoint is not None:
            path = str(start.checkpoint.path)
            self._wait([self.pool.call(each, "restore", path)[0] for each in self._trainer()], "restoring")
        weights = self._distribution()
        if not settings.one_pool:
            version = settings.first_version
            publication: tuple[str, ...] = ("publish",)
            if settings.stale_claims:
                assert start.checkpoint is not None, "claims come from a checkpoint"
                version, publication = version - 1, ("publish_previous", str(start.checkpoint.path))
            weights.publish(version, *publication)
            self._wait([weights.load(each, version) for each in self._generators()], "loading weights")
        scheduler = Scheduler(settings)
        checkpointer = Checkpointer(checkpoints, self.recipe, scheduler, journal)
        return Run(scheduler=scheduler, executor=RayExecutor(self, settings, journal, interrupt, checkpointer, weights))

    def _processes(self, group: Any) -> WorkerPool:
        keeps = self.recipe.schedule.max_stale_fraction > 0
        return WorkerPool(self.recipe, self._ranks, group, self.inbox, keep_previous=keeps)

    def _scorer_here(self) -> ScoringHost:
        return WorkerHost(self.recipe, frozenset({"score"}), torch.device("cpu"), keep_previous=False)

    def _distribution(self) -> Distribution:
        if self.recipe.cluster.weight_transport == "broadcast":
            return BroadcastDistribution(self.pool, self._trainer(), self.inbox)
        return ObjectStoreDistribution(self.pool, self._trainer())

    def _workers(self) -> dict[str, Any]:
        """Who there is, for SchedulerSettings."""
        if self.recipe.cluster.placement == "colocated":
            return {"generators": (POOL,), "trainer": POOL, "update_after": "step"}
        names = list(dict.fromkeys(rank.worker for rank in self._ranks))
        generators = tuple(name for name in names if name.startswith("generator-"))
        scorers: tuple[WorkerId, ...] = tuple(name for name in names if name.startswith("scorer-"))
        if self.recipe.cluster.scorers.placement == "driver":
            scorers = (DRIVER,)
        scoring = "pool" if scorers else "generator"
        return {"generators": generators, "trainer": TRAINER, "scoring": scoring, "scorers": scorers}

    def _trainer(self) -> list[Process]:
        return [each for each in self.pool.all() if "train" in each.rank.roles]

    def _generators(self) -> list[Process]:
        return [each for each in self.pool.all() if "generate" in each.rank.roles and "train" not in each.rank.roles]

    def _kinds(self) -> dict[str, int]:
        kinds: dict[str, int] = {}
        for rank in self._ranks:
            kind = str(rank.worker).partition("-")[0]
            kinds[kind] = kinds.get(kind, 0) + 1
        return kinds

    def _check_shared(self, checkpoints: Path) -> None:
        """Raise ConfigError unless the trainer sees the run folder."""
        probe, token = checkpoints.parent / ".seen-by-the-trainer", secrets.token_hex(8)
        probe.write_text(token, encoding="utf-8")
        try:
            self._wait([self.pool.call(self._trainer()[0], "check_folder", str(probe.resolve()), token)[0]], "starting")
        finally:
            probe.unlink(missing_ok=True)

    def _wait(self, refs: list[ObjectRef[Any]], doing: str) -> None:
        for ref in refs:
            try:
                ray.get(ref, timeout=self.recipe.cluster.load_timeout_s)
            except ray.exceptions.RayError as error:
                raise worker_exception("a worker", doing, error) from error


def check_runnable(recipe: Recipe) -> None:
    """Raise ConfigError for what no cluster can run, before one is looked for."""
    if recipe.run.device.startswith("cuda:"):
        raise ConfigError(
            f"run.device: {recipe.run.device} names one GPU, and Ray gives every worker its own.",
            fix="Use run.device=cuda, or auto.",
        )
