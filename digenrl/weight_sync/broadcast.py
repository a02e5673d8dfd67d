"""One trainer broadcasts its buckets to all receivers at once, instead of each fetching them by itself.

Invariants: ``send`` and ``receive`` return when every rank has everything, or raise within the timeout, and then the group is
closed on all ranks; a receiver that expects other buckets than are sent is told so before the first one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from xxhash import xxh3_128_digest

from digenrl.weight_sync.publication import Publication
from digenrl.weight_sync.transport import Address, Collectives, Listener, TransportFailed
from digenrl.weight_sync.wire import Bucket

_CPU = torch.device("cpu")


class BroadcastGroup:
    """One epoch of a trainer (rank 0) with its receivers (ranks 1..world_size-1); whoever joins or leaves, opens another.

    Works in any thread, one at a time. All ranks call the same methods in the same order.
    """

    def __init__(self, collectives: Collectives, timeout_s: float) -> None:
        """Use ``open``."""
        self._collectives: Collectives | None = collectives
        self._timeout_s = timeout_s

    @classmethod
    def open(
        cls, *, rank: int, world_size: int, address: Listener | Address, timeout_s: float, device: torch.device = _CPU
    ) -> BroadcastGroup:
        """Meet the others at ``address``: rank 0 brings the Listener, the others have been told its ``.address``.

        timeout_s: longest wait to meet, and longest of every later operation (one bucket, one barrier), so more than one
        bucket takes. device: CPU for gloo, this process's GPU for NCCL. Raises TransportFailed when somebody does not come.
        """
        try:
            collectives = Collectives(rank=rank, world_size=world_size, meeting=address, timeout_s=timeout_s, device=device)
        except (RuntimeError, OSError) as error:
            raise _failed(f"rank {rank} met no complete group within {timeout_s:g} s", error) from error
        finally:
            if isinstance(address, Listener):
                address.close()
        return cls(collectives, timeout_s)

    def send(self, buckets: Sequence[Bucket]) -> None:
        """Rank 0: broadcast the buckets; returns when all receivers have all of them. Raises TransportFailed."""
        with self._group("sending") as collectives:
            self._agree(collectives, [bucket.nbytes for bucket in buckets])
            for bucket in buckets:
                # A view where torch allows one; it warns of arrays that are read-only.
                collectives.broadcast(torch.from_numpy(bucket if bucket.flags.writeable else bucket.copy()))
            collectives.barrier()

    def receive(self, manifest: Publication) -> tuple[Bucket, ...]:
        """Other ranks: take part in ``send``. Returns new buckets, as sent; whoever loads them verifies the digests.

        Raises TransportFailed, also when the sender sends other buckets than the manifest has.
        """
        with self._group(f"receiving version {manifest.version}") as collectives:
            self._agree(collectives, [bucket.num_bytes for bucket in manifest.buckets])
            buckets = tuple(np.empty(bucket.num_bytes, dtype=np.uint8) for bucket in manifest.buckets)
            for bucket in buckets:
                collectives.broadcast(torch.from_numpy(bucket))
            collectives.barrier()
        return buckets

    def close(self) -> None:
        """Leave the group. May be called twice."""
        collectives, self._collectives = self._collectives, None
        if collectives is not None:
            collectives.close()

    @contextmanager
    def _group(self, doing: str) -> Iterator[Collectives]:
        """The group, closed when anything fails, so that the others fail too instead of waiting."""
        if self._collectives is None:
            raise TransportFailed(f"The group was closed before {doing}.", fix="Open another one, in all its processes.")
        done = False
        try:
            yield self._collectives
            done = True
        except RuntimeError as error:
            raise _failed(f"{doing} broke off (timeout {self._timeout_s:g} s)", error) from error
        finally:
            if not done:
                self.close()

    @staticmethod
    def _agree(collectives: Collectives, sizes: list[int]) -> None:
        """Let receivers find out whether the buckets that come have the sizes that they expect, before the first one comes."""
        mine = xxh3_128_digest(",".join(map(str, sizes)).encode())
        mark = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        collectives.broadcast(mark)
        if mark.numpy().tobytes() != mine:
            raise RuntimeError(f"the sender's buckets are not the {len(sizes)} of {sum(sizes)} bytes that the manifest names")


def _failed(what: str, error: Exception) -> TransportFailed:
    return TransportFailed(
        f"Broadcast of weights: {what}: {error}.",
        why="A peer died, stalled or was never started; the group is closed in every process.",
        fix="Open another group with the processes that live, and send again.",
    )
