"""One training run from recipe to summary."""

from __future__ import annotations

import time

import numpy as np

from digenrl.config.checks import check_recipe
from digenrl.config.schema import Recipe
from digenrl.driver import drive
from digenrl.metrics.console import RunConsole
from digenrl.metrics.log import MetricsLog, read_metrics
from digenrl.metrics.plots import plot_reward
from digenrl.runtime.build import BuiltRun, build_inline_run
from digenrl.runtime.journal import Journal
from digenrl.runtime.run_folder import RunFolder
from digenrl.trace.record import TraceWriter
from digenrl.training.digest import save_weights

COMMAND_TIMEOUT_S = 3600.0


def train(recipe: Recipe) -> dict[str, object]:
    """Train as the recipe says and return the summary that is also in the run folder.

    Raises ConfigError before anything starts, RunFailed later; what was written until then stays.
    """
    began = time.monotonic()
    check_recipe(recipe)
    folder = RunFolder.create(recipe)
    log = MetricsLog(folder.metrics)
    console = RunConsole(recipe.train.steps)
    try:
        console.say(f"run folder: {folder.path}")
        run = build_inline_run(recipe, folder, log, console)
        console.say(f"training {run.trainer.policy.num_parameters:,} parameters on {run.trainer.policy.adapter.device}")
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
    for name in before.parts:
        if "/" in name:
            part = name.partition("/")[2]
            summary |= {f"{part}_before": before.parts[name], f"{part}_after": after.parts.get(name)}
    return summary
