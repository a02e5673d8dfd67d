"""What goes over the wire between a run and a reward service: JSON, with pictures and videos in base64 (see media).

A request: ``{"schema": 1, "request": "...", "samples": [{"id": "0/1/2", "prompt": "...", "metadata": {...}, "fps": 16.0,
"media": {"type": "image/png", "data": "..."}}]}``. An answer: ``{"schema": 1, "request": the same, "scores": [{"id": "0/1/2",
"value": 0.5, "parts": {"strict": 1.0}}]}``; the value null says that this sample has no valid score. Health: ``{"status": "ok",
"schema": 1, "rewards": ["jpeg"], "media": ["image", "video"], "sample_size": null, "compares_groups": false, "accepts":
["image/png", "video/npy", "video/mp4"]}``, of which all but the first two may be left out.

Invariants: pixels arrive bit for bit; nothing is ever unpickled; what was sent and what is answered are matched by id, and
counted; what is read is no larger than it says to be before it is unpacked.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from digenrl.config.registry import MEDIA
from digenrl.config.reward_checks import Needs
from digenrl.ids import SampleId
from digenrl.rewards.base import RewardSample, Score
from digenrl.rewards.http import UnreadableAnswer
from digenrl.rewards.remote.media import NPY, PNG, UnreadableRequest, VideoFormat, decode_media, encode_media

SCHEMA = 1
MOST_PIXELS_IN_ALL = 2**30
"""Of all samples of a request: small files can hold large pictures."""
ANYTHING = Needs(media=MEDIA)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What a service says of itself."""

    rewards: tuple[str, ...] = ()
    """Names."""
    needs: Needs = ANYTHING
    """Which samples it can score."""
    accepts: tuple[str, ...] = (PNG, NPY)
    """Kinds of parts that it reads."""


def encode_request(request: str, samples: Sequence[RewardSample], video: VideoFormat = "npy") -> bytes:
    """The body of a request. video: what videos are sent as. Raises ValueError for metadata that JSON cannot say."""
    plain = [
        {
            "id": str(sample.id),
            "prompt": sample.prompt,
            "metadata": dict(sample.metadata),
            "fps": sample.fps,
            "media": encode_media(sample.image, video, sample.fps),
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
    read: list[RewardSample] = []
    pixels = 0
    for number, sample in enumerate(samples):
        read.append(_decode_sample(number, sample))
        pixels += read[-1].image.size // 3
        if pixels > MOST_PIXELS_IN_ALL:
            raise UnreadableRequest(f"its pictures have more than {MOST_PIXELS_IN_ALL} pixels in all: send fewer samples")
    if len({sample.id for sample in read}) != len(read):
        raise UnreadableRequest("two samples have the same id")
    return request, tuple(read)


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


def encode_health(served: Served) -> bytes:
    """The body of an answer to ``/health``."""
    plain = {
        "status": "ok",
        "schema": SCHEMA,
        "rewards": served.rewards,
        "media": served.needs.media,
        "sample_size": served.needs.sample_size,
        "compares_groups": served.needs.compares_groups,
        "accepts": served.accepts,
    }
    return json.dumps(plain).encode()


def decode_health(plain: Any) -> Served:
    """What a service says of itself. Raises UnreadableAnswer for what is none of this schema."""
    if not isinstance(plain, dict) or plain.get("status") != "ok" or plain.get("schema") != SCHEMA:
        raise UnreadableAnswer(f"it does not say that it is a reward service of schema {SCHEMA}")
    media, accepts, size = plain.get("media", MEDIA), plain.get("accepts", (PNG, NPY)), plain.get("sample_size")
    if not _are_texts(media) or not media or not set(media) <= set(MEDIA):
        raise UnreadableAnswer(f"`media` is {media!r:.100}, and not of {', '.join(MEDIA)}")
    if not _are_texts(accepts) or not _are_texts(plain.get("rewards", ())):
        raise UnreadableAnswer("`accepts` or `rewards` is not a list of texts")
    if size is not None and not (isinstance(size, list) and len(size) == 2 and all(type(side) is int for side in size)):
        raise UnreadableAnswer(f"`sample_size` is {size!r:.100}, and not [height, width]")
    compares = plain.get("compares_groups", False)
    if not isinstance(compares, bool):
        raise UnreadableAnswer(f"`compares_groups` is {compares!r:.100}, and not true or false")
    needs = Needs(media=tuple(media), sample_size=None if size is None else (size[0], size[1]), compares_groups=compares)
    return Served(rewards=tuple(plain.get("rewards", ())), needs=needs, accepts=tuple(accepts))


def _are_texts(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(each, str) for each in value)


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
