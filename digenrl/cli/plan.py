"""``digenrl plan``: which layout and schedule to use on so many devices."""

from __future__ import annotations

import json
from collections.abc import Sequence

from digenrl.cli.notes import note
from digenrl.simulation.plan import plan
from digenrl.simulation.source import load_source


def run(source: str, overrides: Sequence[str], *, devices: int | None, as_json: bool) -> None:
    """Print the ranked table and the reason for its first row, or raise ConfigError."""
    loaded = load_source(source, overrides)
    for sentence in loaded.notes:
        note(sentence)
    found = plan(loaded, devices)
    if as_json:
        print(json.dumps(found.to_plain(), indent=2))
        return
    print("\n".join(found.lines()))
