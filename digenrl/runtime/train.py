"""One training run from recipe to summary, or from where an interrupted one stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from digenrl.config.checks import check_recipe
from digenrl.config.loader import load_recipe, recipe_from_plain
from digenrl.config.schema import Recipe
from digenrl.driver import drive
from digenrl.errors import ConfigError
from digenrl.metrics.console import RunConsole
from digenrl.metrics.log import MetricsLog, open_sinks, read_metrics, resume_rows
from digenrl.metrics.plots import plot_reward
from digenrl.metrics.wandb_sink import import_wandb
from digenrl.runtime.build import Start
from digenrl.runtime.checkpointer import check_same_run
from digenrl.runtime.emulated import Emulation, without_pictures
from digenrl.runtime.inline import InlineSystem
from digenrl.runtime.interrupt import Interrupt
from digenrl.runtime.journal import Journal
from digenrl.runtime.replay import ReplayExecutor, check_replayable
from digenrl.runtime.run_folder import RunFolder
from digenrl.runtime.system import Run, System
from digenrl.runtime.watch import Watch
from digenrl.trace.record import Trace, TraceWriter
from digenrl.training.checkpoint import has_checkpoint, load_newest


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opening:
    """Where a run lives and where it begins."""

    folder: RunFolder
    start: Start
    resume_step: int | None = None
    """First step that is trained now, in a run that goes on."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Where:
    """On what workers a run is done."""

    address: str | None = None
    emulation: Emulation | None = None

    @property
    def emulated(self) -> str | None:
        """Whose durations emulated workers have; None of real ones."""
        return self.emulation.preset if self.emulation is not None else None

    @property
    def labels(self) -> dict[str, str]:
        """What every result of an emulated run says."""
        return {"emulated": self.emulated} if self.emulated else {}

    @property
    def source(self) -> str:
        """Of the trace."""
        return "emulation" if self.emulated else "run"


def train(recipe: Recipe, *, address: str | None = None, emulation: Emulation | None = None) -> dict[str, object]:
    """Train as the recipe says, in a new folder, and return the summary that is also in the folder.

    address: of a Ray cluster to run on; a private one on this machine if None, where the recipe asks for more than one process.
    emulation: what ``cluster.emulate`` comes to, which the command line works out; nothing is trained then.
    Raises ConfigError before the run folder is made, RunFailed later, StopRequested on a signal: the metrics, pictures and
    weights until then are kept.
    """
    recipe, where = _where(recipe, address, emulation)
    check_recipe(recipe)
    path = RunFolder.choose_path(recipe)
    return _run(recipe, where, lambda stack: _Opening(folder=RunFolder.create(path, recipe, stack), start=Start()))


def resume(recipe: Recipe, path: Path, *, address: str | None = None, emulation: Emulation | None = None) -> dict[str, object]:
    """Go on with the run in ``path`` from its newest whole checkpoint; from the beginning where it has none.

    ``recipe``: the run's own, in which only what checkpointer.CHANGEABLE names may be changed. The result is the one of a run
    that was never interrupted. Raises as ``train`` does.
    """
    recipe, where = _where(recipe, address, emulation)
    check_recipe(recipe)
    folder = RunFolder.reopen(path)
    check_same_run(recipe, load_recipe(folder.recipe))
    return _run(recipe, where, lambda stack: _continue(recipe, folder, stack))


def replay(recipe: Recipe, trace: Trace, *, address: str | None = None, emulation: Emulation | None = None) -> dict[str, object]:
    """Train as a recorded run trained: commands end in the recorded order, with the recorded versions; a new run folder.

    recipe: the recorded run's own; ``cluster.placement: inline`` follows the record of any cluster in one process. Raises as
    ``train`` does, and ProtocolError when the record cannot be kept.
    """
    recipe, where = _where(recipe.for_replay(), address, emulation)
    check_recipe(recipe)
    path = RunFolder.choose_path(recipe)
    return _run(recipe, where, lambda stack: _Opening(folder=RunFolder.create(path, recipe, stack), start=Start()), trace)


def _where(recipe: Recipe, address: str | None, emulation: Emulation | None) -> tuple[Recipe, _Where]:
    """The recipe as it is run there. Raises ConfigError for a recipe to emulate of which nobody has worked out the durations."""
    if emulation is not None:
        assert recipe.cluster.emulate is not None, "an emulation is made of what its recipe says"
        return without_pictures(recipe), _Where(address=address, emulation=emulation)
    if recipe.cluster.emulate is not None:
        raise ConfigError(
            f"cluster.emulate ({recipe.cluster.emulate.preset}) asks for emulated workers, and their durations were not given.",
            why="Presets belong to the simulator, which the runtime does not know.",
            fix="Start the run with `digenrl train`, or give `emulation` what digenrl.cli.emulation.emulation_of(recipe) makes.",
        )
    return recipe, _Where(address=address)


def _continue(recipe: Recipe, folder: RunFolder, stack: ExitStack) -> _Opening:
    # Nothing is read or cut before the folder is ours: another process may be writing there.
    stack.enter_context(folder.lock())
    start = Start()
    notes: tuple[str, ...] = ("it has no checkpoint yet, so it begins anew",)
    if has_checkpoint(folder.checkpoints):
        checkpoint, refused = load_newest(folder.checkpoints)
        check_same_run(recipe, recipe_from_plain(checkpoint.state["recipe"]))
        if checkpoint.policy_version > recipe.train.steps:
            raise ConfigError(
                f"train.steps ({recipe.train.steps}) is less than the {checkpoint.policy_version} steps that the run has done.",
                fix=f"Give at least train.steps={checkpoint.policy_version}.",
            )
        start, notes = Start(checkpoint=checkpoint), (*refused, f"going on from {checkpoint.path.name}")
    version = start.policy_version
    evaluated = frozenset(row["step"] for row in resume_rows(folder.metrics, before_step=version) if row["kind"] == "eval")
    folder.cut_samples(version, evaluated)
    folder.write_recipe(recipe)
    return _Opening(folder=folder, start=replace(start, evaluated=evaluated), resume_step=version, notes=notes)


