"""Videos as files: what a player finds in them, and the still pictures beside them."""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np
import pytest

from digenrl.errors import RunFailed
from digenrl.metrics.video import filmstrips, save_video, stills


def moving_bar(frames: int = 9, height: int = 32, width: int = 48) -> np.ndarray:
    video = np.zeros((frames, height, width, 3), dtype=np.uint8)
    for number in range(frames):
        video[number, :, 4 * number : 4 * number + 8] = (200, 40, 90)
    return video


def read(path: Path) -> tuple[np.ndarray, float, str]:
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        return np.stack(frames), float(stream.average_rate), stream.codec_context.name


def test_a_saved_video_has_all_frames_in_order_at_its_rate_and_looks_the_same(tmp_path: Path) -> None:
    video = moving_bar()
    save_video(tmp_path / "x.mp4", video, 12.5)
    frames, rate, codec = read(tmp_path / "x.mp4")
    assert frames.shape == video.shape
    assert rate == 12.5
    assert codec == "h264"
    assert float(np.abs(frames.astype(int) - video).mean()) < 6, "compressed, yet the same picture"
    for number, frame in enumerate(frames.astype(int)):
        distances = [np.abs(frame - original).mean() for original in video]
        assert int(np.argmin(distances)) == number


def test_the_same_frames_give_the_same_file(tmp_path: Path) -> None:
    for name in ("a.mp4", "b.mp4"):
        save_video(tmp_path / name, moving_bar(), 16)
    assert (tmp_path / "a.mp4").read_bytes() == (tmp_path / "b.mp4").read_bytes()


def test_odd_sides_get_their_last_line_twice(tmp_path: Path) -> None:
    save_video(tmp_path / "x.mp4", moving_bar(3, 31, 45), 16)
    assert read(tmp_path / "x.mp4")[0].shape == (3, 32, 46, 3)


def test_a_video_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "x.mp4").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        save_video(tmp_path / "x.mp4", moving_bar(), 16)
    assert (tmp_path / "x.mp4").read_bytes() == b"mine"


def test_without_h264_the_next_encoder_is_taken_and_without_any_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(av, "codecs_available", {"mpeg4"})
    save_video(tmp_path / "x.mp4", moving_bar(), 16)
    assert read(tmp_path / "x.mp4")[2] == "mpeg4"
    monkeypatch.setattr(av, "codecs_available", set())
    with pytest.raises(RunFailed, match="encodes neither"):
        save_video(tmp_path / "y.mp4", moving_bar(), 16)


def test_a_filmstrip_shows_first_and_last_frame_and_pictures_stay_as_they_are() -> None:
    videos = np.stack([moving_bar(), moving_bar()])
    strips = filmstrips(videos)
    assert strips.shape == (2, 32, 4 * 48, 3)
    assert np.array_equal(strips[0, :, :48], videos[0, 0])
    assert np.array_equal(strips[1, :, -48:], videos[1, -1])
    assert filmstrips(videos[:, :2]).shape == (2, 32, 2 * 48, 3)
    assert np.array_equal(stills(videos)[0], videos[0, 4])
    assert np.array_equal(filmstrips(videos[:, 0]), videos[:, 0])
    assert np.array_equal(stills(videos[:, 0]), videos[:, 0])
