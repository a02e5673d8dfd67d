"""``python -m digenrl.testing FAMILY DIR``: build a tiny model folder of a family, to try a recipe with."""

from __future__ import annotations

import argparse
from pathlib import Path

from digenrl.models.loading import quiet_libraries
from digenrl.testing.tiny_pipelines import BUILDERS


def main() -> None:
    """Build what the command line names."""
    parser = argparse.ArgumentParser(prog="python -m digenrl.testing", description=__doc__)
    parser.add_argument("family", choices=[*BUILDERS, "all"], help="whose model to build; all: each in a folder of its name")
    parser.add_argument("folder", type=Path, help="where to; the folder is made")
    asked = parser.parse_args()
    quiet_libraries()
    for family in BUILDERS if asked.family == "all" else (asked.family,):
        folder = asked.folder / family if asked.family == "all" else asked.folder
        print(f"{family}: {BUILDERS[family](folder)}")


if __name__ == "__main__":
    main()
