"""A publication: one version of the trained weights, as a small manifest and some large buckets of bytes.

The manifest travels by value, the buckets by reference or by broadcast. Invariants: the layout depends on names, forms and the
bucket size alone; buckets have no gaps; the digest does not depend on the layout, so both sides compute it from their weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_128

from digenrl.errors import ProtocolError, RunFailed, WorkerError
from digenrl.training.policy import Policy
from digenrl.weight_sync.wire import DTYPES, Bucket, byte_digest, dtype_name, from_bytes, num_bytes, to_bytes, wire_dtypes

BUCKET_BYTES = 256 * 2**20
"""Bytes of one bucket, unless a single tensor has more."""


class DamagedWeights(WorkerError):
    """What arrived is not what was published, and nothing was changed. The answer is to send it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor on the way."""

    name: str
    dtype: str
    """A key of ``wire.DTYPES``."""
    shape: tuple[int, ...]
    bucket: int
    """Index of the bucket that holds it."""
    offset: int
    """Its first byte in that bucket."""
    digest: str
    """xxh3_128 of its bytes, in hex."""

    @property
    def num_bytes(self) -> int:
        """Bytes on the way."""
        return num_bytes(self.shape, DTYPES[self.dtype])


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSpec:
    """One bucket on the way."""

    num_bytes: int
    digest: str
    """xxh3_128 of all its bytes, in hex."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """The manifest: all that a receiver has to know, and some hundred bytes a tensor."""

    version: int
    tensors: tuple[TensorSpec, ...]
    """In order of name."""
    buckets: tuple[BucketSpec, ...]
    digest: str
    """One digest of all names, dtypes, shapes and bytes; equal exactly when the weights on both sides are."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all buckets."""
        return sum(bucket.num_bytes for bucket in self.buckets)


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A manifest with its buckets."""

    manifest: Publication
    buckets: tuple[Bucket, ...]


def publish(policy: Policy, version: int, *, compute_dtype: torch.dtype, bucket_bytes: int = BUCKET_BYTES) -> Published:
    """Copy the trained weights, as ``version``, out of the policy. Later changes to the policy do not reach the copy.

    Raises RunFailed when the policy trains nothing, ProtocolError for a negative version.
    """
    return pack(policy.parameters, wire_dtypes(policy, compute_dtype), version=version, bucket_bytes=bucket_bytes)


def num_buckets(policy: Policy, *, compute_dtype: torch.dtype, bucket_bytes: int = BUCKET_BYTES) -> int:
    """How many buckets ``publish`` will make, which a remote call has to know before it is made."""
    return count_buckets(policy.parameters, wire_dtypes(policy, compute_dtype), bucket_bytes)


def count_buckets(tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype], bucket_bytes: int = BUCKET_BYTES) -> int:
    """How many buckets ``pack`` will make."""
    sizes = [num_bytes(tensors[name].shape, dtypes[name]) for name in sorted(tensors)]
    return len({bucket for bucket, _ in _layout(sizes, bucket_bytes)})


def pack(
    tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype], *, version: int, bucket_bytes: int = BUCKET_BYTES
) -> Published:
    """Copy tensors into buckets, in order of name, each cast to its dtype. Errors as ``publish``."""
    if not tensors:
        raise RunFailed(
            f"Version {version} of the policy has no trained weights to publish.",
            why="Generators would go on with the starting model, and every importance ratio would be wrong.",
            fix="Check model.lora.target_modules, or that the model adapter leaves its transformer trainable.",
        )
    if version < 0:
        raise ProtocolError(f"Weights were to be published as version {version}; the starting model is version 0.")
    names = sorted(tensors)
    sizes = [num_bytes(tensors[name].shape, dtypes[name]) for name in names]
    places = _layout(sizes, bucket_bytes)
    totals: dict[int, int] = {}
    for (bucket, _), size in zip(places, sizes, strict=True):
        totals[bucket] = totals.get(bucket, 0) + size
    buckets = tuple(np.empty(total, dtype=np.uint8) for total in totals.values())
    specs = []
    for name, size, (bucket, offset) in zip(names, sizes, places, strict=True):
        data = to_bytes(tensors[name], dtypes[name])
        buckets[bucket][offset : offset + size] = data
        specs.append(
            TensorSpec(
                name=name,
                dtype=dtype_name(dtypes[name]),
                shape=tuple(tensors[name].shape),
                bucket=bucket,
                offset=offset,
                digest=byte_digest(buckets[bucket][offset : offset + size]),
            )
        )
    manifest = Publication(
        version=version,
        tensors=tuple(specs),
        buckets=tuple(BucketSpec(num_bytes=bucket.nbytes, digest=byte_digest(bucket)) for bucket in buckets),
        digest=_total((spec.name, spec.dtype, spec.shape, spec.digest) for spec in specs),
    )
    return Published(manifest=manifest, buckets=buckets)


def unpack(manifest: Publication, buckets: Sequence[Bucket]) -> dict[str, Tensor]:
    """New CPU tensors by name, in their wire dtypes. The buckets must have passed ``check_arrived``."""
    return {spec.name: read_tensor(spec, buckets) for spec in manifest.tensors}


def read_tensor(spec: TensorSpec, buckets: Sequence[Bucket]) -> Tensor:
    """One new CPU tensor out of the buckets."""
    data = buckets[spec.bucket][spec.offset : spec.offset + spec.num_bytes]
    return from_bytes(data, DTYPES[spec.dtype], spec.shape)


def check_arrived(manifest: Publication, buckets: Sequence[Bucket]) -> None:
    """Raise DamagedWeights unless the manifest agrees with itself and every bucket with the manifest."""
    if not _agrees_with_itself(manifest):
        raise _damaged(manifest, "the manifest contradicts itself")
    if len(buckets) != len(manifest.buckets):
        raise _damaged(manifest, f"{len(buckets)} of {len(manifest.buckets)} buckets arrived")
    for index, (spec, bucket) in enumerate(zip(manifest.buckets, buckets, strict=True)):
        if bucket.dtype != np.uint8 or bucket.shape != (spec.num_bytes,):
            raise _damaged(manifest, f"bucket {index} is {bucket.dtype} {bucket.shape}, not uint8 ({spec.num_bytes},)")
        if byte_digest(bucket) != spec.digest:
            raise _damaged(manifest, f"bucket {index} has another digest")


def check_tensors(manifest: Publication, buckets: Sequence[Bucket]) -> None:
    """Raise DamagedWeights unless each tensor's bytes have its digest. The buckets must have passed ``check_arrived``.

    For whoever keeps a share of each tensor, and so cannot compare digests of whole ones once they are written.
    """
    for spec in manifest.tensors:
        if byte_digest(buckets[spec.bucket][spec.offset : spec.offset + spec.num_bytes]) != spec.digest:
            raise _damaged(manifest, f"tensor {spec.name} has another digest")


def tensor_digests(tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]) -> dict[str, str]:
    """What ``TensorSpec.digest`` would be, for each tensor cast to its dtype."""
    return {name: byte_digest(to_bytes(tensor, dtypes[name])) for name, tensor in tensors.items()}


def digest_of(policy: Policy, dtypes: Mapping[str, torch.dtype]) -> str:
    """What ``Publication.digest`` would be, from the policy's weights as they are now. dtypes: of ``wire_dtypes``."""
    digests = tensor_digests(policy.parameters, dtypes)
    shapes = {name: tuple(parameter.shape) for name, parameter in policy.parameters.items()}
    return _total((name, dtype_name(dtypes[name]), shapes[name], digests[name]) for name in sorted(digests))


