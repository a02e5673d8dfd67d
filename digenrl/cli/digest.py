"""``digenrl digest``."""

from __future__ import annotations

import json
import sys

from digenrl.config.text import expand_home
from digenrl.runtime.run_folder import RunFolder
from digenrl.training.checkpoint import load_newest
from digenrl.training.digest import digests


def run(run_folder: str) -> None:
    """Print the digests of the weights of a run's newest checkpoint."""
    checkpoint, refused = load_newest(RunFolder(expand_home(run_folder, where="RUN")).checkpoints)
    for problem in refused:
        print(f"warning: passed over: {problem}", file=sys.stderr)
    print(json.dumps(digests(checkpoint.weights), indent=2))
