"""metrics.jsonl is always there and whole; other sinks get a copy and cannot stop a run; a resume logs each step once."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from digenrl.config.schema import LogSection, WandbSection
from digenrl.errors import ConfigError, RunFailed
from digenrl.metrics.append import RecordFile
from digenrl.metrics.log import MetricsLog, open_sinks, read_metrics, resume_rows


class RecordingSink:
    def __init__(self, name: str = "recording", error: Exception | None = None) -> None:
        self.name = name
        self.error = error
        self.calls: list[tuple[Any, ...]] = []

    def log(self, *arguments: Any) -> None:
        self._call("log", *arguments)

    def images(self, *arguments: Any) -> None:
        self._call("images", *arguments)

    def close(self) -> None:
        self._call("close")

    def _call(self, *call: Any) -> None:
        self.calls.append(call)
        if self.error:
            raise self.error


def picture() -> np.ndarray:
    return np.zeros((1, 4, 4, 3), np.uint8)


def write_rows(path: Path, *rows: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def steps_of(rows: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(row["kind"], row["step"]) for row in rows]


def run_of_four_steps() -> list[dict[str, Any]]:
    """As the journal writes it: version 0 is evaluated, then steps; version 2 after step 1, version 4 after step 3."""
    order = [("eval", 0), ("train", 0), ("train", 1), ("eval", 2), ("train", 2), ("train", 3), ("eval", 4)]
    return [{"kind": kind, "step": step, "reward": 0.5} for kind, step in order]


def test_each_call_is_one_line_that_is_on_disk_at_once(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.log("eval", 0, {"reward": 0.25})
    log.log("train", 0, {"reward_mean": 0.5})
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"kind": "eval", "step": 0, "reward": 0.25},
        {"kind": "train", "step": 0, "reward_mean": 0.5},
    ]
    log.close()


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf, np.float32("nan")])
def test_a_missing_number_is_null_in_the_file_and_left_out_of_the_sinks(tmp_path: Path, value: float | None) -> None:
    sink = RecordingSink()
    with closing(MetricsLog(tmp_path / "m.jsonl", [sink])) as log:
        log.log("train", 3, {"reward_mean": value, "grad_norm": np.float32(0.5)})
    assert read_metrics(tmp_path / "m.jsonl") == [{"kind": "train", "step": 3, "reward_mean": None, "grad_norm": 0.5}]
    assert sink.calls[0] == ("log", "train", 3, {"grad_norm": 0.5})


def test_a_sink_that_fails_warns_once_and_stops_neither_the_run_nor_the_other_sinks(tmp_path: Path) -> None:
    warnings: list[tuple[str, str]] = []
    broken, sound = RecordingSink("wandb", ConnectionError("no route to host")), RecordingSink("tensorboard")
    log = MetricsLog(tmp_path / "m.jsonl", [broken, sound], warn=lambda *warning: warnings.append(warning))
    for step in range(3):
        log.log("train", step, {"reward_mean": 0.5})
        log.images("train/samples", step, picture(), ["a dog"])
    log.close()
    [(kind, text)] = warnings
    assert kind == "log.wandb" and "ConnectionError: no route to host" in text
    assert len(broken.calls) == len(sound.calls) == 7  # tried again each time: a network comes back
    assert [row["step"] for row in read_metrics(tmp_path / "m.jsonl")] == [0, 1, 2]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's always-full device")
def test_a_full_disk_under_the_metrics_file_stops_the_run_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").symlink_to("/dev/full")
    with (
        closing(MetricsLog(tmp_path / "m.jsonl")) as log,
        pytest.raises(RunFailed, match=r"m\.jsonl: No space left on device"),
    ):
        log.log("train", 0, {})


def test_a_write_that_breaks_off_leaves_no_part_of_its_record(tmp_path: Path) -> None:
    class BreaksOff:
        def __init__(self, file: Any) -> None:
            self.file = file

        def write(self, data: Any) -> int:
            if len(data) > 3:
                return int(self.file.write(data[:3]))
            raise KeyboardInterrupt

        def fileno(self) -> int:
            return int(self.file.fileno())

    records = RecordFile(tmp_path / "records")
    records.append(b"whole\n")
    sound = records._file
    records._file = BreaksOff(sound)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        records.append(b"broken\n")
    records._file = sound
    records.append(b"next\n")
    assert (tmp_path / "records").read_bytes() == b"whole\nnext\n"
    records.close()


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="no-such-folder"):
        MetricsLog(tmp_path / "no-such-folder" / "metrics.jsonl")


def test_a_tag_of_pictures_must_tell_whether_it_counts_steps_or_versions(tmp_path: Path) -> None:
    with closing(MetricsLog(tmp_path / "m.jsonl")) as log, pytest.raises(ValueError, match="train/ or eval/"):
        log.images("samples", 0, picture(), ["a dog"])


@pytest.mark.parametrize("before_step", range(5))
def test_after_a_resume_each_step_and_each_evaluation_is_logged_once(tmp_path: Path, before_step: int) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = run_of_four_steps()
    write_rows(path, *rows)
    kept = resume_rows(path, before_step=before_step)
    assert read_metrics(path) == kept
    with closing(MetricsLog(path)) as log:
        for row in rows:  # what the resumed run does: its steps, and the versions after the one it started from
            if row["step"] >= before_step and (row["kind"] == "train" or row["step"] > before_step):
                log.log(row["kind"], row["step"], {"reward": row["reward"]})
    assert read_metrics(path) == rows


def test_the_evaluation_of_the_version_that_a_run_resumes_from_stays(tmp_path: Path) -> None:
    write_rows(tmp_path / "m.jsonl", *run_of_four_steps())
    kept = resume_rows(tmp_path / "m.jsonl", before_step=2)
    assert steps_of(kept) == [("eval", 0), ("train", 0), ("train", 1), ("eval", 2)]


def test_the_index_of_samples_is_cut_by_step_and_by_version(tmp_path: Path) -> None:
    path = tmp_path / "index.jsonl"
    samples = [{"file": f"{step}.png", "step": step, "policy_version": step} for step in range(4)]
    held_out = [{"file": f"v{version}.png", "held_out": True, "policy_version": version} for version in (0, 2, 4)]
    write_rows(path, *samples, *held_out)
    resume_rows(path, before_step=2)
    assert [row["file"] for row in read_metrics(path)] == ["0.png", "1.png", "v0.png", "v2.png"]


def test_lines_that_stay_keep_their_bytes_also_with_line_separators_in_a_prompt(tmp_path: Path) -> None:
    path = tmp_path / "index.jsonl"
    prompt = "a dog\u2028under a \u0085 tree, ein Hündchen 🐶"
    first = json.dumps({"step": 0, "prompt": prompt, "reward": 0.1 + 0.2}, ensure_ascii=False).encode() + b"\n"
    path.write_bytes(first + b'{"step": 1}\n')
    assert resume_rows(path, before_step=1)[0]["prompt"] == prompt
    assert path.read_bytes() == first


@pytest.mark.parametrize("torn", [b'{"kind": "train", "st', b"\x00" * 40, b'{"kind": "train", "step": 1, "a": "\xc3', b'{"kind"'])
def test_a_last_line_that_a_crash_cut_short_goes(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"kind": "train", "step": 0}\n' + torn)
    assert steps_of(resume_rows(path, before_step=5)) == [("train", 0)]
    assert path.read_bytes() == b'{"kind": "train", "step": 0}\n'


def test_a_last_line_that_lacks_only_its_end_stays(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"kind": "train", "step": 0}')
    assert steps_of(resume_rows(path, before_step=1)) == [("train", 0)]
    assert path.read_bytes().endswith(b"}\n")


@pytest.mark.parametrize("damaged", ["{", "[]", '{"kind": "train"}', '{"kind": "train", "step": "1"}'])
def test_a_damaged_line_in_the_middle_is_named_and_nothing_is_changed(tmp_path: Path, damaged: str) -> None:
    path = tmp_path / "m.jsonl"
    before = f'{{"kind": "train", "step": 0}}\n{damaged}\n{{"kind": "train", "step": 2}}\n'
    path.write_text(before)
    with pytest.raises(ConfigError, match=r"m\.jsonl:2: "):
        resume_rows(path, before_step=1)
    assert path.read_text() == before


def test_a_cut_that_fails_leaves_the_log_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.jsonl"
    write_rows(path, *run_of_four_steps())
    before = path.read_bytes()

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        resume_rows(path, before_step=1)
    assert path.read_bytes() == before


def test_a_run_that_died_before_its_first_line_resumes_with_none(tmp_path: Path) -> None:
    assert resume_rows(tmp_path / "metrics.jsonl", before_step=0) == []


def test_by_default_there_is_tensorboard_and_no_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it would raise
    sinks = open_sinks(LogSection(), tmp_path, run_name="r", config={}, resume_step=None)
    assert [sink.name for sink in sinks] == ["tensorboard"]
    assert open_sinks(LogSection(tensorboard=False), tmp_path, run_name="r", config={}, resume_step=None) == ()
    for sink in sinks:
        sink.close()


def test_wandb_that_is_asked_for_and_missing_is_the_users_to_mend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    section = LogSection(tensorboard=False, wandb=WandbSection())
    with pytest.raises(ConfigError, match=r"digenrl\[wandb\]"):
        open_sinks(section, tmp_path, run_name="r", config={}, resume_step=None)


def test_a_tensorboard_folder_that_cannot_be_made_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("a file is in the way")
    warnings: list[tuple[str, str]] = []
    sinks = open_sinks(
        LogSection(), tmp_path, run_name="r", config={}, resume_step=None, warn=lambda *warning: warnings.append(warning)
    )
    assert sinks == ()
    assert [kind for kind, _ in warnings] == ["log.tensorboard"]


def test_logging_to_tensorboard_imports_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from digenrl.config.schema import LogSection; import digenrl.metrics.console, "
        "digenrl.metrics.guards, digenrl.metrics.plots; from digenrl.metrics.log import *;"
        f"sinks = open_sinks(LogSection(), Path({str(tmp_path)!r}), run_name='r', config={{}}, resume_step=None);"
        f"log = MetricsLog(Path({str(tmp_path)!r}) / 'm.jsonl', sinks); log.log('train', 0, {{'a': 1.0}}); log.close();"
        "print(sorted(m for m in sys.modules if m in ('torch', 'tensorflow', 'digenrl.runtime', 'digenrl.training')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
