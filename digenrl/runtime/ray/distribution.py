"""How a published version gets to the generators: by Ray's object store, or by a broadcast that overlaps with their work.

Invariants: publishing never waits for a generator; a load never waits for another generator's; whatever a broadcast fails at,
the object store delivers.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from ray import ObjectRef

from digenrl.runtime.ray.pool import Inbox, Process, WorkerPool

_KEPT_VERSIONS = 2


class Distribution(Protocol):
    """Both ways."""

    def publish(self, version: int, method: str, *arguments: Any) -> ObjectRef[Any]:
        """Have the trainer publish ``version`` by a method of its host, and return a reference to the manifest, at once."""
        ...

    def has(self, version: int) -> bool:
        """Whether a version was published, or is being published."""
        ...

    def load(self, process: Process, version: int) -> ObjectRef[Any]:
        """Have a generator load a published version at its next task boundary."""
        ...

    def give_up(self, process: Process, version: int) -> bool:
        """A load failed on the way. Returns whether the next one goes another way."""
        ...


@dataclass(slots=True)
class _Version:
    manifest: ObjectRef[Any]
    buckets: list[ObjectRef[Any]] | None
    """None until somebody asks for them."""
    receivers: dict[str, int] = field(default_factory=dict)
    """Ranks that a broadcast delivers to, with their incarnation."""


class ObjectStoreDistribution:
    """The trainer puts its buckets into the object store, and every generator takes them from there."""

    def __init__(self, pool: WorkerPool, trainer: Sequence[Process]) -> None:
        """trainer: its ranks; the first sends, after all have made the weights whole."""
        self._pool = pool
        self._trainer, *self._others = trainer
        self._versions: dict[int, _Version] = {}

    def publish(self, version: int, method: str, *arguments: Any) -> ObjectRef[Any]:
        """See Distribution.publish."""
        assert self._trainer.hello is not None, "the trainer is up"
        count = 1 + self._trainer.hello.num_buckets
        manifest, *buckets = self._pool.call(self._trainer, method, *arguments, num_returns=count)
        for other in self._others:
            self._pool.call(other, method, *arguments, num_returns=count)
        self._keep(version, _Version(manifest, buckets))
        return manifest

    def has(self, version: int) -> bool:
        """See Distribution.has."""
        return version in self._versions

    def load(self, process: Process, version: int) -> ObjectRef[Any]:
        """See Distribution.load."""
        published = self._versions[version]
        assert published.buckets is not None, "put there when it was published"
        return self._pool.call(process, "load", published.manifest, *published.buckets)[0]

    def give_up(self, process: Process, version: int) -> bool:
        """See Distribution.give_up."""
        del process, version
        return False

    def _keep(self, version: int, published: _Version) -> None:
        self._versions[version] = published
        for old in sorted(self._versions)[:-_KEPT_VERSIONS]:
            del self._versions[old]


class BroadcastDistribution(ObjectStoreDistribution):
    """All generators of the moment take part in one broadcast, beside their work, and load what has arrived."""

    def __init__(self, pool: WorkerPool, trainer: Sequence[Process], inbox: Inbox) -> None:
        super().__init__(pool, trainer)
        self._inbox = inbox
        self._members: dict[str, int] = {}
        """Who is in the present group, with incarnations."""
        self._epoch = 0
        self._under_way = 0
        """Calls of a broadcast that are not answered yet."""
        self._broken = False

    def publish(self, version: int, method: str, *arguments: Any) -> ObjectRef[Any]:
        """See Distribution.publish. A version that comes while one is under way goes by the object store."""
        if method != "publish" or self._under_way:
            return super().publish(version, method, *arguments)
        (manifest,) = self._pool.call(self._trainer, "stage")
        for other in self._others:
            self._pool.call(other, "stage")
        receivers = [process for process in self._pool.all() if process.up and _receives(process)]
        published = _Version(manifest, None)
        self._keep(version, published)
        if receivers:
            self._broadcast(manifest, receivers)
            published.receivers = {process.rank.name: process.incarnation for process in receivers}
        return manifest

    def load(self, process: Process, version: int) -> ObjectRef[Any]:
        """See Distribution.load."""
        published = self._versions[version]
        if published.receivers.get(process.rank.name) == process.incarnation:
            return self._pool.call(process, "load_received", published.manifest)[0]
        if published.buckets is None:
            assert self._trainer.hello is not None, "the trainer is up"
            count = self._trainer.hello.num_buckets
            # Beside its work: the version may be needed while the trainer is in the middle of something.
            published.buckets = self._pool.call(self._trainer, "staged", published.manifest, num_returns=count, beside=True)
        return self._pool.call(process, "load", published.manifest, *published.buckets)[0]

    def give_up(self, process: Process, version: int) -> bool:
        """See Distribution.give_up."""
        self._broken = True
        published = self._versions.get(version)
        return published is not None and published.receivers.pop(process.rank.name, None) is not None

    def _broadcast(self, manifest: ObjectRef[Any], receivers: Sequence[Process]) -> None:
        members = {process.rank.name: process.incarnation for process in receivers}
        address = None
        if members != self._members or self._broken:
            self._members, self._broken = members, False
            self._epoch += 1
            (address,) = self._pool.call(self._trainer, "listen", self._epoch, beside=True)
        size = 1 + len(receivers)
        calls = [self._pool.call(self._trainer, "send", self._epoch, size, manifest, address, beside=True)[0]]
        for rank, process in enumerate(receivers, start=1):
            calls += self._pool.call(process, "receive", self._epoch, rank, size, manifest, address, beside=True)
        self._under_way = len(calls)
        for call in calls:
            self._inbox.watch(call.future(), self._answered)

    def _answered(self, future: Future[Any]) -> tuple[()]:
        self._under_way -= 1
        # Whoever has not got it finds out when it loads; the next version meets anew.
        self._broken = self._broken or future.exception() is not None
        return ()


def _receives(process: Process) -> bool:
    return "generate" in process.rank.roles and "train" not in process.rank.roles
