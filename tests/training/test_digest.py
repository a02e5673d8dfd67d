"""Digests: equal exactly when name, dtype, shape and bytes are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from digenrl.errors import ConfigError
from digenrl.training.digest import digest, digest_of_folder, save_weights


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


def parts() -> dict[str, dict[str, Tensor]]:
    shared = torch.arange(4, dtype=torch.float32)
    return {"parameters": {"w": shared, "v": shared}, "optimizer": {"step.w": torch.tensor(3.0)}, "ema": {}}


def test_saved_weights_have_the_digests_that_were_returned(tmp_path: Path) -> None:
    written = save_weights(tmp_path / "final", parts())
    assert digest_of_folder(tmp_path / "final") == written
    assert written == {part: digest(tensors) for part, tensors in parts().items()}


@pytest.mark.parametrize("damage", ["gone", "cut", "pickle"])
def test_a_missing_or_damaged_file_is_named(damage: str, tmp_path: Path) -> None:
    save_weights(tmp_path, parts())
    path = tmp_path / "optimizer.safetensors"
    if damage == "gone":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        torch.save({"a": torch.zeros(1)}, path)
    with pytest.raises(ConfigError, match=r"optimizer\.safetensors"):
        digest_of_folder(tmp_path)
