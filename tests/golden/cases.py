"""The golden cases: numbers of the reference repositories' own functions (see README.md)."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

HERE = Path(__file__).parent
CASES: dict[str, dict[str, Any]] = {
    case["case"]: case for case in json.loads((HERE / "manifest.json").read_text(encoding="utf-8"))["cases"]
}


@cache
def tensors(file: str) -> dict[str, Tensor]:
    return load_file(HERE / file)


def golden(case: str, name: str) -> Tensor:
    return tensors(CASES[case]["file"])[f"{case}/{name}"]


def cases(prefix: str, *, without: tuple[str, ...] = ()) -> list[str]:
    found = [name for name in CASES if name.startswith(prefix) and not any(part in name for part in without)]
    assert found, f"no golden case starts with {prefix}"
    return found


def close(actual: Tensor, expected: Tensor, *, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)
