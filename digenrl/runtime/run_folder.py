"""The folder of one run: what lies where, and that no other run is ever overwritten.

Files: recipe.yaml, metrics.jsonl, trace.jsonl, summary.json, reward.png, before_after.png, samples/index.jsonl,
samples/<when>/*.png (and *.mp4), checkpoints/step-N/ (training/checkpoint.py); on a cluster, workers.json (which process is
which worker). A continued run writes trace-from-N.jsonl.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import numpy as np
import yaml
from numpy.typing import NDArray
from PIL import Image

from digenrl.config.schema import Recipe
from digenrl.config.text import expand_home
from digenrl.errors import ConfigError, RunFailed
from digenrl.metrics.before_after import before_after, first_and_last
from digenrl.metrics.log import resume_rows
from digenrl.metrics.video import filmstrips, save_video

LOCK = ".lock"


class RunFolder:
    """Paths of one run and the files that are written once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recipe = path / "recipe.yaml"
        self.metrics = path / "metrics.jsonl"
        self.trace = path / "trace.jsonl"
        self.summary = path / "summary.json"
        self.reward_plot = path / "reward.png"
        self.before_after = path / "before_after.png"
        self.checkpoints = (path / "checkpoints").resolve()
        """Absolute: on a cluster the trainer writes them, whose working directory is another one."""
        self._samples = path / "samples"

    @classmethod
    def choose_path(cls, recipe: Recipe) -> Path:
        """Where the run goes. Raises ConfigError when something is there already, before anything is loaded."""
        default = f"runs/{recipe.run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        path = expand_home(recipe.run.output_dir or default, where="run.output_dir")
        _check_free(path)
        return path

    @classmethod
    def create(cls, path: Path, recipe: Recipe, stack: ExitStack) -> RunFolder:
        """Make the run's folder, lock it for as long as ``stack`` is open, and write its recipe.

        Raises ConfigError when it cannot be made, or another process was faster.
        """
        folder = cls(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unusable(path, error) from error
        stack.enter_context(folder.lock())
        _check_free(path)
        folder.write_recipe(recipe)
        return folder

    def write_recipe(self, recipe: Recipe) -> None:
        """Write recipe.yaml, complete or not at all. Raises ConfigError when it cannot be written."""
        draft = self.recipe.with_suffix(".yaml.tmp")
        try:
            draft.write_text(yaml.safe_dump(recipe.to_plain(), sort_keys=False, allow_unicode=True), encoding="utf-8")
            draft.replace(self.recipe)
        except OSError as error:
            raise _unusable(self.path, error) from error

    @classmethod
    def reopen(cls, path: Path) -> RunFolder:
        """The folder of a run to go on with. Raises ConfigError when it is none."""
        if not (path / "recipe.yaml").is_file():
            raise ConfigError(
                f"{str(path)!r} is not a run folder: it has no recipe.yaml.",
                fix="Name the folder that `digenrl train` printed when the run began.",
            )
        return cls(path)

    def cut_samples(self, version: int, evaluated: frozenset[int]) -> None:
        """Forget the pictures of what is done again: steps from ``version`` on, and versions that are not ``evaluated``."""
        index = self._samples / "index.jsonl"
        rows = resume_rows(index, before_step=version)
        kept = [row for row in rows if not row.get("held_out") or row["policy_version"] in evaluated]
        if len(kept) < len(rows):
            draft = index.with_suffix(".tmp")
            draft.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept), encoding="utf-8")
            draft.replace(index)

    def lock(self) -> IO[str]:
        """Hold the folder for this process until the file is closed. Raises ConfigError when another one holds it."""
        try:
            file = (self.path / LOCK).open("w", encoding="utf-8")
        except OSError as error:
            raise _unusable(self.path, error) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            if not isinstance(error, BlockingIOError):
                raise _unusable(self.path, error) from error
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
        self, when: str, images: NDArray[np.uint8], names: Sequence[str], rows: Sequence[Mapping[str, object]], *, fps: float
    ) -> None:
        """Save pictures as samples/<when>/<name>.png with one line each in samples/index.jsonl.

        images: [N, H, W, 3]; rows: what the index says of each (prompt, rewards, policy version, ...). Of videos
        [N, F, H, W, 3], the file is <name>.mp4, and <name>.png beside it shows a few frames.
        """
        try:
            self._write_samples(self._samples / when, images, names, rows, fps)
        except OSError as error:
            raise RunFailed(
                f"Pictures could not be saved in {str(self._samples)!r}: {error.strerror or error}.",
                why="The disk may be full.",
                fix="Make room and continue with `digenrl train --resume RUN`; log.sample_freq=0 saves none.",
            ) from error

    def draw_before_after(self, title: str) -> None:
        """Write before_after.png, where held-out pictures of two versions are saved."""
        index = self._samples / "index.jsonl"
        if not index.exists():
            return
        rows = [json.loads(line) for line in index.read_text(encoding="utf-8").splitlines()]
        versions = first_and_last(rows, self.path)
        if len(versions) > 1:
            before_after(versions, title=title).save(self.before_after)

    def _write_samples(
        self, folder: Path, images: NDArray[np.uint8], names: Sequence[str], rows: Sequence[Mapping[str, object]], fps: float
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        pictures, videos = filmstrips(images), images if images.ndim == 5 else None
        with (self._samples / "index.jsonl").open("a", encoding="utf-8") as index:
            for number, (picture, name, row) in enumerate(zip(pictures, names, rows, strict=True)):
                path = folder / f"{name}.png"
                Image.fromarray(picture).save(path)
                if videos is not None:
                    path = folder / f"{name}.mp4"
                    path.unlink(missing_ok=True)  # of a step that is done again
                    save_video(path, videos[number], fps)
                digest = hashlib.sha256(path.read_bytes()).hexdigest()
                line = {"file": str(path.relative_to(self.path)), "sha256": digest, **row}
                index.write(json.dumps(line, ensure_ascii=False) + "\n")


def _check_free(path: Path) -> None:
    try:
        taken = path.exists() and (not path.is_dir() or any(entry.name != LOCK for entry in path.iterdir()))
    except OSError as error:
        raise _unusable(path, error) from error
    if taken:
        raise ConfigError(
            f"run.output_dir: {str(path)!r} is not an empty folder.",
            why="It may hold another run, and nothing is ever overwritten.",
            fix="Choose another run.output_dir, go on with the run by --resume, or move it away yourself.",
        )


def _unusable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"run.output_dir: cannot write into {str(path)!r}: {error.strerror or error}.",
        fix="Choose a folder that you may write to.",
    )
