"""Metrics and pictures for Weights & Biases, an extra: ``pip install "digenrl[wandb]"``.

Numbers stand on axes of their own (train/step, eval/step), since W&B's built-in step only rises and pictures of a step that was
generated ahead come before the numbers of the step before. A resumed run goes on under the id that lies in the run folder. W&B
cannot take rows back: a step that is trained again keeps its first row there; metrics.jsonl has the row that the weights come
from. In offline mode nothing is known of the earlier part, which is a folder of its own.
"""

from __future__ import annotations

import importlib
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from digenrl.config.schema import WandbSection
from digenrl.errors import ConfigError

ID_FILE = "wandb-id.txt"


def import_wandb() -> Any:
    """The library. Raises ConfigError when it is not installed."""
    try:
        return importlib.import_module("wandb")
    except ImportError as error:
        raise ConfigError(
            f"log.wandb needs the wandb library, and it cannot be imported: {error}.",
            fix='pip install "digenrl[wandb]", or take the section log.wandb out; metrics.jsonl is written anyway.',
        ) from error


class WandbSink:
    """One W&B run."""

    name = "wandb"

    def __init__(self, wandb: Any, section: WandbSection, folder: Path, *, run_name: str, config: Mapping[str, Any]) -> None:
        self._wandb = wandb
        self._run = wandb.init(
            project=section.project,
            entity=section.entity,
            mode=section.mode,
            name=run_name,
            id=_run_id(folder),
            resume="allow" if section.mode == "online" else None,  # offline parts cannot be continued
            dir=str(folder),
            config=dict(config),
        )
        self._axes: set[str] = set()
        self._known = {key: value for key, value in dict(self._run.summary).items() if key.endswith("step")}
        """The last step on each axis that the run had before it was resumed."""

    def log(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        """All numbers of a step or an evaluation as ``kind/name``."""
        self._log(f"{kind}/*", f"{kind}/step", step, {f"{kind}/{name}": value for name, value in metrics.items()})

    def images(self, tag: str, step: int, images: NDArray[np.uint8], captions: Sequence[str]) -> None:
        """Pictures with their captions."""
        pictures = [self._wandb.Image(image, caption=caption) for image, caption in zip(images, captions, strict=True)]
        self._log(tag, f"{tag}_step", step, {tag: pictures})

    def close(self) -> None:
        """Send what is left and end the run."""
        self._run.finish()

    def _log(self, names: str, axis: str, step: int, values: Mapping[str, object]) -> None:
        if step <= self._known.get(axis, -1):
            return
        if axis not in self._axes:
            self._axes.add(axis)
            self._run.define_metric(axis, hidden=True)
            self._run.define_metric(names, step_metric=axis)
        self._run.log({axis: step, **values})


def _run_id(folder: Path) -> str:
    path = folder / ID_FILE
    if path.exists():
        return path.read_text(encoding="utf-8").strip()
    made = secrets.token_hex(4)
    path.write_text(made + "\n", encoding="utf-8")
    return made
