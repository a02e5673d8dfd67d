"""Buckets: every tensor comes out as it went in, in a layout that both sides can count on."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from xxhash import xxh3_128_hexdigest

from digenrl.errors import ProtocolError, RunFailed
from digenrl.weight_sync.publication import (
    DamagedWeights,
    Published,
    check_arrived,
    count_buckets,
    num_buckets,
    pack,
    publish,
    tensor_digests,
    unpack,
)
from digenrl.weight_sync.wire import DTYPES

SideMaker = Callable[..., Any]


def packed(tensors: dict[str, Tensor], bucket_bytes: int = 64) -> Published:
    return pack(tensors, {name: tensor.dtype for name, tensor in tensors.items()}, version=3, bucket_bytes=bucket_bytes)


def same_bits(a: Tensor, b: Tensor) -> bool:
    raw = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*raw)


def bytes_of(*sizes: int) -> dict[str, Tensor]:
    return {f"t{i}": torch.full((size // 4,), float(i)) for i, size in enumerate(sizes)}


@st.composite
def tensor_sets(draw: st.DrawFn) -> dict[str, Tensor]:
    names = draw(st.lists(st.text(max_size=6), min_size=1, max_size=8, unique=True))
    tensors = {}
    for name in names:
        dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        size = int(np.prod(shape)) * dtype.itemsize
        bits = torch.tensor(list(draw(st.binary(min_size=size, max_size=size))), dtype=torch.uint8)
        tensor = bits.view(dtype).reshape(shape)
        tensors[name] = tensor.T if draw(st.booleans()) and tensor.dim() == 2 else tensor
    return tensors


@given(tensors=tensor_sets(), bucket_bytes=st.integers(1, 200))
def test_any_bits_of_any_shape_and_dtype_survive_any_bucket_size(tensors: dict[str, Tensor], bucket_bytes: int) -> None:
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    published = packed(tensors, bucket_bytes)
    manifest = pickle.loads(pickle.dumps(published.manifest))  # as it goes by value to a worker
    check_arrived(manifest, published.buckets)
    back = unpack(manifest, published.buckets)
    assert back.keys() == tensors.keys()
    assert all(same_bits(back[name], tensor) for name, tensor in tensors.items())
    assert {spec.name: spec.digest for spec in manifest.tensors} == tensor_digests(tensors, dtypes)
    assert len(published.buckets) == count_buckets(tensors, dtypes, bucket_bytes)
    for index, bucket in enumerate(published.buckets):
        inside = [spec for spec in manifest.tensors if spec.bucket == index and spec.num_bytes]
        assert bucket.nbytes <= bucket_bytes or len(inside) == 1


@given(tensors=tensor_sets(), sizes=st.tuples(st.integers(1, 200), st.integers(1, 200)))
def test_the_digest_depends_on_the_weights_and_not_on_the_buckets_or_the_order(
    tensors: dict[str, Tensor], sizes: tuple[int, int]
) -> None:
    turned = dict(reversed(tensors.items()))
    first, second = packed(tensors, sizes[0]), packed(turned, sizes[1])
    assert first.manifest.digest == second.manifest.digest
    assert packed(tensors, sizes[0]).manifest == packed(turned, sizes[0]).manifest


@pytest.mark.parametrize(
    "other",
    [
        {"a": torch.tensor([[1.0, 2.0]]), "b": torch.tensor([3.0])},
        {"a": torch.tensor([1.0, 2.0]), "c": torch.tensor([3.0])},
        {"a": torch.tensor([1.0, 2.0, 3.0]), "b": torch.tensor([])},
        {"a": torch.tensor([1.0, -2.0]), "b": torch.tensor([3.0])},
        {"b": torch.tensor([1.0, 2.0]), "a": torch.tensor([3.0])},
    ],
    ids=["shape", "name", "border", "value", "swapped"],
)
def test_the_digest_tells_apart_names_shapes_borders_and_values(other: dict[str, Tensor]) -> None:
    this = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0])}
    assert packed(this).manifest.digest != packed(other).manifest.digest


def test_the_digest_tells_apart_dtypes_of_the_same_bytes() -> None:
    half = torch.tensor([1.0, 2.0], dtype=torch.float16)
    assert packed({"a": half}).manifest.digest != packed({"a": half.view(torch.bfloat16)}).manifest.digest


@pytest.mark.parametrize(
    ("sizes", "buckets"),
    [
        ((32, 32), [64]),
        ((32, 36), [32, 36]),
        ((64, 4), [64, 4]),
        ((4, 128, 4), [4, 128, 4]),
        ((128, 4, 60, 4), [128, 64, 4]),
        ((128,), [128]),
        ((0, 128, 0), [128, 0]),
        ((0, 0), [0]),
    ],
)
def test_a_bucket_is_filled_to_its_last_byte_and_a_larger_tensor_has_one_of_its_own(
    sizes: tuple[int, ...], buckets: list[int]
) -> None:
    assert [bucket.nbytes for bucket in packed(bytes_of(*sizes)).buckets] == buckets


def test_scalars_and_strided_and_expanded_tensors_arrive_as_plain_ones() -> None:
    tensors = {
        "scalar": torch.tensor(2.5),
        "every_second": torch.arange(6.0)[::2],
        "strided": torch.arange(24.0).reshape(4, 6)[::2, 1::2],
        "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
        "channels_last": torch.arange(48.0).reshape(1, 3, 4, 4).contiguous(memory_format=torch.channels_last),
    }
    published = packed(tensors)
    back = unpack(published.manifest, published.buckets)
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())


def test_a_publication_does_not_change_when_the_policy_does(make_side: SideMaker) -> None:
    side = make_side()
    published = publish(side.policy, 0, compute_dtype=torch.float32)
    before = side.weights()
    side.move(1)
    check_arrived(published.manifest, published.buckets)
    assert all(torch.equal(t, before[name]) for name, t in unpack(published.manifest, published.buckets).items())


def test_the_number_of_buckets_is_known_before_publishing(make_side: SideMaker) -> None:
    policy = make_side().policy
    for dtype, bucket_bytes in itertools.product((torch.float32, torch.bfloat16), (1, 1000, 4096, 1 << 28)):
        published = publish(policy, 0, compute_dtype=dtype, bucket_bytes=bucket_bytes)
        assert len(published.buckets) == num_buckets(policy, compute_dtype=dtype, bucket_bytes=bucket_bytes)
        assert published.manifest.num_bytes == policy.num_parameters * dtype.itemsize


def test_a_policy_without_trained_weights_cannot_be_published(make_side: SideMaker) -> None:
    policy = make_side().policy
    policy.parameters = {}
    with pytest.raises(RunFailed, match="no trained weights"):
        publish(policy, 1, compute_dtype=torch.float32)


def test_a_negative_version_cannot_be_published() -> None:
    with pytest.raises(ProtocolError, match="version -1"):
        pack({"a": torch.zeros(1)}, {"a": torch.float32}, version=-1)


def test_buckets_that_are_missing_longer_shorter_or_of_another_dtype_are_damaged() -> None:
    published = packed(bytes_of(64, 64))
    first, second = published.buckets
    for buckets in ((), (first,), (first, second, second), (first, second[:-1]), (first, second.view(np.int8)), (second, first)):
        with pytest.raises(DamagedWeights):
            check_arrived(published.manifest, buckets)


def test_a_manifest_that_was_damaged_itself_is_refused() -> None:
    published = packed(bytes_of(32, 32, 64))
    manifest, (a, b, c) = published.manifest, published.manifest.tensors
    for broken in (
        replace(manifest, digest="0" * 32),
        replace(manifest, tensors=(a, b)),
        replace(manifest, tensors=(b, a, c)),
        replace(manifest, tensors=(replace(a, offset=32), replace(b, offset=0), c)),
        replace(manifest, tensors=(replace(a, digest=b.digest), replace(b, digest=a.digest), c)),
        replace(manifest, tensors=(replace(a, name="s"), b, c)),
        replace(manifest, tensors=(a, b, replace(c, bucket=2))),
        replace(manifest, tensors=(a, b, replace(c, dtype="int32"))),
    ):
        with pytest.raises(DamagedWeights, match="contradicts itself"):
            check_arrived(broken, published.buckets)
    check_arrived(manifest, published.buckets)


def test_a_bucket_digest_is_plain_xxh3_over_its_bytes() -> None:
    published = packed(bytes_of(32, 64))
    assert [spec.digest for spec in published.manifest.buckets] == [xxh3_128_hexdigest(b.tobytes()) for b in published.buckets]
