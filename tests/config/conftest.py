from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

RECIPE = """\
model:
  type: sd3
  path: builtin:shapes
data:
  prompts: builtin:shapes/train.jsonl
rollout:
  prompts_per_step: 4
  num_generations: 6
  num_inference_steps: 8
  height: 32
  width: 32
algorithm:
  type: flow_grpo
rewards:
  - {type: shapes, weight: 2.0}
train:
  steps: 3
  learning_rate: 3e-4
"""
"""The smallest recipe; its line numbers are counted on by tests."""


@pytest.fixture
def text() -> str:
    return RECIPE


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str | bytes], Path]:
    """Write a recipe and return its path."""

    def written(content: str | bytes) -> Path:
        path = tmp_path / "recipe.yaml"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return written


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Write a user's module into the working directory; it and the path entry are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)

    def written(name: str, source: str) -> None:
        (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")
        importlib.invalidate_caches()

    yield written
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and Path(str(sys.modules[name].__file__)).is_relative_to(tmp_path):
            del sys.modules[name]
