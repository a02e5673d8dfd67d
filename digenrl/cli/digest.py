"""``digenrl digest``."""

from __future__ import annotations

import json
from pathlib import Path

from digenrl.runtime.run_folder import RunFolder
from digenrl.training.digest import digest_of_folder


def run(run_folder: str) -> None:
    """Print the digests of the weights that a run has written."""
    print(json.dumps(digest_of_folder(RunFolder(Path(run_folder)).final), indent=2))
