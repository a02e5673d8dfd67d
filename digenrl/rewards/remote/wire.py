"""What goes over the wire between a run and a reward service: JSON, with pictures as PNG and videos as npy, in base64.

A request: ``{"schema": 1, "request": "...", "samples": [{"id": "0/1/2", "prompt": "...", "metadata": {...}, "fps": 16.0,
"media": {"type": "image/png", "data": "..."}}]}``. An answer: ``{"schema": 1, "request": the same, "scores": [{"id": "0/1/2",
"value": 0.5, "parts": {"strict": 1.0}}]}``; the value null says that this sample has no valid score.

Invariants: pixels arrive bit for bit; nothing is ever unpickled; what was sent and what is answered are matched by id, and
counted; what is read is no larger than it says to be before it is unpacked.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from digenrl.ids import SampleId
from digenrl.rewards.base import RewardSample, Score
from digenrl.rewards.http import UnreadableAnswer

SCHEMA = 1
PNG, NPY = "image/png", "video/npy"
MOST_PIXELS = 2**28
"""Of one image, or of all frames of a video: what a request may unpack to."""


class UnreadableRequest(ValueError):
    """The request is not what was agreed."""


def encode_request(request: str, samples: Sequence[RewardSample]) -> bytes:
    """The body of a request. Raises ValueError for metadata that JSON cannot say."""
    plain = [
        {
            "id": str(sample.id),
            "prompt": sample.prompt,
            "metadata": dict(sample.metadata),
            "fps": sample.fps,
            "media": encode_media(sample.image),
        }
        for sample in samples
    ]
    return json.dumps({"schema": SCHEMA, "request": request, "samples": plain}, allow_nan=False).encode()


def decode_request(content: bytes) -> tuple[str, tuple[RewardSample, ...]]:
    """Name and samples of a request. Raises UnreadableRequest."""
    try:
        plain = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UnreadableRequest(f"the body is not JSON: {error}") from error
    if not isinstance(plain, dict) or plain.get("schema") != SCHEMA:
        raise UnreadableRequest(f"the body is not a request of schema {SCHEMA}")
    request, samples = plain.get("request"), plain.get("samples")
    if not isinstance(request, str) or not isinstance(samples, list) or not samples:
        raise UnreadableRequest("`request` (a text) or `samples` (a list of at least one) is missing")
    read = tuple(_decode_sample(number, sample) for number, sample in enumerate(samples))
    if len({sample.id for sample in read}) != len(read):
        raise UnreadableRequest("two samples have the same id")
    return request, read


def encode_answer(request: str, scores: Mapping[SampleId, Score]) -> bytes:
    """The body of an answer; a score that is not finite becomes null."""
    plain = [
        {"id": str(sample), "value": _or_null(score.value), "parts": {n: _or_null(v) for n, v in score.parts.items()}}
        for sample, score in scores.items()
    ]
    return json.dumps({"schema": SCHEMA, "request": request, "scores": plain}, allow_nan=False).encode()


def decode_answer(plain: Any, request: str, wanted: Sequence[SampleId]) -> dict[SampleId, Score]:
    """One score for each sample that was asked for; null and NaN are NaN. Raises UnreadableAnswer for anything else."""
    if not isinstance(plain, dict) or plain.get("schema") != SCHEMA or not isinstance(plain.get("scores"), list):
        raise UnreadableAnswer(f"no `scores` of schema {SCHEMA}")
    if plain.get("request") != request:
        raise UnreadableAnswer("the answer to another request")
    scores: dict[str, Score] = {}
    for entry in plain["scores"]:
        if not isinstance(entry, dict) or not isinstance(entry.get("id"), str) or "value" not in entry:
            raise UnreadableAnswer("a score without `id` or `value`")
        if entry["id"] in scores:
            raise UnreadableAnswer(f"two scores for sample {entry['id']}")
        parts = entry.get("parts", {})
        if not isinstance(parts, dict):
            raise UnreadableAnswer(f"`parts` of sample {entry['id']} is not a mapping")
        numbers = {name: _number(value, entry["id"]) for name, value in parts.items()}
        scores[entry["id"]] = Score(value=_number(entry["value"], entry["id"]), parts=numbers)
    names = {str(sample): sample for sample in wanted}
    if scores.keys() != names.keys():
        missing, foreign = len(names.keys() - scores.keys()), len(scores.keys() - names.keys())
        raise UnreadableAnswer(
            f"{len(scores)} scores for {len(names)} samples: {missing} missing, {foreign} that were not asked for"
        )
    return {sample: scores[name] for name, sample in names.items()}


def encode_media(image: NDArray[np.uint8]) -> dict[str, str]:
    """An image [H, W, 3] as PNG, a video [F, H, W, 3] as npy, each without loss."""
    kind, content = (PNG, png_bytes(image)) if image.ndim == 3 else (NPY, _npy_bytes(image))
    return {"type": kind, "data": base64.b64encode(content).decode("ascii")}


def png_bytes(image: NDArray[np.uint8]) -> bytes:
    """An image [H, W, 3] as a PNG file."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()


def _npy_bytes(video: NDArray[np.uint8]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.ascontiguousarray(video), allow_pickle=False)
    return buffer.getvalue()


def decode_media(media: object) -> NDArray[np.uint8]:
    """The pixels, read-only. Raises UnreadableRequest."""
    if not isinstance(media, dict) or not isinstance(media.get("data"), str):
        raise UnreadableRequest("`media` has no `data`")
    readers = {PNG: _read_png, NPY: _read_npy}
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
    except (ValueError, EOFError) as error:
        raise UnreadableRequest(f"a video is not an npy file: {error}") from error
    if dtype != np.uint8 or fortran or len(shape) != 4 or shape[3] != 3 or min(shape) < 1:
        raise UnreadableRequest(f"a video has dtype {dtype} and shape {shape}; uint8 [F, H, W, 3] in C order is asked for")
    if math.prod(shape) > 3 * MOST_PIXELS or math.prod(shape) != len(content) - file.tell():
        raise UnreadableRequest(f"a video of shape {shape} is too large, or not of the size that it says")
    return np.frombuffer(content, dtype=np.uint8, offset=file.tell()).reshape(shape).copy()


def _decode_sample(number: int, plain: object) -> RewardSample:
    if not isinstance(plain, dict):
        raise UnreadableRequest(f"sample {number} is not a mapping")
    prompt, metadata, fps = plain.get("prompt"), plain.get("metadata", {}), plain.get("fps")
    if not isinstance(prompt, str) or not isinstance(metadata, dict):
        raise UnreadableRequest(f"sample {number} has no `prompt`, or its `metadata` is not a mapping")
    if fps is not None and (isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps < math.inf):
        raise UnreadableRequest(f"sample {number} has the fps {fps!r}")
    image = decode_media(plain.get("media"))
    return RewardSample(id=_sample_id(plain.get("id")), prompt=prompt, metadata=metadata, image=image, fps=fps)


def _sample_id(text: object) -> SampleId:
    parts = text.split("/") if isinstance(text, str) else []
    if len(parts) != 3 or not all(part.isascii() and part.isdigit() and len(part) < 19 for part in parts):
        raise UnreadableRequest(f"{text!r} is not a sample's id, which is step/prompt/sample")
    return SampleId(*map(int, parts))


def _number(value: object, sample: str) -> float:
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UnreadableAnswer(f"{value!r:.100} for sample {sample}, which is not a number")
    try:
        return float(value)
    except OverflowError as error:
        raise UnreadableAnswer(f"an integer of enormous size for sample {sample}") from error


def _or_null(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
