"""What a checkpoint of a run holds beside its weights, and how a run takes it up again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

import digenrl
from digenrl.config.schema import Recipe
from digenrl.errors import ConfigError
from digenrl.runtime.journal import Journal
from digenrl.scheduling.costs import MeasuredTask, Task
from digenrl.scheduling.scheduler import Scheduler
from digenrl.training.checkpoint import Checkpoint, save_checkpoint
from digenrl.training.trainer import Trainer


class Checkpointer:
    """What the driver knows of a checkpoint; the trainer adds its weights and writes it."""

    def __init__(self, folder: Path, recipe: Recipe, scheduler: Scheduler, journal: Journal) -> None:
        self.folder = folder
        """The run's ``checkpoints``."""
        self.keep_last = recipe.train.keep_last
        """Checkpoints that are kept."""
        self._recipe = recipe
        self._scheduler = scheduler
        self._journal = journal

    def state(self) -> dict[str, Any]:
        """What a checkpoint of the present version says beside the trainer's own, as JSON."""
        state = self._scheduler.state
        return {
            "digenrl": digenrl.__version__,
            "recipe": self._recipe.to_plain(),
            "skipped_steps": self._journal.skipped_steps,
            "skipped_in_a_row": state.skipped_in_a_row,
            "stale_claims": list(state.stale_claims),
            "measured": [asdict(known) for known in state.estimates.measured()],
        }


def write_checkpoint(
    folder: Path, trainer: Trainer, state: Mapping[str, Any], *, keep_last: int, previous: Mapping[str, Tensor] | None = None
) -> Path:
    """Write a checkpoint of the version that the trainer is at. Raises RunFailed when it cannot be written.

    state: Checkpointer.state. previous: trained weights of the version before, where trajectories of it may be in flight.
    """
    weights = {**trainer.weights(), "previous": previous or {}}
    return save_checkpoint(folder, trainer.policy.version, weights, {**state, "trainer": trainer.counters()}, keep_last=keep_last)


def measured_of(checkpoint: Checkpoint | None) -> tuple[MeasuredTask, ...]:
    """The durations that the run had measured."""
    if checkpoint is None:
        return ()
    return tuple(
        MeasuredTask(task=Task(item["task"]), worker=int(item["worker"]), ticks=tuple(item["ticks"]))
        for item in checkpoint.state["measured"]
    )


CHANGEABLE = (
    "train.steps",
    "train.save_freq",
    "train.keep_last",
    "train.max_skipped_steps",
    "eval.freq",
    "eval.alarm_window",
    "eval.alarm_errors",
    "log",
    "run.output_dir",
    "cluster",
)
"""What may differ between a run and its continuation without changing what the steps so far have computed.

Another number of trainer ranks changes the steps to come in their last bits.
"""


def check_same_run(recipe: Recipe, original: Recipe) -> None:
    """Raise ConfigError when a recipe differs from the run's own in anything that CHANGEABLE does not name.

    ``train.steps`` may change only where the learning rate does not depend on it.
    """
    before, now = _flat(original.to_plain()), _flat(recipe.to_plain())
    changed = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    free = [key for key in CHANGEABLE if key != "train.steps" or recipe.train.lr_schedule == "constant"]
    refused = [key for key in changed if not any(key == each or key.startswith(f"{each}.") for each in free)]
    if refused:
        key = refused[0]
        falls = key == "train.steps"
        raise ConfigError(
            f"{key} was {before.get(key)!r} in the run and is {now.get(key)!r} now.",
            why=f"The {recipe.train.lr_schedule} learning rate of the steps so far was made for the old number."
            if falls
            else "A continued run has to give the numbers of an uninterrupted one, so what they depend on cannot change.",
            fix="Start a new run, or use train.lr_schedule=constant from its beginning."
            if falls
            else f"Leave it as it was (only {', '.join(free)} may change), or start a new run.",
        )


def _flat(plain: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(plain, dict):
        return {prefix: plain}
    return {name: value for key, item in plain.items() for name, value in _flat(item, f"{prefix}.{key}".strip(".")).items()}
