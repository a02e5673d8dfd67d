"""What TensorBoard itself reads from our event files."""

from __future__ import annotations

import io
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.util.tensor_util import make_ndarray

from digenrl.metrics.tensorboard import TensorBoardSink


def everything_in(folder: Path) -> Counter[tuple[str, int]]:
    """How often each (tag, step) stands in the event files, before any purging by a reader."""
    found: Counter[tuple[str, int]] = Counter()
    for path in sorted(folder.glob("*tfevents*")):
        for event in EventFileLoader(str(path)).Load():
            found.update((value.tag, event.step) for value in event.summary.value)
    return found


def accumulated(folder: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    accumulator.Reload()
    return accumulator


def series(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, float(make_ndarray(event.tensor_proto))) for event in accumulated(folder).Tensors(tag)]


def pictures(seed: int, count: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 5, 7, 3), dtype=np.uint8)


def train(folder: Path, steps: range, *, resume_step: int | None = None, offset: float = 0.0) -> None:
    """Log as a run does that evaluates every second version and draws pictures at every step.

    Closing the sink writes nothing, so what is there afterwards is also what a killed run leaves.
    """
    sink = TensorBoardSink(folder, resume_step=resume_step)
    for step in steps:
        sink.images("train/samples", step, pictures(step), ["one", "two", "three"])
        sink.log("train", step, {"reward_mean": step + offset, "grad_norm": 1.0})
        if step % 2:
            sink.log("eval", step + 1, {"reward": step + offset})
            sink.images("eval/samples", step + 1, pictures(100 + step), ["one", "two", "three"])
    sink.close()


def test_scalars_are_read_back_at_their_steps(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path, resume_step=None)
    sink.log("eval", 0, {"reward": -0.5})
    for step in range(3):
        sink.log("train", step, {"reward_mean": step / 4, "timing_s/generate": 2.0})
    sink.close()
    assert series(tmp_path, "train/reward_mean") == [(0, 0.0), (1, 0.25), (2, 0.5)]
    assert series(tmp_path, "eval/reward") == [(0, -0.5)]
    assert accumulated(tmp_path).SummaryMetadata("train/timing_s/generate").plugin_data.plugin_name == "scalars"


def test_pictures_are_read_back_with_the_same_pixels_and_their_captions(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path, resume_step=None)
    images = pictures(1)
    sink.images("train/samples", 4, images, ["a red\ncircle (0.31)", "two dogs", "ein Hündchen 🐶"])
    sink.close()
    accumulator = accumulated(tmp_path)
    [event] = accumulator.Tensors("train/samples")
    width, height, *files = make_ndarray(event.tensor_proto)
    assert (event.step, width, height) == (4, b"7", b"5")
    assert np.array_equal(np.stack([np.asarray(Image.open(io.BytesIO(file))) for file in files]), images)
    assert accumulator.SummaryMetadata("train/samples").plugin_data.plugin_name == "images"
    [captions] = accumulator.Tensors("train/samples_captions")
    assert make_ndarray(captions.tensor_proto).item().decode() == "1. a red circle (0.31)\n2. two dogs\n3. ein Hündchen 🐶"


def test_a_step_is_on_disk_before_the_sink_is_closed(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path, resume_step=None)
    sink.log("train", 0, {"reward_mean": 1.0})
    assert everything_in(tmp_path) == {("train/reward_mean", 0): 1}
    sink.close()


def test_a_step_without_a_finite_number_writes_nothing(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path, resume_step=None)
    sink.log("train", 0, {})
    sink.log("train", 1, {"huge": 1e300})
    sink.close()
    assert series(tmp_path, "train/huge") == [(1, float("inf"))]
    assert everything_in(tmp_path) == {("train/huge", 1): 1}


@pytest.mark.parametrize("resume_step", range(7))
def test_after_a_resume_everything_stands_there_once_with_its_last_value(tmp_path: Path, resume_step: int) -> None:
    train(tmp_path / "straight", range(6))
    train(tmp_path / "resumed", range(6), offset=0.125)
    train(tmp_path / "resumed", range(resume_step, 6), resume_step=resume_step)
    assert everything_in(tmp_path / "resumed") == everything_in(tmp_path / "straight")
    assert set(everything_in(tmp_path / "resumed").values()) == {1}
    rewards = series(tmp_path / "resumed", "train/reward_mean")
    assert rewards == [(step, step + 0.125 * (step < resume_step)) for step in range(6)]


def test_a_run_that_is_resumed_twice_has_each_step_once(tmp_path: Path) -> None:
    train(tmp_path, range(5))
    train(tmp_path, range(2, 4), resume_step=2)
    train(tmp_path, range(3, 6), resume_step=3)
    assert [step for step, _ in series(tmp_path, "train/reward_mean")] == list(range(6))
    assert set(everything_in(tmp_path).values()) == {1}


def test_a_record_that_a_crash_cut_short_does_not_hide_what_comes_after_the_resume(tmp_path: Path) -> None:
    train(tmp_path, range(3))
    [path] = tmp_path.glob("*tfevents*")
    path.write_bytes(path.read_bytes()[:-5])
    train(tmp_path, range(2, 4), resume_step=2)
    assert [step for step, _ in series(tmp_path, "train/reward_mean")] == [0, 1, 2, 3]


def test_a_resume_that_was_killed_before_it_deleted_the_old_file_leaves_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path, range(3))

    def killed(self: Path, missing_ok: bool = False) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            TensorBoardSink(tmp_path, resume_step=3)
    assert set(everything_in(tmp_path).values()) == {2}
    TensorBoardSink(tmp_path, resume_step=3).close()
    assert set(everything_in(tmp_path).values()) == {1}


def test_event_files_of_others_are_left_alone(tmp_path: Path) -> None:
    foreign = tmp_path / "events.out.tfevents.of-mine"
    foreign.write_bytes(b"mine")
    TensorBoardSink(tmp_path, resume_step=0).close()
    assert foreign.read_bytes() == b"mine"
