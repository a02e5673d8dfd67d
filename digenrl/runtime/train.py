"""One training run from recipe to summary."""

from __future__ import annotations

import time

import numpy as np

from digenrl.config.checks import check_recipe
from digenrl.config.schema import Recipe
from digenrl.driver import drive
from digenrl.errors import ConfigError
from digenrl.metrics.console import RunConsole
from digenrl.metrics.log import MetricsLog, read_metrics
from digenrl.metrics.plots import plot_reward
from digenrl.runtime.build import BuiltRun, build_workers, wire_inline_run
from digenrl.runtime.journal import Journal
from digenrl.runtime.run_folder import RunFolder
from digenrl.trace.record import TraceWriter
from digenrl.training.digest import save_weights

COMMAND_TIMEOUT_S = 3600.0


def train(recipe: Recipe) -> dict[str, object]:
    """Train as the recipe says and return the summary that is also in the run folder.

    Raises ConfigError before the run folder is made, RunFailed later: the metrics, pictures and weights until then are kept.
    """
    began = time.monotonic()
    check_recipe(recipe)
    if recipe.cluster.placement != "inline":
        raise ConfigError(
            f"cluster.placement: {recipe.cluster.placement} cannot be trained with yet.",
            why="This version trains in one process; the pools are simulated and planned with the same scheduler.",
            fix="Use cluster.placement=inline, or look at the schedule with `digenrl simulate` and `digenrl plan`.",
        )
    path = RunFolder.choose_path(recipe)
    console = RunConsole(recipe.train.steps)
    workers, ledger = build_workers(recipe)
    folder = RunFolder.create(path, recipe)
    console.say(f"run folder: {folder.path}")
    log = MetricsLog(folder.metrics)
    run = wire_inline_run(recipe, workers, ledger, folder, log, console)
    console.say(f"training {run.trainer.policy.num_parameters:,} parameters on {run.trainer.policy.adapter.device}")
    try:
        with TraceWriter(folder.trace, run.scheduler.settings) as trace, console:
            drive(run.scheduler, run.executor, trace, command_timeout_s=COMMAND_TIMEOUT_S)
    finally:
        log.close()
        digests = save_weights(folder.final, run.trainer.weights())
        plot_reward(read_metrics(folder.metrics), folder.reward_plot, title=recipe.run.name)
    summary = _summary(run, time.monotonic() - began, digests)
    folder.write_summary(summary)
    return summary


def _summary(run: BuiltRun, seconds: float, digests: dict[str, str]) -> dict[str, object]:
    journal = run.journal
    return {
        "eval": _evaluation_summary(journal),
        "steps": journal.steps,
        "skipped_steps": journal.skipped_steps,
        "seconds": round(seconds, 3),
        "timing_s": {name: round(value, 3) for name, value in journal.timing.items()},
        "digests": digests,
    }


def _evaluation_summary(journal: Journal) -> dict[str, object] | None:
    """Rewards on the held-out prompts of the first and the last evaluated version; None without an eval section."""
    if not journal.evaluations:
        return None
    before, after = journal.evaluations[min(journal.evaluations)], journal.evaluations[max(journal.evaluations)]
    summary: dict[str, object] = {
        "reward_before": before.reward,
        "reward_after": after.reward,
        "num_images": int(np.isfinite(after.rewards).sum()),
    }
    parts = [name for name in before.parts if "/" in name]
    short = [name.partition("/")[2] for name in parts]
    for name, part in zip(parts, short, strict=True):
        key = part if short.count(part) == 1 else name.replace("/", "_")
        summary |= {f"{key}_before": before.parts[name], f"{key}_after": after.parts.get(name)}
    return summary
