from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 300


def done(*arguments: str, cwd: Path, **variables: str) -> str:
    finished = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    return finished.stdout


@pytest.mark.slow
@pytest.mark.timeout(3 * DEADLINE_S)
def test_an_installed_wheel_knows_its_model_and_its_recipes_and_trains_in_any_folder(tmp_path: Path) -> None:
    source, installed, elsewhere = tmp_path / "source", tmp_path / "installed", tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copytree(ROOT / "digenrl", source / "digenrl", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    # An environment of its own for the build needs the package index.
    alone = ["--no-build-isolation"] if importlib.util.find_spec("setuptools") else []
    done("-m", "pip", "wheel", "--quiet", "--no-deps", *alone, "--wheel-dir", str(tmp_path), str(source), cwd=elsewhere)
    (wheel,) = tmp_path.glob("*.whl")
    done("-m", "pip", "install", "--quiet", "--no-deps", "--target", str(installed), str(wheel), cwd=elsewhere)
    said = done("-m", "digenrl.cli.main", "check", "quickstart", cwd=elsewhere, PYTHONPATH=str(installed))
    assert said.endswith("ok\n")
    assert f"model: sd3 ({installed / 'digenrl' / 'assets' / 'shapes' / 'model'})" in said
    done("-m", "digenrl.cli.main", "train", "quickstart", "train.steps=1", "eval=null", cwd=elsewhere, PYTHONPATH=str(installed))
    (run,) = (elsewhere / "runs").iterdir()
    assert json.loads((run / "summary.json").read_text(encoding="utf-8"))["steps"] == 1
