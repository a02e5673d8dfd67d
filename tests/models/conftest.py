"""Damaged copies of the tiny model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def copied_model(tmp_path: Path, tiny_sd3: Path) -> Path:
    """A copy of the tiny model that a test may damage."""
    return Path(shutil.copytree(tiny_sd3, tmp_path / "copied_model"))


@pytest.fixture
def edited_model(copied_model: Path) -> Callable[..., Path]:
    """A function that changes keys of one of the copy's JSON files and returns the folder."""

    def edit(file: str, **changes: Any) -> Path:
        path = copied_model / file
        content = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps(content | changes), encoding="utf-8")
        return copied_model

    return edit
