"""The benchmark of timestep parallelism runs real ranks, and says what it was asked for."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "tsp.py"


@pytest.fixture
def tsp(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("tsp", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "tsp", module)  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


@pytest.mark.timeout(400)
def test_two_ranks_and_one_are_measured_with_their_ratios_and_the_bar(
    tsp: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    tsp.main(["--tiny", "--repeats", "1", "--tokens", "64", "--json"])
    found = json.loads(capsys.readouterr().out)
    two, one = found["runs"]
    assert (two["ranks"], one["ranks"]) == (2, 1)
    assert set(two["variants"]) == {"K=1 sharded", "K=8 sharded", "K=1 unsharded", "K=8 unsharded"}
    assert set(one["variants"]) == {"K=1", "K=8"}
    assert "times_as_fast_as_K=1" in one["variants"]["K=8"]
    for run in found["runs"]:
        for name, variant in run["variants"].items():
            assert variant["seconds"]["min"] > 0, name
            assert variant["peak_mib_above_rest"] >= 0, name
    best = two["variants"]["K=8 sharded"]
    ratio = two["variants"]["K=1 sharded"]["seconds"]["median"] / best["seconds"]["median"]
    assert best["times_as_fast_as_K=1 sharded"]["median"] == pytest.approx(ratio, rel=1e-2)
    assert found["bar"]["measured"] == best["times_as_fast_as_K=1 sharded"]
    assert found["bar"]["against_unsharded_accumulation"] == best["times_as_fast_as_K=1 unsharded"]
    assert found["bar"]["met"] == (ratio >= found["bar"]["at_least"])


def test_each_variant_goes_through_the_steps_that_the_description_speaks_of(tsp: ModuleType) -> None:
    assert tsp.STEPS == 8
    names = [each.name for each in tsp.variants(tsp.Job(ranks=2, tokens=64))]
    assert names == [f"K={pairs} {mode}" for mode in ("sharded", "unsharded") for pairs in (1, 2, 4, 8)]
