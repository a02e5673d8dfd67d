"""A file that records are added to, each whole or not at all: a full disk or a signal leaves no half of one behind."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


class RecordFile:
    """Appends records to one file. Unbuffered: a record that is written survives the death of the process."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._good = os.fstat(self._file.fileno()).st_size

    def append(self, record: bytes) -> None:
        """Write one record. Raises OSError when it cannot be; the file then ends after the record before."""
        try:
            rest = memoryview(record)
            while rest:
                rest = rest[self._file.write(rest) :]
        except BaseException:  # a signal that drops the command must not leave half a record either
            with suppress(OSError):  # not a plain file; the first error is the one to tell
                os.ftruncate(self._file.fileno(), self._good)
            raise
        self._good += len(record)

    def close(self) -> None:
        """Close the file; nothing is left to write."""
        self._file.close()
