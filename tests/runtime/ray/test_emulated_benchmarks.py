"""The benchmarks that need worker processes, in their smallest form: they stand on parts that nothing else puts together so."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[3] / "benchmarks"
pytestmark = [pytest.mark.usefixtures("ray_session"), pytest.mark.timeout(300)]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """A function that runs a benchmark with --json; its report."""

    def run(name: str, *arguments: str) -> tuple[int, Any]:
        status: int = load(name, monkeypatch).main([*arguments, "--json"])
        return status, json.loads(capsys.readouterr().out)

    return run


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def test_the_emulated_ablation_compares_real_steps_with_simulated_ones(measured: Any) -> None:
    arguments = ("--emulate", "hunyuanvideo-32gpu", "--modes", "tcss", "colocated", "--steps", "3", "--generation-s", "0.1")
    _, report = measured("ablation", *arguments)
    assert (report["emulated"], report["steps"], report["repeats"]) == ("hunyuanvideo-32gpu", 3, 1)
    assert list(report["modes"]) == ["naive", "tcss", "colocated"]
    naive, tcss, colocated = report["modes"].values()
    for row in report["modes"].values():
        assert row["over_simulated"]["median"] > 0.99, "whoever sleeps its whole duration cannot be faster than the simulator"
        assert row["over_simulated"]["median"] == pytest.approx(row["step_s"]["median"] / row["simulated_step_s"])
    assert naive["speedup_over_naive"]["median"] == naive["simulated_speedup_over_naive"] == 1
    assert tcss["tags_per_step"] > 0 == naive["tags_per_step"] == colocated["stale_fraction"]
    assert report["assumptions"]


def test_the_emulated_ablation_fails_when_a_bar_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    ablation = load("ablation", monkeypatch)
    good = {"over_simulated": {"median": 1.04}, "speedup_difference": {"median": -0.04}}
    assert ablation.within([good]) == (True, True)
    assert ablation.within([good, {**good, "over_simulated": {"median": 1.06}}]) == (False, True)
    assert ablation.within([good, {**good, "speedup_difference": {"median": -0.06}}]) == (True, False)


@pytest.mark.slow
def test_the_ablation_on_the_tiny_model_is_compared_with_the_plan(measured: Any) -> None:
    status, report = measured("ablation", "--tiny", "--modes", "batch_axis", "gap", "tsp", "--steps", "2")
    assert (status, report["emulated"], report["samples_per_step"]) == (0, None, 24)
    assert list(report["modes"]) == ["naive", "gap", "tsp", "tag"], "one rank has no batch axis, and TAG is what is profiled"
    assert report["fastest"] in report["modes"]
    assert report["predicted_fastest"] in report["modes"]
    assert report["plan"]["mode"] in ("colocated", "colocated+tsp", "tsp", "tag", "tcss")
    for row in report["modes"].values():
        assert row["samples_per_second"]["median"] == pytest.approx(24 / row["step_s"]["median"], rel=0.5)
        assert row["predicted_step_s"] > 0


def test_the_drivers_cost_is_counted_by_micro_batch(measured: Any) -> None:
    status, report = measured("driver", "--workers", "2", "--steps", "3", "--generation-s", "0.2")
    row = report["workers"]["2"]
    assert (status, report["emulated"]) == (0, "hunyuanvideo-32gpu")
    assert row["micro_batches"] == 2 * 4, "two of three steps"
    assert 0 < row["share_of_a_core"] < 0.5
    assert row["cpu_ms_per_micro_batch"] == pytest.approx(1e3 * row["share_of_a_core"] / row["micro_batches_per_s"])
    assert 3 <= row["commands_per_micro_batch"] < 6, "generate, score, update, and what happens once a step"
    assert 500 < row["bytes_received_per_micro_batch"] < 5000, "64 rewards and their like, and no trajectory"
    assert 1000 < row["bytes_sent_per_micro_batch"] < 20000


def test_weights_are_timed_on_both_ways(measured: Any) -> None:
    status, report = measured("weight_sync", "--mib", "0.5", "--receivers", "2", "--repeats", "1")
    (row,) = report["rows"]
    assert (status, row["receivers"]) == (0, 2)
    for transport in ("object_store", "broadcast"):
        found = row[transport]
        whole = found["publish_s"]["median"] + found["load_s"]["median"]
        assert found["delivered_s"]["median"] == pytest.approx(whole)
    assert row["object_store"]["bytes"] == row["broadcast"]["bytes"] > 1e5