def _open_system(recipe: Recipe, where: _Where, stack: ExitStack) -> System:
    """Load all workers. Those on a cluster end when ``stack`` is closed."""
    address = where.address
    if recipe.cluster.placement == "inline":
        if address is not None:
            raise ConfigError(
                "--address is for a cluster, and cluster.placement is inline: one process.",
                fix="Add cluster.placement=disaggregated (or colocated), or leave --address out.",
            )
        return InlineSystem(recipe)
    from digenrl.runtime.ray.environment import prepare

    prepare(private=address is None)
    if where.emulation is not None:
        from digenrl.runtime.ray.emulated_system import EmulatedSystem

        return EmulatedSystem(recipe, where.emulation, address, stack)
    from digenrl.runtime.ray.system import RaySystem, check_runnable

    check_runnable(recipe)
    return RaySystem(recipe, address, stack)


def _run(
    recipe: Recipe, where: _Where, open_folder: Callable[[ExitStack], _Opening], record: Trace | None = None
) -> dict[str, object]:
    began = time.monotonic()
    if recipe.log.wandb is not None:
        import_wandb()
    console = RunConsole(recipe.train.steps)
    with Interrupt() as interrupt, ExitStack() as stack, ExitStack() as before:
        before.callback(interrupt.calm)  # what the other stack puts away is not to be dropped half-way
        if where.emulated:
            console.say(f"EMULATION of {where.emulated}: no picture is made, nothing is learned")
        system = _open_system(recipe, where, stack)
        if record is not None:
            check_replayable(recipe, record, system.settings(Start()))
        opening = open_folder(stack)
        folder, start = opening.folder, opening.start
        console.first_step = start.policy_version
        console.say(f"run folder: {folder.path}")
        for note in opening.notes:
            console.say(note)
        for number, warning in enumerate(system.warnings):
            console.warn(f"prompts-{number}", warning)
        sinks = open_sinks(
            recipe.log,
            folder.path,
            run_name=recipe.run.name,
            config=recipe.to_plain(),
            resume_step=opening.resume_step,
            warn=console.warn,
        )
        log = MetricsLog(folder.metrics, sinks, warn=console.warn, labels=where.labels)
        history = read_metrics(folder.metrics) if opening.resume_step is not None else ()
        journal = Journal(recipe, folder, log, console, skipped_steps=start.skipped_steps, history=history)
        settings = system.settings(start) if record is None else record.settings
        run = system.begin(settings, start, journal, interrupt, folder.checkpoints)
        executor = run.executor if record is None else ReplayExecutor(run.executor, record)
        console.say(system.describe())
        try:
            with TraceWriter(folder.trace_from(start.policy_version), run.scheduler.settings, source=where.source) as trace:
                watch = Watch(run.scheduler, [trace])
                if record is None:  # a record's times are not those of this run
                    journal.pool_metrics = lambda: watch.step_metrics(executor.now_us())
                    console.follow(lambda: watch.snapshot(executor.now_us()))
                with console:
                    drive(run.scheduler, executor, watch, command_timeout_s=recipe.cluster.command_timeout_s)
        finally:
            interrupt.calm()
            try:
                run.executor.finish()
                plot_reward(read_metrics(folder.metrics), folder.reward_plot, title=recipe.run.name)
                folder.draw_before_after(recipe.run.name)
            finally:
                log.close()
        summary = _summary(run, journal, folder, time.monotonic() - began) | where.labels
        folder.write_summary(summary)
        return summary


def _summary(run: Run, journal: Journal, folder: RunFolder, seconds: float) -> dict[str, object]:
    rows = read_metrics(folder.metrics)
    return {
        "eval": _evaluation_summary([row for row in rows if row["kind"] == "eval"]),
        "folder": str(folder.path),
        "steps": run.executor.policy_version,
        "skipped_steps": journal.skipped_steps,
        "seconds": round(seconds, 3),
        "timing_s": {name: round(value, 3) for name, value in journal.timing.items()},
        "digests": run.executor.digests(),
    }


def _evaluation_summary(rows: Sequence[dict[str, Any]]) -> dict[str, object] | None:
    """Rewards on the held-out prompts of the first and the last evaluated version; None without an eval section."""
    if not rows:
        return None
    before, after = (pick(rows, key=lambda row: row["step"]) for pick in (min, max))
    summary: dict[str, object] = {
        "reward_before": before["reward"],
        "reward_after": after["reward"],
        "num_images": int(after["num_images"] - after["invalid_samples"]),
    }
    parts = [name for name in before if name.startswith("reward/") and name.count("/") > 1]
    short = [name.split("/")[-1] for name in parts]
    for name, part in zip(parts, short, strict=True):
        key = part if short.count(part) == 1 else name.removeprefix("reward/").replace("/", "_")
        summary |= {f"{key}_before": before[name], f"{key}_after": after.get(name)}
    if categories := _category_summary(before, after):
        summary["categories"] = categories
    return summary


def _category_summary(before: dict[str, Any], after: dict[str, Any]) -> dict[str, dict[str, float | None]]:
    """By category, each mean before and after; a part by its last name."""
    found: dict[str, dict[str, float | None]] = {}
    for key, value in before.items():
        if key.startswith("category/"):
            _, name, part = key.split("/", 2)
            short = part.split("/")[-1]
            found.setdefault(name, {}).update({f"{short}_before": value, f"{short}_after": after.get(key)})
    return found
