"""What runs inside a worker process: the roles of one worker, with tensors packed at its border. Knows nothing of Ray.

Invariants: weights change in ``optimizer_step`` and ``load`` alone; a trajectory is made by the version that was asked for or
not at all; the trainer generates only in generating mode and accumulates only out of it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from digenrl.algorithms.base import GroupAdvantages
from digenrl.config.schema import Recipe
from digenrl.data.prompts import Prompt
from digenrl.errors import ConfigError, ProtocolError
from digenrl.ids import SampleId
from digenrl.runtime.build import Components, Role, build_components
from digenrl.runtime.checkpointer import write_checkpoint
from digenrl.runtime.ray.answers import Hello, Pieces
from digenrl.runtime.ray.wire import (
    PackedTensor,
    PackedTrajectory,
    pack,
    pack_all,
    pack_trajectory,
    unpack,
    unpack_conditioning,
    unpack_trajectories,
)
from digenrl.training.checkpoint import PREVIOUS, load_checkpoint
from digenrl.training.digest import digests
from digenrl.training.group import ALONE, RankGroup, forget_passes
from digenrl.training.report import StepReport
from digenrl.training.trainer import Trainer
from digenrl.weight_sync.broadcast import BroadcastGroup
from digenrl.weight_sync.held import HeldWeights
from digenrl.weight_sync.publication import Publication, digest_of
from digenrl.weight_sync.publisher import Publisher
from digenrl.weight_sync.transport import Address, Listener, TransportFailed
from digenrl.weight_sync.wire import wire_dtypes
from digenrl.workers.generator import encode_prompts, text_batch_size
from digenrl.workers.scorer import Scorer

TRANSFER_TIMEOUT_S = 60.0
"""Longest wait for a peer in a broadcast, and longest time of one bucket."""


class WorkerHost:
    """One worker of a run."""

    def __init__(
        self,
        recipe: Recipe,
        roles: frozenset[Role],
        device: torch.device,
        *,
        keep_previous: bool = False,
        node_ip: str = "127.0.0.1",
        group: RankGroup = ALONE,
    ) -> None:
        """keep_previous: remember two published versions. node_ip: where this process may listen for its peers.

        group: the ranks that train, or hold one network, together with this one; what is said to be collective is then called
        on all of them.
        """
        self.built: Components = build_components(recipe, roles, device, group)
        """What it is made of."""
        self._recipe = recipe
        self._device = device
        self._ranks = group
        self._takes_turns = roles == {"generate", "train"}
        """Whether it is a trainer of its own, which is told when to generate; a worker that does everything is not."""
        self._generating = False
        policy, trainer = self.built.policy, self.built.trainer
        self._dtype = torch.bfloat16 if recipe.model.dtype == "bfloat16" else torch.float32
        self._publisher = Publisher(policy, self._dtype, keep_previous=keep_previous) if policy and trainer else None
        self._held = HeldWeights(policy, self._dtype) if policy and not trainer else None
        self._node_ip = node_ip
        self._transfers = threading.Lock()
        self._listener: tuple[int, Listener] | None = None
        self._group: tuple[int, BroadcastGroup] | None = None
        self._arrival = threading.Condition()
        self._received: dict[int, tuple[NDArray[np.uint8], ...] | None] = {}
        """Versions that a broadcast has brought (None: has failed to bring) and nobody has loaded; the newest alone."""

    def hello(self) -> Hello:
        """Who is here."""
        policy, publisher = self.built.policy, self._publisher
        return Hello(
            pid=os.getpid(),
            device=str(self._device),
            num_parameters=policy.num_parameters if policy else 0,
            num_buckets=publisher.num_buckets if publisher else 0,
            compares_groups=self.built.scorer is not None and self.built.scorer.compares_groups,
        )

    def encode(self, prompts: Sequence[Prompt]) -> tuple[set[str], dict[str, PackedTensor]]:
        """Prompts that are cut off, and the conditioning, a row per prompt."""
        adapter = self.built.adapter
        encoded = encode_prompts(adapter, prompts, text_batch_size(self._recipe))
        return set(adapter.truncated_prompts), pack_all(encoded.tensors)

    def generate(
        self, samples: Sequence[SampleId], policy_version: int, conditioning: Mapping[str, PackedTensor], real: int | None = None
    ) -> tuple[float, PackedTrajectory, PackedTensor]:
        """Seconds, the trajectory, and its final latents [B, *latent] once more, for the scorer. conditioning: the step's.

        real: how many of the samples are wanted (all if None); the others fill up the passes that all ranks of a sharded
        network have to make. Collective on such ranks.
        """
        self._check_mode(generating=True)
        began, generator = time.perf_counter(), self.built.generator
        assert generator is not None, "only workers that hold the network are asked"
        prompts = sorted({sample.prompt for sample in samples})
        row_of = {prompt: row for row, prompt in enumerate(prompts)}
        text = unpack_conditioning(conditioning, prompts, self._device)
        rows = torch.tensor([row_of[sample.prompt] for sample in samples])
        trajectory = generator.generate(samples, text, rows, policy_version)
        if self._held is not None:
            forget_passes(self.built.adapter.transformer)
        if real is not None and real < len(samples):
            trajectory = trajectory.first(real)
        return time.perf_counter() - began, pack_trajectory(trajectory), pack(trajectory.final_latents)

    def score(
        self, samples: Sequence[SampleId], prompts: Sequence[Prompt], picture_rows: Sequence[int], *latents: PackedTensor
    ) -> Pieces:
        """Decode and score B samples. prompts: one per sample; picture_rows: of which samples the pictures come back.

        latents: of all samples, in order, in one part or several.
        """
        return self._score(self.built.scorer, samples, prompts, picture_rows, latents)

    def score_held_out(
        self, samples: Sequence[SampleId], prompts: Sequence[Prompt], picture_rows: Sequence[int], latents: PackedTensor
    ) -> Pieces:
        """As ``score``, with the rewards of held-out evaluation."""
        return self._score(self.built.judge, samples, prompts, picture_rows, [latents])

    def _score(
        self,
        scorer: Scorer | None,
        samples: Sequence[SampleId],
        prompts: Sequence[Prompt],
        picture_rows: Sequence[int],
        latents: Sequence[PackedTensor],
    ) -> Pieces:
        assert scorer is not None, "only workers with rewards are asked"
        scored = scorer.score(samples, prompts, torch.cat([unpack(part) for part in latents]).to(self._device))
        return Pieces(rewards=scored.rewards, pictures=scored.images[list(picture_rows)])

    def accumulate(
        self,
        prompts: Sequence[int],
        advantages: Sequence[GroupAdvantages],
        more_to_come: bool,
        conditioning: Mapping[str, PackedTensor],
        *parts: PackedTrajectory,
    ) -> float:
        """Add the gradient of one micro-batch, which the ranks of a replica made in ``parts``. Returns seconds. Collective.

        prompts: rows of its groups in ``conditioning``; advantages: one per group. more_to_come: see Trainer.accumulate.
        """
        self._check_mode(generating=False)
        began = time.perf_counter()
        text = unpack_conditioning(conditioning, prompts, self._device)
        self._trainer.accumulate(unpack_trajectories(parts), text, advantages, more_to_come=more_to_come)
        return time.perf_counter() - began

    def optimizer_step(self) -> StepReport:
        """See Trainer.optimizer_step. Collective."""
        self._check_mode(generating=False)
        report = self._trainer.optimizer_step()
        self._trainer.stepping = False
        return report

    def switch(self, generating: bool) -> float:
        """Turn a trainer from training to generating or back. Returns seconds."""
        began = time.perf_counter()
        if self._device.type == "cuda":
            # What one activity keeps cached, the other has room for.
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
        self._generating = generating
        return time.perf_counter() - began

    def publish(self) -> tuple[Publication, *tuple[NDArray[np.uint8], ...]]:
        """The weights of the version that the trainer is at, as a manifest and its buckets. Collective: rank 0's are used."""
        assert self._publisher is not None, "the trainer publishes"
        published = self._publisher.publish()
        return (published.manifest, *published.buckets)

    def stage(self) -> Publication:
        """As ``publish``, of which the buckets stay here until they are sent."""
        assert self._publisher is not None, "the trainer publishes"
        return self._publisher.publish().manifest

    def staged(self, manifest: Publication) -> tuple[NDArray[np.uint8], ...] | NDArray[np.uint8]:
        """The buckets of a version that was staged."""
        buckets = self._staged_buckets(manifest)
        return buckets[0] if len(buckets) == 1 else buckets

    def listen(self, epoch: int) -> Address:
        """Open a socket at which the members of a new group meet."""
        self._listener = (epoch, Listener(self._node_ip))
        return self._listener[1].address

    def send(self, epoch: int, size: int, manifest: Publication, address: Address | None) -> None:
        """Broadcast the buckets of a staged version to the ``size`` - 1 receivers of a group."""
        del address  # the receivers'; the listener itself is here
        buckets = self._staged_buckets(manifest)
        with self._transfers:
            self._enter_group(epoch, 0, size, self._listener[1] if self._listener and self._listener[0] == epoch else None)
            assert self._group is not None, "entered"
            self._group[1].send(buckets)

    def receive(self, epoch: int, rank: int, size: int, manifest: Publication, address: Address | None) -> None:
        """Take part in a broadcast, and keep what has come until it is loaded."""
        with self._transfers:
            self._enter_group(epoch, rank, size, address)
            assert self._group is not None, "entered"
            buckets: tuple[NDArray[np.uint8], ...] | None = None
            try:
                buckets = self._group[1].receive(manifest)
            finally:
                with self._arrival:
                    self._received = {manifest.version: buckets}
                    self._arrival.notify_all()

    def load_received(self, manifest: Publication) -> str:
        """As ``load``, of what a broadcast has brought, or brings. Raises TransportFailed when it does not come."""
        with self._arrival:
            self._arrival.wait_for(lambda: manifest.version in self._received, timeout=TRANSFER_TIMEOUT_S)
            buckets = self._received.pop(manifest.version, None)
            if buckets is None:
                raise TransportFailed(
                    f"Version {manifest.version} of the weights has not arrived, or not within {TRANSFER_TIMEOUT_S:g} s.",
                    why="A member of the broadcast died or stalled.",
                    fix="It is sent through the object store instead.",
                )
        return self.load(manifest, *buckets)

    def _staged_buckets(self, manifest: Publication) -> tuple[NDArray[np.uint8], ...]:
        assert self._publisher is not None, "the trainer publishes"
        for published in self._publisher.remembered:
            if published.manifest.version == manifest.version:
                return published.buckets
        raise ProtocolError(
            f"Version {manifest.version} is not remembered any more.", fix="This is a bug; please report it with trace.jsonl."
        )

    def _enter_group(self, epoch: int, rank: int, size: int, meeting: Listener | Address | None) -> None:
        if self._group is not None and self._group[0] == epoch:
            return
        if self._group is not None:
            self._group[1].close()
            self._group = None
        if meeting is None:
            raise TransportFailed(
                f"This worker is not in group {epoch}.", why="It failed to enter it.", fix="The next version meets anew."
            )
        group = BroadcastGroup.open(
            rank=rank, world_size=size, address=meeting, timeout_s=TRANSFER_TIMEOUT_S, device=self._device
        )
        self._group = (epoch, group)

    def load(self, manifest: Publication, *buckets: NDArray[np.uint8]) -> str:
        """Take over a version. Returns the digest of the weights that the worker then holds. See HeldWeights.load."""
        assert self._held is not None, "generators load"
        self._held.load(manifest, buckets)
        return self._held.digest

    def evaluate(self, numbers: Sequence[int], real: int, conditioning: Mapping[str, PackedTensor]) -> tuple[float, PackedTensor]:
        """Seconds, and final latents of the first ``real`` of some held-out prompts; the rest fill up, as in ``generate``.

        numbers: places of the prompts among all held-out ones. conditioning: of all of these. Collective.
        """
        began, evaluation = time.perf_counter(), self.built.evaluation
        assert evaluation is not None, "evaluations are scheduled only where the recipe has an eval section"
        latents = evaluation.generate(unpack_conditioning(conditioning, numbers, self._device), numbers)
        return time.perf_counter() - began, pack(latents[:real])

    def save(self, folder: str, state: Mapping[str, Any], keep_last: int) -> None:
        """Write a checkpoint of the version that the trainer is at. See checkpointer.write_checkpoint. Collective."""
        assert self._publisher is not None, "the trainer saves"
        if self._ranks.rank:
            self._trainer.weights()  # its part in making them whole
            return
        previous = self._publisher.previous_tensors() if state.get("stale_claims") else None
        write_checkpoint(Path(folder), self._trainer, state, keep_last=keep_last, previous=previous)

    def restore(self, folder: str) -> None:
        """Go on from a checkpoint."""
        self._trainer.restore(load_checkpoint(Path(folder)))

    def publish_previous(self, folder: str) -> tuple[Publication, *tuple[NDArray[np.uint8], ...]]:
        """As ``publish``, of the version before a checkpoint's, whose trajectories it says were in flight."""
        assert self._publisher is not None, "the trainer publishes"
        checkpoint = load_checkpoint(Path(folder))
        published = self._publisher.published_from(checkpoint.weights[PREVIOUS], checkpoint.policy_version - 1)
        return (published.manifest, *published.buckets)

    def check_folder(self, path: str, token: str) -> None:
        """Raise ConfigError unless this worker sees the run folder as the driver does."""
        try:
            seen = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            seen = str(error)
        if seen != token:
            raise ConfigError(
                f"The trainer's node does not see the run folder {str(Path(path).parent)!r}.",
                why="The trainer writes its checkpoints there, so that no weights pass through the driver.",
                fix="Put run.output_dir on a file system that all nodes share.",
            )

    def digests(self) -> dict[str, str]:
        """Digests of parameters, optimizer state and average. Collective."""
        return digests(self._trainer.weights())

    def weights_digest(self) -> tuple[int, str]:
        """Version, and digest of the weights as they are published: equal on all workers that hold it. Collective."""
        policy = self.built.policy
        assert policy is not None, "asked of workers with a policy"
        return policy.version, digest_of(policy, wire_dtypes(policy, self._dtype))

    @property
    def _trainer(self) -> Trainer:
        trainer = self.built.trainer
        assert trainer is not None, "only the trainer is asked"
        return trainer

    def _check_mode(self, *, generating: bool) -> None:
        if self._takes_turns and self._generating != generating:
            modes = ("training", "generating")
            raise ProtocolError(
                f"The trainer is in {modes[self._generating]} mode, and this needs {modes[generating]} mode.",
                why="Generation and training share its memory and must not mix.",
                fix="This is a bug in the executor or scheduler; please report it with the run's trace.jsonl.",
            )
