"""Output folders that are complete or not there at all, and never overwrite anything."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from digenrl.errors import ConfigError


def check_is_free(path: Path) -> None:
    """Raise ConfigError unless nothing is at ``path``, or an empty folder. To be asked before the long work."""
    try:
        taken = os.path.lexists(path) and (path.is_symlink() or not path.is_dir() or any(path.iterdir()))
    except OSError as error:
        raise _unusable(path, error) from error
    if taken:
        raise ConfigError(
            f"{str(path)!r} is not an empty folder.",
            why="It may hold something that is wanted, and nothing is ever overwritten.",
            fix="Choose another folder, or delete or move this one yourself.",
        )


@contextmanager
def fresh_folder(path: Path) -> Iterator[Path]:
    """A hidden folder beside ``path`` to write into; it gets its name in one step when all went well, and else is deleted.

    Raises ConfigError when ``path`` is not free, or cannot be written.
    """
    check_is_free(path)
    target = Path(os.path.abspath(path))
    draft = target.parent / f".{target.name}.tmp-{uuid.uuid4().hex}"
    try:
        try:
            draft.mkdir(parents=True)
        except OSError as error:
            raise _unusable(path, error) from error
        yield draft
        check_is_free(path)
        try:
            draft.replace(target)
        except OSError as error:
            raise _unusable(path, error) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _unusable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"Cannot write {str(path)!r}: {error.strerror or error}.", fix="Choose a folder that you may write to.")
