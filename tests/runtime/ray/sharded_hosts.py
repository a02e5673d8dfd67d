"""One rank of a generator that holds its network together with others, in a process of its own; see training/fsdp_ranks.py.

python -m tests.runtime.ray.sharded_hosts FOLDER RANK SIZE SHARD:CHECK...
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

import torch

from digenrl.errors import WorkerError
from digenrl.ids import SampleId
from digenrl.runtime.ray.host import WorkerHost
from digenrl.runtime.ray.wire import unpack_trajectories
from digenrl.training.group import ALONE, TrainerGroup, own_share
from digenrl.weight_sync.publication import BucketSpec, DamagedWeights
from digenrl.weight_sync.wire import byte_digest
from tests.conftest import PROMPTS
from tests.training.fsdp_ranks import CPU, GROUP_SIZE, LORA, Numbers, Ranks, held_by, main, passes_noted, small_recipe

SAMPLES = tuple(SampleId(0, prompt, sample) for prompt in range(2) for sample in range(GROUP_SIZE))


@dataclass
class Hosts:
    """A trainer by itself, and a generator by itself and one that is spread over the ranks."""

    ranks: Ranks
    overrides: dict[str, Any]

    def __post_init__(self) -> None:
        self.trainer = self.host("generate", "train")
        self.alone, self.shared = self.host("generate"), self.host("generate", group=self.ranks.group)
        _, self.text = self.host("encode").encode(PROMPTS[:2])

    def host(self, *roles: Any, group: TrainerGroup = ALONE) -> WorkerHost:
        recipe = small_recipe(self.ranks.folder, model=self.overrides)
        return WorkerHost(recipe, frozenset(roles), CPU, group=group)

    def move(self, seed: int) -> None:
        """Make the trainer's next version."""
        policy, generator = self.trainer.built.policy, torch.Generator().manual_seed(seed)
        assert policy is not None
        with torch.no_grad():
            for parameter in policy.parameters.values():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
        policy.version += 1

    def same_pictures(self, version: int) -> bool:
        """Whether this rank's samples are those of one process; the ranks' shares differ, and their passes do not."""
        mine = SAMPLES[: 1 + self.ranks.group.rank]
        _, ours, _ = self.shared.generate((*mine, *SAMPLES[: GROUP_SIZE - len(mine)]), version, self.text, len(mine))
        _, wanted, _ = self.alone.generate(mine, version, self.text)
        found = [unpack_trajectories([each]) for each in (ours, wanted)]
        return all(
            found[0].samples == mine and torch.equal(getattr(found[0], part), getattr(found[1], part))
            for part in ("latents", "log_probs", "final_latents")
        )


def generation(ranks: Ranks) -> Numbers:
    """Versions that arrive, what is held of them, and what is drawn with them."""
    return {
        f"{kind}, {dtype}": versions(Hosts(ranks, {"lora": lora, "dtype": dtype}))
        for kind, lora in (("lora", LORA), ("full", None))
        for dtype in ("float32", "bfloat16")
    }


def versions(hosts: Hosts) -> Numbers:
    found: Numbers = {"same pictures": [], "digests": []}
    for version in range(2):
        published = hosts.trainer.publish()
        said = [host.load(*published) for host in (hosts.alone, hosts.shared)]
        found["digests"].append([published[0].digest, *said, *hosts.shared.weights_digest()[1:]])
        found["same pictures"].append(hosts.same_pictures(version))
        hosts.move(seed=version)
    policy, other = hosts.shared.built.policy, hosts.alone.built.policy
    assert policy is not None and other is not None
    found |= {
        "held": held_by(policy)[0],
        "numbers": held_by(other)[0],
        "noted": passes_noted(policy.adapter.transformer),
    }
    return found


def damage(ranks: Ranks) -> Numbers:
    """What one rank refuses to load or to keep; it asks no other rank, which know of nothing."""
    hosts = Hosts(ranks, {"lora": None})
    manifest, *buckets = hosts.trainer.publish()
    hosts.shared.load(manifest, *buckets)
    policy = hosts.shared.built.policy
    assert policy is not None
    found: Numbers = {"again": hosts.shared.load(manifest) == manifest.digest}
    before = {name: own_share(p.detach()).clone() for name, p in policy.parameters.items()}
    hosts.move(seed=0)
    newer, *newer_buckets = hosts.trainer.publish()
    if ranks.group.rank == 1:
        spec = max(newer.tensors, key=lambda each: each.num_bytes)
        damaged = [bucket.copy() for bucket in newer_buckets]
        damaged[spec.bucket][spec.offset] ^= 1  # the first row of a tensor, which lies on rank 0
        as_if = tuple(BucketSpec(num_bytes=bucket.nbytes, digest=byte_digest(bucket)) for bucket in damaged)
        try:
            hosts.shared.load(replace(newer, buckets=as_if), *damaged)
        except DamagedWeights as error:
            found["damaged"] = spec.name in error.what
        found["untouched"] = policy.version == 0 and all(
            torch.equal(before[name], own_share(p.detach())) for name, p in policy.parameters.items()
        )
        with torch.no_grad():
            next(own_share(p) for p in policy.parameters.values() if own_share(p).numel()).add_(1)
        try:
            hosts.shared.load(manifest)
        except WorkerError as error:
            found["changed"] = "changed after they were loaded" in error.what and policy.version == -1
    hosts.shared.load(newer, *newer_buckets)
    found["in the end"] = hosts.shared.weights_digest() == (1, newer.digest)
    return found


CHECKS = {"generation": generation, "damage": damage}


if __name__ == "__main__":
    main(sys.argv[1:], CHECKS)
