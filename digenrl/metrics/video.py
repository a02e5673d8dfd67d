"""Videos as files and as still pictures, for people to look at.

Invariant: what is written here is a compressed copy; rewards see the frames themselves.
"""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from digenrl.errors import RunFailed

CODECS = ("libx264", "mpeg4")
"""The first that the installed FFmpeg has: H.264, which browsers play; or MPEG-4, which most players do."""
_QUALITY = {"libx264": {"crf": "17", "preset": "medium"}, "mpeg4": {"qscale": "2"}}
_STRIP = 4


def save_video(path: Path, frames: NDArray[np.uint8], fps: float) -> None:
    """Write an mp4 file, which must not be there yet. frames: [F, H, W, 3].

    Raises OSError when the file cannot be written, and RunFailed where no encoder is installed.
    """
    import av

    codec = next((name for name in CODECS if name in av.codecs_available), None)
    if codec is None:
        raise RunFailed(
            "The installed FFmpeg encodes neither H.264 nor MPEG-4.",
            why="Videos are kept as mp4 files.",
            fix="pip install --force-reinstall av, whose wheels bring an FFmpeg that does; or set log.sample_freq=0.",
        )
    even = _even_sized(frames)
    with path.open("xb") as file, av.open(file, "w", format="mp4", options={"movflags": "faststart"}) as container:
        stream = container.add_stream(codec, rate=Fraction(fps).limit_denominator(1000), options=_QUALITY[codec])
        stream.height, stream.width = even.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.thread_count = 1
        for frame in even:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        container.mux(stream.encode())


def filmstrips(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pictures as they are; of videos, up to four frames side by side, the first and the last among them.

    images: [N, H, W, 3] or [N, F, H, W, 3]. Returns [N, H, W', 3].
    """
    if images.ndim == 4:
        return images
    chosen = sorted({round(place) for place in np.linspace(0, images.shape[1] - 1, _STRIP)})
    return np.concatenate([images[:, number] for number in chosen], axis=2)


def stills(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pictures as they are; of videos, the middle frame. Shapes as of ``filmstrips``. Returns [N, H, W, 3]."""
    return images if images.ndim == 4 else images[:, images.shape[1] // 2]


def _even_sized(frames: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """H.264 halves the colours' resolution, so an odd side gets its last line twice."""
    height, width = frames.shape[1:3]
    return np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
