"""Scalars and pictures for TensorBoard, in one event file of the run folder.

Written record by record with TensorBoard's own protocol buffers, without its writer thread: an error shows in the call that
caused it, and a step that was logged survives the death of the process. On a resume the event files are merged into a new one
that holds only what is older than the first step to come, so that any reader sees each step once, whatever it purges by itself.
"""

from __future__ import annotations

import io
import os
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from digenrl.errors import ConfigError
from digenrl.metrics.append import RecordFile
from digenrl.metrics.log import is_kept

_PREFIX = "events.out.tfevents."
_HEADER = struct.Struct("<QI")
"""Length of a record and the masked CRC of that length; four bytes of CRC follow the record."""


class TensorBoardSink:
    """Writes ``train/NAME`` at the RL step and ``eval/NAME`` at the policy version; pictures losslessly, as PNG."""

    name = "tensorboard"

    def __init__(self, folder: Path, *, resume_step: int | None) -> None:
        """Open a new event file in ``folder``. resume_step: drop what the folder has of this step and later ones."""
        self._protos = _Protos()
        folder.mkdir(parents=True, exist_ok=True)
        old = sorted(folder.glob(f"{_PREFIX}*.digenrl"))
        # Above any there: readers take files in the order of their names, also when the clock was set back.
        stamp = max(int(time.time()), *(int(path.name.removeprefix(_PREFIX).partition(".")[0]) + 1 for path in old), 0)
        path, draft = folder / f"{_PREFIX}{stamp:010d}.digenrl", folder / "resume.tmp"
        with draft.open("wb") as file:
            file.write(self._protos.record(self._protos.Event(wall_time=time.time(), file_version="brain.Event:2")))
            if resume_step is not None:
                file.writelines(self._kept(old, resume_step))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        for each in old if resume_step is not None else ():
            each.unlink()
        self._file = RecordFile(path)

    def log(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        """One record with all scalars of a step."""
        values = [self._protos.scalar(f"{kind}/{name}", value) for name, value in metrics.items()]
        self._add(step, values)

    def images(self, tag: str, step: int, images: NDArray[np.uint8], captions: Sequence[str]) -> None:
        """One record with the pictures and, under ``tag``_captions, a numbered list of what they show."""
        listed = "\n".join(f"{i}. {' '.join(caption.split())}" for i, caption in enumerate(captions, start=1))
        self._add(step, [self._protos.images(tag, images), self._protos.text(f"{tag}_captions", listed)])

    def close(self) -> None:
        """Close the event file."""
        self._file.close()

    def _add(self, step: int, values: Sequence[Any]) -> None:
        if values:
            summary = self._protos.Summary(value=values)
            self._file.append(self._protos.record(self._protos.Event(wall_time=time.time(), step=step, summary=summary)))

    def _kept(self, paths: Sequence[Path], resume_step: int) -> Iterator[bytes]:
        seen: set[tuple[str, int]] = set()  # a resume that was killed before it deleted the old file leaves its records twice
        for path in paths:
            for record in _records(path):
                try:
                    event = self._protos.Event.FromString(record[_HEADER.size : -4])
                except self._protos.DecodeError:
                    break
                tag = event.summary.value[0].tag if event.summary.value else ""
                if tag and (tag, event.step) not in seen and is_kept(tag.partition("/")[0], event.step, resume_step):
                    seen.add((tag, event.step))
                    yield record


def _records(path: Path) -> Iterator[bytes]:
    """The whole records of an event file, header and checksum included, up to the first that is cut short."""
    with path.open("rb") as file:
        while len(header := file.read(_HEADER.size)) == _HEADER.size:
            length = _HEADER.unpack(header)[0]
            rest = file.read(length + 4) if length < os.fstat(file.fileno()).st_size else b""
            if len(rest) < length + 4:
                return
            yield header + rest


class _Protos:
    """TensorBoard's protocol buffers and how our values are put into them; imported when a sink is opened."""

    def __init__(self) -> None:
        try:
            from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
            from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]
            from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
            from tensorboard.plugins.image import metadata as image_metadata  # type: ignore[import-untyped]
            from tensorboard.plugins.scalar import metadata as scalar_metadata  # type: ignore[import-untyped]
            from tensorboard.plugins.text import metadata as text_metadata  # type: ignore[import-untyped]
            from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]
            from tensorboard.util.tensor_util import make_tensor_proto  # type: ignore[import-untyped]
        except ImportError as error:
            raise ConfigError(
                f"log.tensorboard: true needs tensorboard, and it cannot be imported: {error}.",
                fix="pip install tensorboard, or set log.tensorboard=false; metrics.jsonl is written anyway.",
            ) from error
        self.Event, self.Summary, self.DecodeError = Event, Summary, DecodeError
        self._writer, self._tensor = RecordWriter, make_tensor_proto
        self._scalar = scalar_metadata.create_summary_metadata(display_name=None, description=None)
        self._text = text_metadata.create_summary_metadata(display_name=None, description=None)
        self._image = image_metadata.create_summary_metadata(display_name=None, description=None)

    def scalar(self, tag: str, value: float) -> Any:
        """A number, in float32 as TensorBoard has it."""
        with np.errstate(over="ignore"):
            return self.Summary.Value(tag=tag, metadata=self._scalar, tensor=self._tensor(np.float32(value)))

    def text(self, tag: str, markdown: str) -> Any:
        """A text that TensorBoard renders as Markdown."""
        return self.Summary.Value(tag=tag, metadata=self._text, tensor=self._tensor(markdown.encode()))

    def images(self, tag: str, images: NDArray[np.uint8]) -> Any:
        """Pictures [N, H, W, 3]: width, height and N files in PNG's format, as TensorBoard's image plugin reads them."""
        height, width = images.shape[1:3]
        strings = [str(width).encode(), str(height).encode(), *(_png(image) for image in images)]
        return self.Summary.Value(tag=tag, metadata=self._image, tensor=self._tensor(strings))

    def record(self, event: Any) -> bytes:
        """An event as one record of an event file."""
        buffer = io.BytesIO()
        self._writer(buffer).write(event.SerializeToString())
        return buffer.getvalue()


def _png(image: NDArray[np.uint8]) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="PNG")
    return buffer.getvalue()
