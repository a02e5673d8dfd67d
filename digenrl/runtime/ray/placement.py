"""Who runs where: the ranks of a recipe's pools as bundles of one placement group, and what is missing when they do not fit.

Ray itself waits without a word for resources that no node has; here every wait has a deadline and says what it waits for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from digenrl.config.schema import Recipe, Resources
from digenrl.errors import ConfigError
from digenrl.ids import WorkerId

if TYPE_CHECKING:
    from digenrl.runtime.build import Role  # which loads torch, and `digenrl check` says who does what without it

POOL, TRAINER, DRIVER = WorkerId("pool"), WorkerId("trainer"), WorkerId("driver")


@dataclass(frozen=True, slots=True, kw_only=True)
class Crew:
    """What the ranks of one worker have in common that meet in a group, and so live and die together."""

    size: int
    shard: int
    """Neighbouring ranks that hold one network together."""
    timeout_s: float
    """Longest wait of one for another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One worker process."""

    worker: WorkerId
    """The worker, in the scheduler's sense, that it is a rank of."""
    index: int
    """Which of its ranks."""
    roles: frozenset[Role]
    resources: Mapping[str, float]
    """CPU, GPU and custom resources."""
    labels: Mapping[str, str]
    """Labels that its node must have."""
    where: str
    """Key of the recipe that its resources come from."""
    crew: Crew | None = None
    """None where it works without the others of its worker."""

    @property
    def shard(self) -> int:
        """Neighbouring ranks that hold one network together with it, itself among them."""
        return self.crew.shard if self.crew is not None else 1

    @property
    def name(self) -> str:
        """For people: ``generator-0``, or ``generator-0.1`` where a worker has several ranks."""
        return f"{self.worker}.{self.index}" if self.index else str(self.worker)


_EMULATED_CORES = 0.01
"""That an emulated worker takes: it sleeps."""
_SMALLEST_SHARE = 0.25
"""Of a core, that a rank gets which does not ask for a number of them."""


def ranks_of(recipe: Recipe, *, gpus: bool, cores: float | None = None) -> list[Rank]:
    """All worker processes of a recipe, generators first, the trainer last.

    gpus: whether the cluster has any. cores: how many there are to share out on a private cluster; None on others, where
    every rank that does not say otherwise takes one.
    """
    ranks = _ranks(recipe, gpus=gpus)
    if recipe.cluster.emulate is not None:
        return [_emulated(rank) for rank in ranks if rank.index == 0]
    silent = [rank for rank in ranks if rank.resources["CPU"] is None]
    share = 1.0
    if cores is not None and silent:
        rest = cores - sum(rank.resources["CPU"] or 0.0 for rank in ranks)
        equal = math.floor(100 * rest / len(silent)) / 100  # rounded up, they would not fit
        share = min(1.0, equal) if equal >= _SMALLEST_SHARE else 1.0
    return [_settled(rank, share) for rank in ranks]


def _settled(rank: _Draft, share: float) -> Rank:
    """A rank that takes ``share`` of a core where it does not say otherwise."""
    wanted = {name: share if amount is None else amount for name, amount in rank.resources.items()}
    resources = {name: amount for name, amount in wanted.items() if amount}
    return Rank(
        worker=rank.worker,
        index=rank.index,
        roles=rank.roles,
        resources=resources,
        labels=rank.labels,
        where=rank.where,
        crew=rank.crew,
    )


def _emulated(rank: _Draft) -> Rank:
    """A process that sleeps in place of all ranks of a worker, wherever there is room."""
    resources = {"CPU": _EMULATED_CORES}
    return Rank(worker=rank.worker, index=0, roles=rank.roles, resources=resources, labels={}, where="cluster.emulate")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draft:
    """A rank before the cores are shared out; fields as Rank's."""

    worker: WorkerId
    index: int
    roles: frozenset[Role]
    resources: Mapping[str, float | None]
    labels: Mapping[str, str]
    where: str
    crew: Crew | None


@dataclass(frozen=True, slots=True)
class _Section:
    """What all ranks of a section of the recipe have in common. where: the section's key."""

    where: str
    resources: Resources
    crew: Crew | None


def _ranks(recipe: Recipe, *, gpus: bool) -> list[_Draft]:
    cluster, trainer = recipe.cluster, recipe.cluster.trainer
    crew = Crew(size=trainer.ranks, shard=trainer.shard_size, timeout_s=trainer.timeout_s) if trainer.ranks > 1 else None
    trains = _Section("cluster.trainer", trainer.resources, crew)
    if cluster.placement == "colocated":
        everything: frozenset[Role] = frozenset({"encode", "generate", "score", "train"})
        # As in a replica, one rank encodes.
        roles_of = [everything, *[everything - {"encode"}] * (trainer.ranks - 1)]
        return [_rank(POOL, i, roles, trains, recipe, gpus=gpus) for i, roles in enumerate(roles_of)]
    ranks: list[_Draft] = []
    scores: tuple[Role, ...] = ("score",) if cluster.scorers.placement == "generator" else ()
    replica = 0
    for number, pool in enumerate(cluster.generators):
        crew = Crew(size=pool.ranks, shard=pool.shard, timeout_s=pool.timeout_s) if pool.shard > 1 else None
        section = _Section(f"cluster.generators.{number}", pool.resources, crew)
        for _ in range(pool.replicas):
            for index in range(pool.ranks):
                # One rank of a replica encodes: conditioning is the same whoever makes it, and text encoders are large.
                encodes: tuple[Role, ...] = ("encode",) if index == 0 else ()
                roles: frozenset[Role] = frozenset({"generate", *scores, *encodes})
                ranks.append(_rank(WorkerId(f"generator-{replica}"), index, roles, section, recipe, gpus=gpus))
            replica += 1
    if cluster.scorers.placement == "pool":
        section = _Section("cluster.scorers", cluster.scorers.resources, None)
        for number in range(cluster.scorers.replicas):
            ranks.append(_rank(WorkerId(f"scorer-{number}"), 0, frozenset({"score"}), section, recipe, gpus=gpus))
    for index in range(trainer.ranks):
        ranks.append(_rank(TRAINER, index, frozenset({"generate", "train"}), trains, recipe, gpus=gpus))
    return ranks


