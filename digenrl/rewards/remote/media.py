"""Pictures and videos as parts of a request: PNG, npy and mp4, in base64.

Invariants: what is written here comes back bit for bit; what is read is no larger than it says to be, and is nothing but
pixels (never a pickle, and of mp4 files no codec but H.264).
"""

from __future__ import annotations

import base64
import binascii
import io
import math
import tokenize
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

PNG, NPY, MP4 = "image/png", "video/npy", "video/mp4"
READ = (PNG, NPY, MP4)
"""What a server of ours reads."""
MOST_PIXELS = 2**28
"""Of one image, or of all frames of a video: what a part may unpack to."""
VideoFormat = Literal["npy", "mp4"]
_ENCODER = "libx264rgb"


class UnreadableRequest(ValueError):
    """The request is not what was agreed."""


def can_write_mp4() -> bool:
    """Whether the installed FFmpeg has H.264 for RGB, which loses nothing."""
    import av

    return _ENCODER in av.codecs_available


def encode_media(image: NDArray[np.uint8], video: VideoFormat = "npy", fps: float | None = None) -> dict[str, str]:
    """An image [H, W, 3] as PNG, a video [F, H, W, 3] as npy or mp4, each without loss."""
    if image.ndim == 3:
        kind, content = PNG, png_bytes(image)
    elif video == "npy":
        kind, content = NPY, _npy_bytes(image)
    else:
        kind, content = MP4, mp4_bytes(image, fps or 16.0)
    return {"type": kind, "data": base64.b64encode(content).decode("ascii")}


def png_bytes(image: NDArray[np.uint8]) -> bytes:
    """An image [H, W, 3] as a PNG file."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()


def mp4_bytes(video: NDArray[np.uint8], fps: float) -> bytes:
    """A video [F, H, W, 3] as an mp4 file, in lossless H.264 of RGB, which few players show."""
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        rate = Fraction(fps).limit_denominator(1000)
        stream = container.add_stream(_ENCODER, rate=rate, options={"crf": "0", "preset": "ultrafast"})
        stream.height, stream.width = video.shape[1:3]
        stream.pix_fmt = "rgb24"
        stream.thread_count = 1
        for frame in video:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        container.mux(stream.encode())
    return buffer.getvalue()


def decode_media(media: object) -> NDArray[np.uint8]:
    """The pixels, read-only: [H, W, 3] or [F, H, W, 3]. Raises UnreadableRequest."""
    if not isinstance(media, dict) or not isinstance(media.get("data"), str):
        raise UnreadableRequest("`media` has no `data`")
    readers = {PNG: _read_png, NPY: _read_npy, MP4: _read_mp4}
    kind = media.get("type")
    if not isinstance(kind, str) or kind not in readers:
        raise UnreadableRequest(f"`media.type` is {kind!r}, and known are {', '.join(readers)}")
    try:
        content = base64.b64decode(media["data"], validate=True)
    except (binascii.Error, ValueError) as error:
        raise UnreadableRequest(f"`media.data` is not base64: {error}") from error
    pixels = readers[kind](content)
    pixels.setflags(write=False)
    return pixels


def _npy_bytes(video: NDArray[np.uint8]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.ascontiguousarray(video), allow_pickle=False)
    return buffer.getvalue()


def _read_png(content: bytes) -> NDArray[np.uint8]:
    try:
        with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
            if math.prod(image.size) > MOST_PIXELS:
                raise UnreadableRequest(f"an image of {image.size} pixels is too large")
            return np.array(image.convert("RGB"))
    except UnreadableRequest:
        raise
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise UnreadableRequest(f"an image is not a PNG: {error}") from error


def _read_npy(content: bytes) -> NDArray[np.uint8]:
    file = io.BytesIO(content)
    try:
        version = np.lib.format.read_magic(file)
        if version != (1, 0):
            raise UnreadableRequest(f"a video is an npy file of version {version}, and 1.0 is asked for")
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
    except UnreadableRequest:
        raise
    except (ValueError, EOFError, tokenize.TokenError) as error:  # numpy reads a header as a Python literal
        raise UnreadableRequest(f"a video is not an npy file: {error}") from error
    if dtype != np.uint8 or fortran or len(shape) != 4 or shape[3] != 3 or min(shape) < 1:
        raise UnreadableRequest(f"a video has dtype {dtype} and shape {shape}; uint8 [F, H, W, 3] in C order is asked for")
    if math.prod(shape) > 3 * MOST_PIXELS or math.prod(shape) != len(content) - file.tell():
        raise UnreadableRequest(f"a video of shape {shape} is too large, or not of the size that it says")
    return np.frombuffer(content, dtype=np.uint8, offset=file.tell()).reshape(shape).copy()


def _read_mp4(content: bytes) -> NDArray[np.uint8]:
    import av

    frames: list[NDArray[np.uint8]] = []
    try:
        with av.open(io.BytesIO(content), "r", format="mp4") as container:
            streams = container.streams.video
            stream = streams[0] if len(streams) == 1 else None
            # Of a codec that this FFmpeg does not know, there is no context.
            if stream is None or stream.codec_context is None or stream.codec_context.name != "h264":
                raise UnreadableRequest("a video is not one stream of H.264")
            stream.thread_count = 1
            if stream.codec_context.height * stream.codec_context.width * max(stream.frames, 1) > MOST_PIXELS:
                raise UnreadableRequest(f"a video has more than {MOST_PIXELS} pixels in all")
            for frame in container.decode(stream):
                if (len(frames) + 1) * frame.height * frame.width > MOST_PIXELS:
                    raise UnreadableRequest(f"a video has more than {MOST_PIXELS} pixels in all")
                frames.append(frame.to_ndarray(format="rgb24"))
    except UnreadableRequest:
        raise
    except (av.FFmpegError, ValueError, EOFError) as error:
        raise UnreadableRequest(f"a video is not an mp4 file: {error}") from error
    _check_frames(frames)
    return np.stack(frames)


def _check_frames(frames: Sequence[NDArray[np.uint8]]) -> None:
    if not frames:
        raise UnreadableRequest("a video has no frames")
    if len({frame.shape for frame in frames}) != 1:
        raise UnreadableRequest("the frames of a video are of different sizes")
