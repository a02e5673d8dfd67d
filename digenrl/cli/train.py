"""``digenrl train``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from digenrl.cli.check import inspect, schedule_warnings
from digenrl.cli.emulation import emulation_of
from digenrl.cli.environment import calm_threads
from digenrl.cli.notes import note
from digenrl.cli.report import report_lines
from digenrl.config.builtin_recipes import names_recipe
from digenrl.config.loader import load_recipe
from digenrl.config.schema import Recipe
from digenrl.config.text import expand_home
from digenrl.errors import ConfigError
from digenrl.trace.record import Trace, read_trace

AUTO = "auto"


def run(
    path: str | None,
    overrides: Sequence[str],
    *,
    resume: str | None = None,
    replay: str | None = None,
    address: str | None = None,
) -> None:
    """Train, or go on with a run, and print what came out."""
    record = None
    if replay is not None:
        if resume is not None:
            raise ConfigError("--replay and --resume are two ways to begin.", fix="Leave one of them out.")
        recipe, record = _what_to_replay(path, overrides, replay)
        folder = None
    else:
        recipe, folder = _what_to_train(path, overrides, resume)
    inspect(recipe)  # a mistake shows in a second, before torch is imported and a run folder made
    for warning in schedule_warnings(recipe):
        print(f"warning: {warning}")
    calm_threads()
    os.environ.setdefault("OMP_NUM_THREADS", str(recipe.run.threads_per_worker))
    emulation = emulation_of(recipe)
    from digenrl.runtime import train
    from digenrl.runtime.interrupt import StopRequested

    try:
        if record is not None:
            summary = train.replay(recipe, record, address=address, emulation=emulation)
        elif folder is None:
            summary = train.train(recipe, address=address, emulation=emulation)
        else:
            summary = train.resume(recipe, folder, address=address, emulation=emulation)
    except StopRequested as stop:
        print("stopped by a signal; go on with `digenrl train --resume` and the run folder named above", file=sys.stderr)
        sys.exit(stop.exit_code)
    lines = list(result_lines(summary))
    if record is None:  # a record's times are not those of this run
        lines.extend(report_lines(Path(str(summary["folder"]))))
    for line in lines:
        print(line)


def _what_to_replay(path: str | None, overrides: Sequence[str], replay: str) -> tuple[Recipe, Trace]:
    """The recipe beside a recorded trace, or another, with changes, in a folder of its own; and the record."""
    file = expand_home(replay, where="--replay")
    if file.is_dir():
        file = file / "trace.jsonl"
    record = read_trace(file)
    if path is not None and names_recipe(path):
        return load_recipe(path, overrides, say=note).for_replay(), record
    beside = file.parent / "recipe.yaml"
    if not beside.is_file():
        raise ConfigError(f"{str(file)!r} has no recipe.yaml beside it.", fix="Name the recipe of the recorded run first.")
    # Not into the recorded run's own folder.
    changes = ["run.output_dir=null", *([path] if path is not None else []), *overrides]
    return load_recipe(beside, changes, say=note).for_replay(), record


def _what_to_train(path: str | None, overrides: Sequence[str], resume: str | None) -> tuple[Recipe, Path | None]:
    """The recipe, and the folder of the run to go on with (None: a new run)."""
    if resume is not None and resume != AUTO:
        folder = expand_home(resume, where="--resume")
        if not (folder / "recipe.yaml").is_file():
            raise ConfigError(
                f"--resume: {resume!r} is not a run folder: it has no recipe.yaml.",
                fix="Name the folder that `digenrl train` printed when the run began.",
            )
        if path is not None and names_recipe(path):
            raise ConfigError(
                f"{path!r} and --resume {resume} are two recipes.",
                why="A run goes on with its own recipe.",
                fix="Leave the recipe out; changes like train.steps=100 may stay.",
            )
        # The recipe is the run's own, so what stands in its place on the command line is the first override.
        changes = [*([path] if path is not None else []), *overrides]
        return load_recipe(folder / "recipe.yaml", changes, say=note), folder
    if path is None:
        raise ConfigError("There is no recipe to train.", fix="Name one, for example quickstart, or --resume RUN.")
    recipe = load_recipe(path, overrides, say=note)
    if resume is None:
        return recipe, None
    if recipe.run.output_dir is None:
        raise ConfigError(
            "--resume auto needs run.output_dir.",
            why="It is the folder in which a run to go on with is looked for.",
            fix="Add run.output_dir=FOLDER.",
        )
    folder = expand_home(recipe.run.output_dir, where="run.output_dir")
    return recipe, folder if (folder / "recipe.yaml").is_file() else None


def result_lines(summary: Mapping[str, object]) -> Iterator[str]:
    """What a run's summary.json comes to, in words."""
    result = summary["eval"]
    if isinstance(result, dict):
        for name in [key.removesuffix("_before") for key in result if key.endswith("_before")]:
            before, after = result[f"{name}_before"], result[f"{name}_after"]
            if before is not None and after is not None:
                yield f"held-out {name}: {before:.3f} -> {after:.3f} ({after - before:+.3f}), {result['num_images']} images"
        for name, means in result.get("categories", {}).items():
            before, after = means.get("reward_before"), means.get("reward_after")
            if before is not None and after is not None:
                yield f"held-out reward of {name}: {before:.3f} -> {after:.3f} ({after - before:+.3f})"
    yield f"{summary['steps']} steps; {summary['seconds']} s in all, loading, evaluation and saving included"
