"""The benchmark of the overhead runs: it stands on parts that nothing else wires together in this way."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "overhead.py"


@pytest.fixture
def overhead(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("overhead", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "overhead", module)  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def _environment_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command sets what torch reads at its import, which is not to stay for other tests."""
    monkeypatch.setattr(os, "environ", os.environ.copy())


@pytest.mark.usefixtures("_environment_as_it_was")
def test_a_step_is_measured_beside_the_floor_as_often_as_asked_for(
    overhead: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    overhead.main(["--tiny", "--repeats", "2", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (found["threads"], found["repeats"]) == (1, 2)
    assert set(found["best_batch_sizes"].values()) <= {4, 8}
    for name in ("step_s", "floor_s", "share_of_floor", "share_of_floor_without_text_and_vae"):
        spread = found[name]
        assert 0 < spread["min"] <= spread["median"] <= spread["max"], name
    assert found["share_of_floor_without_text_and_vae"]["median"] < found["share_of_floor"]["median"]


def test_the_step_is_the_one_that_its_description_speaks_of(overhead: ModuleType) -> None:
    size = overhead.Size()
    assert (size.samples, size.pairs) == (6 * 8, 6 * 8 * 9)
