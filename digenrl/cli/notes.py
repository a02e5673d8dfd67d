"""What a command says beside its output, which may be JSON."""

from __future__ import annotations

import sys


def note(sentence: str) -> None:
    """Say on stderr what the user may want to know and need not mend."""
    print(f"note: {sentence}", file=sys.stderr)
