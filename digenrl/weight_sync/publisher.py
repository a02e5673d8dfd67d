"""The trainer's side: publishes its versions, and remembers the newest ones for resending and for checkpoints.

Invariants: a version is published with one set of weights only; what is remembered is exactly what was sent.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from digenrl.errors import ProtocolError
from digenrl.training.policy import Policy
from digenrl.weight_sync.publication import BUCKET_BYTES, Published, count_buckets, pack, unpack
from digenrl.weight_sync.wire import check_binding, dtype_name, form, forms, wire_dtypes


class Publisher:
    """Publishes one policy. ``keep_previous``: remember two versions, for runs whose trajectories may be one version old."""

    def __init__(
        self, policy: Policy, compute_dtype: torch.dtype, *, keep_previous: bool, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self._policy = policy
        self._dtypes = wire_dtypes(policy, compute_dtype)
        self._bucket_bytes = bucket_bytes
        self._remembered = 2 if keep_previous else 1
        self._kept: list[Published] = []
        """Oldest first."""

    @property
    def num_buckets(self) -> int:
        """Buckets of every publication; known before the first."""
        return count_buckets(self._policy.parameters, self._dtypes, self._bucket_bytes)

    @property
    def last(self) -> Published | None:
        """The newest publication, to send again."""
        return self._kept[-1] if self._kept else None

    @property
    def remembered(self) -> tuple[Published, ...]:
        """The newest publications, oldest first."""
        return tuple(self._kept)

    @property
    def previous_version(self) -> int | None:
        """The version before the newest, where it is remembered."""
        return self._kept[-2].manifest.version if len(self._kept) > 1 else None

    def previous_tensors(self) -> dict[str, Tensor]:
        """Weights of ``previous_version`` by name, on the CPU in their wire dtypes; empty where there is none."""
        if len(self._kept) < 2:
            return {}
        published = self._kept[-2]
        return unpack(published.manifest, published.buckets)

    def publish(self) -> Published:
        """Publish the policy's weights as its version, between an optimizer step and the next.

        Errors as ``publication.publish``; ProtocolError also when the version was published with other weights.
        """
        return self._pack(self._policy.parameters, self._policy.version)

    def published_from(self, tensors: Mapping[str, Tensor], version: int) -> Published:
        """Publish ``previous_tensors()`` of a checkpoint as ``version``; the policy is not touched.

        Raises RunFailed unless names, shapes and dtypes are exactly those that the policy publishes.
        """
        given = {name: form(dtype_name(tensor.dtype), tensor.shape) for name, tensor in tensors.items()}
        check_binding(given, forms(self._policy.parameters, self._dtypes), sender="the given weights", receiver="the policy")
        return self._pack(tensors, version)

    def _pack(self, tensors: Mapping[str, Tensor], version: int) -> Published:
        """Keep the newest; a version that is kept already must have the same digest, and its first copy stays."""
        published = pack(tensors, self._dtypes, version=version, bucket_bytes=self._bucket_bytes)
        manifest = published.manifest
        for kept in self._kept:
            if kept.manifest.version != manifest.version:
                continue
            if kept.manifest.digest != manifest.digest:
                raise ProtocolError(
                    f"Version {manifest.version} was published before, with other weights.",
                    why="Generators that hold the first would be taken for holding the second.",
                    fix="Count the version up with every optimizer step, and publish between steps.",
                )
            return kept
        self._kept = sorted([*self._kept, published], key=lambda kept: kept.manifest.version)[-self._remembered :]
        return published