def _layout(sizes: Sequence[int], bucket_bytes: int) -> list[tuple[int, int]]:
    """Bucket and offset of each tensor: next to the one before unless the bucket would become too large."""
    assert bucket_bytes > 0, f"buckets of {bucket_bytes} bytes hold nothing"
    places = []
    bucket = used = 0
    for size in sizes:
        if used and used + size > bucket_bytes:
            bucket, used = bucket + 1, 0
        places.append((bucket, used))
        used += size
    return places


def _total(tensors: Iterable[tuple[str, str, tuple[int, ...], str]]) -> str:
    """The digest of (name, dtype, shape, digest of bytes), given in order of name."""
    total = xxh3_128()
    for name, dtype, shape, digest in tensors:
        total.update(f"{name}\0{dtype}\0{shape}\0{digest}\0".encode())
    return total.hexdigest()


def _agrees_with_itself(manifest: Publication) -> bool:
    names = [spec.name for spec in manifest.tensors]
    if names != sorted(set(names)) or any(spec.dtype not in DTYPES for spec in manifest.tensors):
        return False
    ends = [0] * len(manifest.buckets)
    for spec in manifest.tensors:
        if not 0 <= spec.bucket < len(ends) or spec.offset != ends[spec.bucket]:
            return False
        ends[spec.bucket] += spec.num_bytes
    if ends != [bucket.num_bytes for bucket in manifest.buckets]:
        return False
    return manifest.digest == _total((spec.name, spec.dtype, spec.shape, spec.digest) for spec in manifest.tensors)


def _damaged(manifest: Publication, detail: str) -> DamagedWeights:
    return DamagedWeights(
        f"Version {manifest.version} of the weights was damaged on the way: {detail}.",
        why="Weights are checked before the first one is touched, so nothing was changed.",
        fix="It is sent again; if that keeps failing, look at the memory and the network of this machine.",
    )
