"""Digests: equal exactly when name, dtype, shape and bytes are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from digenrl.training.digest import digest, digests


def base() -> dict[str, Tensor]:
    return {"a": torch.arange(6, dtype=torch.float32).view(2, 3), "b": torch.tensor(1.0)}


def test_equal_tensors_have_equal_digests_whatever_their_order_memory_or_gradient() -> None:
    wanted = digest(base())
    turned = base()["a"].T.contiguous().T
    assert not turned.is_contiguous()
    parameter = torch.nn.Parameter(base()["a"])
    assert digest({"b": base()["b"], "a": turned}) == wanted
    assert digest({"a": parameter, "b": base()["b"]}) == wanted


@pytest.mark.parametrize(
    "change",
    [
        {"c": torch.tensor(1.0)},  # a tensor more
        {"a": base()["a"].double()},
        {"a": base()["a"].view(3, 2)},
        {"a": base()["a"].view(torch.int32)},  # the same bytes as another type
        {"a": torch.nextafter(base()["a"], torch.tensor(9.0))},
        {"b": torch.tensor([1.0])},
        {"b": torch.tensor(-0.0)},
    ],
)
def test_any_difference_changes_the_digest(change: dict[str, Tensor]) -> None:
    assert digest(base() | change) != digest(base())


def test_names_count_and_the_sign_of_zero_does_too() -> None:
    tensors = base()
    assert digest({"x": tensors["a"], "b": tensors["b"]}) != digest(tensors)
    assert digest({"a": torch.tensor(0.0)}) != digest({"a": torch.tensor(-0.0)})
    assert digest({"a": tensors["a"], "b": tensors["a"] + 1}) != digest({"b": tensors["a"], "a": tensors["a"] + 1})
    assert digest({}) != digest({"a": torch.empty(0)})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_every_dtype_has_a_digest(dtype: torch.dtype) -> None:
    tensor = torch.tensor([0.0, 1.0]).to(dtype)
    assert digest({"a": tensor}) != digest({"a": tensor.flip(0)})


def test_digests_are_by_part() -> None:
    weights = {"parameters": base(), "optimizer": {}, "ema": base()}
    assert digests(weights) == {part: digest(tensors) for part, tensors in weights.items()}
