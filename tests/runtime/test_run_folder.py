"""Where a run's files lie."""

from __future__ import annotations

from pathlib import Path

import pytest

from digenrl.runtime.run_folder import RunFolder


def test_checkpoints_lie_at_one_place_for_processes_with_other_working_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = RunFolder(Path("runs") / "mine")
    assert folder.checkpoints == tmp_path.resolve() / "runs" / "mine" / "checkpoints"
    assert not folder.path.is_absolute(), "messages name the folder as the user did"
