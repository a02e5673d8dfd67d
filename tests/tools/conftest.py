"""The tool's modules import each other by their plain names, as `python tools/tiny_model/build.py` has them."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools" / "tiny_model"))
