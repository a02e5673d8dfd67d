from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from digenrl.cli import plan as plan_command
from digenrl.cli import simulate as simulate_command
from digenrl.errors import ConfigError
from digenrl.trace.record import read_trace
from digenrl.trace.replay import replay


def test_simulate_prints_times_shares_tags_staleness_and_the_papers_range(capsys: pytest.CaptureFixture[str]) -> None:
    simulate_command.run("hunyuanvideo-32gpu", [], steps=4, as_json=False, trace=None)
    text = capsys.readouterr().out
    for words in (
        "step time",
        "trainer     busy",
        "generators  busy",
        "bubble",
        "TAG",
        "stale",
        "the paper: 2.49 to 3.34",
        "assumes:",
    ):
        assert words in text


def test_simulate_prints_the_same_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    simulate_command.run("flux1-32gpu", ["schedule.mode=tag"], steps=4, as_json=True, trace=None)
    plain = json.loads(capsys.readouterr().out)
    assert plain["mode"] == "tag"
    assert len(plain["tags"]) == len(plain["stale"]) == len(plain["step_times_s"]) == 4
    assert plain["trainer"]["busy"] + plain["trainer"]["bubble"] == pytest.approx(1.0)
    assert set(plain["speedup_over"]) == {"colocated", "colocated+tsp", "naive"}
    assert {"mode": "tcss", "over": "colocated", "low": 1.06, "high": 1.21} in plain["paper"]


def test_a_simulated_trace_says_so_and_replays_to_identical_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.jsonl"
    simulate_command.run("hunyuanvideo-32gpu", ["disturbance.jitter=0.2"], steps=3, as_json=False, trace=str(path))
    found = read_trace(path)
    assert found.source == "simulation"
    assert replay(found) > 100
    simulate_command.run(str(path), [], steps=None, as_json=False, trace=None)
    assert "simulated run" in capsys.readouterr().out


def test_a_trace_that_cannot_be_written_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--trace"):
        simulate_command.run("flux1-32gpu", [], steps=2, as_json=False, trace=str(tmp_path / "no" / "t.jsonl"))


def test_plan_prints_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    plan_command.run("hunyuanvideo-8a8c", [], devices=16, as_json=False)
    assert "first: two pools" in capsys.readouterr().out
    plan_command.run("hunyuanvideo-8a8c", ["workload.num_inference_steps=10"], devices=None, as_json=True)
    assert json.loads(capsys.readouterr().out)["devices"] == 16


def test_the_control_plane_starts_without_torch_ray_or_numpy() -> None:
    code = (
        "import sys, digenrl.cli.simulate, digenrl.cli.plan, digenrl.simulation.plan;"
        "sys.exit(' '.join({'torch', 'ray', 'numpy', 'diffusers'} & set(sys.modules)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