def _rank(worker: WorkerId, index: int, roles: frozenset[Role], section: _Section, recipe: Recipe, *, gpus: bool) -> _Draft:
    resources = section.resources
    per_rank = resources.gpus
    if per_rank is None:
        per_rank = 0.0 if recipe.run.device == "cpu" or not (gpus or recipe.run.device == "cuda") else 1.0
    wanted = {"CPU": resources.cpus, "GPU": per_rank, **resources.custom}
    return _Draft(
        worker=worker,
        index=index,
        roles=roles,
        resources=wanted,
        labels=resources.node_labels,
        where=f"{section.where}.resources",
        crew=section.crew,
    )


def reserve(ranks: Sequence[Rank], *, timeout_s: float, may_grow: bool) -> Any:
    """A placement group with a bundle for each rank, in their order.

    may_grow: whether nodes may still join, so that waiting makes sense. Raises ConfigError naming what is missing when there
    is no room within ``timeout_s``.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    lacking = missing(ranks, ray.nodes())
    if lacking and not may_grow:
        raise _no_room(ranks, lacking, ray.cluster_resources(), timeout_s=0.0)
    selectors: dict[str, Any] = {}
    if any(rank.labels for rank in ranks):
        selectors["bundle_label_selector"] = [dict(rank.labels) for rank in ranks]
    group = placement_group([dict(rank.resources) for rank in ranks], strategy="PACK", **selectors)
    if not group.wait(timeout_s):
        free = ray.available_resources()
        lacking = missing(ranks, ray.nodes(), free)
        remove_placement_group(group)
        raise _no_room(ranks, lacking, free, timeout_s=timeout_s)
    return group


def missing(ranks: Sequence[Rank], nodes: Sequence[Mapping[str, Any]], free: Mapping[str, float] | None = None) -> list[str]:
    """What a cluster lacks for all ranks, in words; empty where nothing is seen to be missing.

    nodes: as ray.nodes() describes them. free: what is not in use, as ray.available_resources() says; all of it if None.
    """
    alive = [node for node in nodes if node["Alive"]]
    have = dict(free) if free is not None else _total([node["Resources"] for node in alive])
    need = _total([rank.resources for rank in ranks])
    lacking = [
        f"{_amount(amount)} {name} ({_amount(have.get(name, 0.0))} {'free' if free is not None else 'there'})"
        for name, amount in sorted(need.items())
        if amount > have.get(name, 0.0) + 1e-9
    ]
    for rank in ranks:
        if not any(_fits(rank, node) for node in alive):
            labels = f" with labels {dict(rank.labels)}" if rank.labels else ""
            wanted = ", ".join(f"{_amount(amount)} {name}" for name, amount in rank.resources.items())
            lacking.append(f"a node{labels} that has {wanted} for {rank.name} ({rank.where})")
    return lacking


def _fits(rank: Rank, node: Mapping[str, Any]) -> bool:
    labels = node.get("Labels", {})
    has_labels = all(labels.get(name) == value for name, value in rank.labels.items())
    return has_labels and all(node["Resources"].get(name, 0.0) >= amount for name, amount in rank.resources.items())


def _total(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in parts:
        for name, amount in part.items():
            total[name] = total.get(name, 0.0) + amount
    return total


def _amount(value: float) -> str:
    return f"{value:g}"


def _no_room(ranks: Sequence[Rank], lacking: Sequence[str], have: Mapping[str, float], *, timeout_s: float) -> ConfigError:
    shares = sharing(ranks, have)
    waited = f" within cluster.start_timeout_s={timeout_s:g}" if timeout_s else ""
    wanted = "; ".join(lacking[:6]) or "room for all of them at once: other work holds it"
    return ConfigError(
        f"The cluster has no room for {len(ranks)} workers{waited}. Needed: {wanted}.",
        why="Every rank of every pool is a process of its own, and all of them have to run at once.",
        fix=f"Use fewer replicas, or let ranks share: {' '.join(shares)}." if shares else "Use fewer replicas, or add nodes.",
    )


def sharing(ranks: Sequence[Rank], have: Mapping[str, float]) -> list[str]:
    """Overrides under which all ranks fit by sharing cores and GPUs; none where something else is missing, or all is in use."""
    need, found = _total([rank.resources for rank in ranks]), []
    for name, key in (("CPU", "cpus"), ("GPU", "gpus")):
        if need.get(name, 0.0) <= have.get(name, 0.0):
            continue
        for where, amount in {rank.where: rank.resources.get(name, 0.0) for rank in ranks}.items():
            share = math.floor(100 * amount * have.get(name, 0.0) / need[name]) / 100  # rounded up, they would not fit
            if amount and not share:
                return []
            found += [f"{where}.{key}={_amount(share)}"] if amount else []
    return found
