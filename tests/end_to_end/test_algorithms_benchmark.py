"""The benchmark of the algorithms, at a size that shows that it runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "algorithms.py"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_algorithm_gives_a_curve_per_seed_and_a_picture(tmp_path: Path) -> None:
    sizes = (
        "--algorithms",
        "flow_grpo",
        "dance_grpo",
        "--tiny",
        "--seeds",
        "2",
        "--steps",
        "2",
        "--eval-freq",
        "1",
        "--jobs",
        "2",
    )
    command = [sys.executable, str(SCRIPT), *sizes, "--json", "--plot", str(tmp_path / "curves.png")]
    result = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=500, text=True).stdout)
    assert result["algorithms"].keys() == {"flow_grpo", "dance_grpo"}
    for its in result["algorithms"].values():
        assert [[version for version, _ in points] for points in its["curves"].values()] == [[0, 1, 2]] * 2
        assert its["gain_min"] <= its["gain"] <= its["gain_max"]
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
