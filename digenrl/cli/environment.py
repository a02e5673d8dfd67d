"""What must be set in the environment before torch is imported."""

from __future__ import annotations

import os
import sys


def calm_threads() -> None:
    """Let waiting threads sleep, since spinning costs up to 9 times the wall time on shared cores. Call before torch's import."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def note(sentence: str) -> None:
    """Say something about the command line that is no error, beside the output that may be JSON."""
    print(f"note: {sentence}", file=sys.stderr)
