"""The folder of one run: what lies where, and that no other run is ever overwritten.

Files: recipe.yaml, metrics.jsonl, trace.jsonl, summary.json, reward.png, samples/index.jsonl, samples/<when>/*.png and
checkpoints/step-N/ (training/checkpoint.py). A continued run writes trace-from-N.jsonl.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import numpy as np
import yaml
from numpy.typing import NDArray
from PIL import Image

from digenrl.config.schema import Recipe
from digenrl.config.text import expand_home
from digenrl.errors import ConfigError
from digenrl.metrics.log import resume_rows


class RunFolder:
    """Paths of one run and the files that are written once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recipe = path / "recipe.yaml"
        self.metrics = path / "metrics.jsonl"
        self.trace = path / "trace.jsonl"
        self.summary = path / "summary.json"
        self.reward_plot = path / "reward.png"
        self.checkpoints = path / "checkpoints"
        self._samples = path / "samples"

    @classmethod
    def choose_path(cls, recipe: Recipe) -> Path:
        """Where the run goes. Raises ConfigError when something is there already, before anything is loaded."""
        default = f"runs/{recipe.run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        path = expand_home(recipe.run.output_dir or default, where="run.output_dir")
        try:
            taken = path.exists() and (not path.is_dir() or any(path.iterdir()))
        except OSError as error:
            raise _unusable(path, error) from error
        if taken:
            raise ConfigError(
                f"run.output_dir: {str(path)!r} is not an empty folder.",
                why="It may hold another run, and nothing is ever overwritten.",
                fix="Choose another run.output_dir, or delete or move the old run yourself.",
            )
        return path

    @classmethod
    def create(cls, path: Path, recipe: Recipe) -> RunFolder:
        """Make the run's folder and write its recipe. Raises ConfigError when it cannot be made."""
        folder = cls(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            folder.recipe.write_text(yaml.safe_dump(recipe.to_plain(), sort_keys=False, allow_unicode=True), encoding="utf-8")
        except OSError as error:
            raise _unusable(path, error) from error
        return folder

    @classmethod
    def reopen(cls, path: Path) -> RunFolder:
        """The folder of a run to go on with. Raises ConfigError when it is none."""
        if not (path / "recipe.yaml").is_file():
            raise ConfigError(
                f"{str(path)!r} is not a run folder: it has no recipe.yaml.",
                fix="Name the folder that `digenrl train` printed when the run began.",
            )
        return cls(path)

    def cut_samples(self, version: int) -> None:
        """Forget the pictures of steps that are done again from this version on."""
        if (index := self._samples / "index.jsonl").exists():
            resume_rows(index, before_step=version)

    def lock(self) -> IO[str]:
        """Hold the folder for this process until the file is closed. Raises ConfigError when another one holds it."""
        file = (self.path / ".lock").open("w", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            raise ConfigError(
                f"The run in {str(self.path)!r} is going on in another process.",
                why="Two processes would overwrite each other's checkpoints and metrics.",
                fix="Stop the other one first.",
            ) from error
        return file

    def trace_from(self, policy_version: int) -> Path:
        """Where a run that continues from a version writes its trace."""
        return self.path / f"trace-from-{policy_version:06d}.jsonl" if policy_version else self.trace

    def write_summary(self, summary: Mapping[str, object]) -> None:
        """Write summary.json, complete or not at all."""
        draft = self.summary.with_suffix(".json.tmp")
        draft.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        draft.replace(self.summary)

    def save_samples(
        self, when: str, images: NDArray[np.uint8], names: Sequence[str], rows: Sequence[Mapping[str, object]]
    ) -> None:
        """Save pictures as samples/<when>/<name>.png with one line each in samples/index.jsonl.

        images: [N, H, W, 3]; rows: what the index says of each (prompt, rewards, policy version, ...).
        """
        folder = self._samples / when
        folder.mkdir(parents=True, exist_ok=True)
        with (self._samples / "index.jsonl").open("a", encoding="utf-8") as index:
            for image, name, row in zip(images, names, rows, strict=True):
                path = folder / f"{name}.png"
                Image.fromarray(image).save(path)
                digest = hashlib.sha256(path.read_bytes()).hexdigest()
                line = {"file": str(path.relative_to(self.path)), "sha256": digest, **row}
                index.write(json.dumps(line, ensure_ascii=False) + "\n")


def _unusable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"run.output_dir: cannot write into {str(path)!r}: {error.strerror or error}.",
        fix="Choose a folder that you may write to.",
    )
