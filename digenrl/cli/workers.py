"""Who does what on a cluster, and what each takes of it: what ``digenrl check`` says before anything is rented."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from digenrl.config.schema import Recipe
from digenrl.runtime.ray.placement import TRAINER, Rank, ranks_of

_LISTED = 3
"""Workers of one kind that are named one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """All ranks of one worker."""

    name: str
    ranks: int
    shard: int
    """Neighbouring ranks that hold one network together."""
    does: str
    takes: str
    """Each rank, of the cluster."""


def worker_lines(recipe: Recipe) -> list[str]:
    """All processes of a run; nothing for a run in one process."""
    if recipe.cluster.placement == "inline":
        return []
    workers = workers_of(recipe)
    count = sum(worker.ranks for worker in workers)
    share = " (or less: on one machine with fewer cores, ranks that ask for no number share them)" if _may_share(recipe) else ""
    lines = [f"on a cluster: {count} worker process{'es' if count > 1 else ''}, in all {_total(recipe)}{share}"]
    for first, same in groupby(workers, key=lambda worker: replace(worker, name="")):
        names, ranks = [worker.name for worker in same], first.ranks
        of = f", {ranks} ranks{' each' if len(names) > 1 else ''}" if ranks > 1 else ""
        of += f" (each holds 1/{first.shard} of the network)" if first.shard > 1 else ""
        each = "each rank takes" if ranks > 1 else "each takes" if len(names) > 1 else "takes"
        lines.append(f"  {_names(names)}{of}: {first.does}; {each} {first.takes}")
    scores = recipe.cluster.placement == "disaggregated" and recipe.cluster.scorers.placement == "driver"
    lines.append(f"  driver, the process that you start: schedule{', score (on its CPU)' if scores else ''}")
    return lines


def workers_of(recipe: Recipe) -> list[Worker]:
    """The workers that `digenrl train` starts on a cluster, in the order in which they are given work."""
    found = []
    pairs = zip(ranks_of(recipe, gpus=False), ranks_of(recipe, gpus=True), strict=True)
    for name, ranks in groupby(pairs, key=lambda pair: pair[0].worker):
        members = list(ranks)
        without, with_gpus = members[0]
        takes = _amounts(without.resources, with_gpus.resources)
        if without.labels:
            takes += f", on a node with {', '.join(f'{key}={value}' for key, value in without.labels.items())}"
        found.append(Worker(name=name, ranks=len(members), shard=without.shard, does=_does(without, recipe), takes=takes))
    return found


def _does(rank: Rank, recipe: Recipe) -> str:
    """The work of a worker, told by its first rank, which has all of its roles."""
    evaluates = ["evaluate"] if recipe.eval is not None else []
    if rank.worker == TRAINER:
        helps = [] if recipe.tag == "never" else [f"generate when idle (schedule.tag: {recipe.tag})"]
        return ", ".join(["train", *evaluates, "save", *helps])
    ends = [*evaluates, "save"] if "train" in rank.roles else []
    return ", ".join([*(role for role in ("encode", "generate", "score", "train") if role in rank.roles), *ends])


def _may_share(recipe: Recipe) -> bool:
    """Whether a private cluster may give some ranks less than a core."""
    cluster = recipe.cluster
    several = len(ranks_of(recipe, gpus=False)) > 1 and cluster.emulate is None
    scorers = (cluster.scorers,) if cluster.scorers.placement == "pool" else ()
    return several and any(pool.resources.cpus is None for pool in (*recipe.generating_pools, *scorers, cluster.trainer))


def _total(recipe: Recipe) -> str:
    return _amounts(*(_sum([rank.resources for rank in ranks_of(recipe, gpus=gpus)]) for gpus in (False, True)))


def _sum(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = {name: None for part in parts for name in part}
    return {name: sum(part.get(name, 0.0) for part in parts) for name in names}


def _amounts(without: Mapping[str, float], with_gpus: Mapping[str, float]) -> str:
    """What is taken of a cluster without GPUs, and how many of its GPUs where it has some."""
    parts = [f"{amount:g} {name}" for name, amount in without.items()]
    more = with_gpus.get("GPU", 0.0) - without.get("GPU", 0.0)
    parts += [f"{more:g}{' more' if without.get('GPU') else ''} GPU where the cluster has any"] if more else []
    return ", ".join(parts) or "nothing that Ray counts"


def _names(names: Sequence[str]) -> str:
    if len(names) > _LISTED:
        return f"{names[0]} to {names[-1]}"
    return ", ".join(names)
