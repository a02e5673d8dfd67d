"""Reading text files: UTF-8 whatever the locale, with the line of a bad byte."""

from __future__ import annotations

from pathlib import Path

from digenrl.errors import ConfigError


def read_text(path: Path) -> str:
    """The file as text, without a byte order mark. Raises ConfigError naming file:line of a byte that is not UTF-8."""
    try:
        raw = path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the path
        raise ConfigError(
            f"Cannot read {str(path)!r}: {getattr(error, 'strerror', None) or error}.",
            fix="Check the path and its permissions.",
        ) from error
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(
            f"{path}:{line}: byte 0x{error.object[error.start]:02x} is not UTF-8.",
            why="Text files are read as UTF-8, whatever the machine's locale.",
            fix="Convert the file, for example: iconv -f latin1 -t utf-8 OLD > NEW.",
        ) from error


def expand_home(path: str, *, where: str) -> Path:
    """The path with ``~`` replaced by the home folder. Raises ConfigError for the home of a user who is not there."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"{where}: the home folder in {path!r} is not known.", fix="Write the whole path, or ./~name for a file of that name."
        ) from error
