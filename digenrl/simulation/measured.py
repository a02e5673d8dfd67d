"""Cost models made of measured durations: of a costs file, of a recorded run, of the tiny model that a recipe may train.

Assumptions, where a plan asks for other sizes than were measured: work is in proportion to groups and shared perfectly among
devices (samples rounded up per device where their number is known); optimizer, sync, switches and encoding stay as they are;
all devices are alike, except that generation by the trainer has its own measured duration; memory is not looked at.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from statistics import fmean

from digenrl.config.arithmetic import step_arithmetic
from digenrl.config.schema import Recipe
from digenrl.errors import ConfigError
from digenrl.ids import WorkerId
from digenrl.scheduling.commands import (
    Accumulate,
    Encode,
    Evaluate,
    Generate,
    OptimizerStep,
    SaveCheckpoint,
    Score,
    SwitchMode,
    SyncWeights,
    WorkerCommand,
)
from digenrl.scheduling.costs import Estimates, Task
from digenrl.scheduling.events import Finished
from digenrl.simulation.cost_model import Pool
from digenrl.simulation.costs import TICKS, SimulationCosts
from digenrl.simulation.memory import Room, room_of
from digenrl.simulation.modes import Layout
from digenrl.trace.record import Trace

FORWARD_S, FORWARD_BACKWARD_S, DECODE_S, VERIFY_S = 0.95e-3, 2.9e-3, 1.6e-3, 0.6e-3
"""The shipped tiny model on one CPU core: one sample and denoising step, one trained pair, one image, one image (measured)."""
OPTIMIZER_S, SYNC_S = 5e-3, 5e-3
"""Assumed for the tiny model."""
TINY_PIXELS = 32 * 32


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredModel:
    """A StageModel in proportion to what was measured. Seconds of one group on one device."""

    groups: int
    samples_per_group: int | None = None
    generate_s: float
    tag_s: float | None = None
    """Generation by the trainer's devices; as by the generators' when None."""
    score_s: float | None = None
    update_s: float
    tsp_factor: float = 1.0
    """How many times slower an update is without TSP."""
    switch_s: tuple[float, float] = (0.0, 0.0)
    optimizer_s: float = 0.0
    sync_s: float = 0.0
    encode_s: float = 0.0
    room: Room | None = None
    """What devices must hold, where that is known."""

    @property
    def mixed(self) -> bool:
        """Devices are taken to be alike."""
        return False

    def generate(self, groups: int, ranks: int, pool: Pool) -> float:
        """Generation of some groups."""
        seconds = self.tag_s if pool == "trainer" and self.tag_s is not None else self.generate_s
        return seconds * self._groups_per_rank(groups, ranks)

    def score(self, groups: int, ranks: int, pool: Pool) -> float | None:
        """Scoring of some groups."""
        return None if self.score_s is None else self.score_s * self._groups_per_rank(groups, ranks)

    def update(self, groups: int, ranks: int, pool: Pool, *, tsp: bool) -> float:
        """Updates of some groups."""
        return self.update_s * self._groups_per_rank(groups, ranks) * (1.0 if tsp else self.tsp_factor)

    def switch(self, ranks: int) -> tuple[float, float]:
        """As measured."""
        return self.switch_s

    def optimizer(self, ranks: int, pool: Pool) -> float:
        """As measured."""
        return self.optimizer_s

    def sync(self) -> float:
        """As measured."""
        return self.sync_s

    def encode(self, ranks: int, pool: Pool) -> float:
        """As measured."""
        return self.encode_s

    def fits(self, pool: Pool, ranks: int, *, tag: bool = False) -> bool:
        """Whether the devices have the memory for it; taken for granted where it is not known."""
        return self.room is None or self.room.fits(pool, ranks)

    def _groups_per_rank(self, groups: int, ranks: int) -> float:
        if self.samples_per_group is None:
            return groups / ranks
        return math.ceil(groups * self.samples_per_group / ranks) / self.samples_per_group


def model_of_costs(
    costs: SimulationCosts, micro_batches: int, layout: Layout, *, samples_per_micro_batch: int | None, tsp_factor: float
) -> MeasuredModel:
    """The model under which these costs come out at ``layout``; replicas count as equally fast, at their joint rate."""
    mean = len(costs.generate) / sum(1 / seconds for seconds in costs.generate)
    return MeasuredModel(
        groups=micro_batches,
        samples_per_group=samples_per_micro_batch,
        generate_s=mean * layout.ranks,
        tag_s=None if costs.tag is None else costs.tag * layout.trainer_ranks,
        score_s=None if costs.score is None else fmean(costs.score) * layout.ranks,
        update_s=costs.update * layout.trainer_ranks,
        tsp_factor=tsp_factor,
        switch_s=(costs.switch_in, costs.switch_out),
        optimizer_s=costs.optimizer,
        sync_s=costs.sync,
        encode_s=costs.encode,
    )


def model_of_recipe(recipe: Recipe) -> MeasuredModel:
    """The tiny model's durations, scaled with a recipe's arithmetic: padding, guidance, and pixels against 32 x 32."""
    sums, rollout = step_arithmetic(recipe), recipe.rollout
    size = rollout.height * rollout.width / TINY_PIXELS
    passes = (2 if rollout.true_cfg_scale > 1 else 1) * size
    padded = 1 / (1 - sums.rollout_padding)
    trained = sums.pairs_per_group / (1 - sums.training_padding)
    return MeasuredModel(
        groups=sums.prompts,
        samples_per_group=sums.num_generations,
        generate_s=sums.num_generations * sums.num_inference_steps * FORWARD_S * passes * padded,
        score_s=sums.num_generations * (DECODE_S * padded + VERIFY_S) * size,
        update_s=trained * FORWARD_BACKWARD_S * passes,
        optimizer_s=OPTIMIZER_S,
        sync_s=SYNC_S,
        room=room_of(recipe),
    )


def costs_of_trace(trace: Trace, path: str) -> SimulationCosts:
    """Robust means of a recorded run's durations, as the scheduler itself estimates them (scheduling/costs.py)."""
    settings, estimates = trace.settings, Estimates()
    index = {name: number for number, name in enumerate(settings.workers)}
    once: defaultdict[type, list[int]] = defaultdict(list)
    last: list[int] = []
    running: dict[WorkerId, int] = {}
    for entry in trace.entries:
        for event in entry.events:
            if not isinstance(event, Finished) or event.command.worker not in running:
                continue
            command, ticks = event.command, event.at_us - running.pop(event.command.worker)
            task = _task(command, trainer=None if settings.one_pool else settings.trainer)
            if task is None:
                once[type(command)].append(ticks)
            elif settings.partial_last and _index(command) == settings.micro_batches - 1:
                last.extend([ticks] if task is Task.GENERATE else [])
            else:
                estimates.observe(task, index[command.worker], ticks)
        for started in entry.commands if entry.events else ():
            if isinstance(started, WorkerCommand):
                if started.worker not in index:
                    what = f"{path}: {started.worker!r} is not a worker of this trace."
                    raise ConfigError(what, fix="The file was edited; use an intact one.")
                running[started.worker] = entry.events[0].at_us
    return _costs(trace, estimates, once, last, path)


def _costs(trace: Trace, estimates: Estimates, once: dict[type, list[int]], last: list[int], path: str) -> SimulationCosts:
    settings, trainer = trace.settings, len(trace.settings.workers) - 1
    by_task = {task: estimates.of(task, trainer) for task in Task}
    for task in (Task.GENERATE, Task.UPDATE):
        if by_task[task] is None:
            raise ConfigError(
                f"{path}: the run ended before anything was measured: no {task} is in it.",
                fix="Give the trace of a run that has finished a step.",
            )
    seconds = {task: (ticks or 0) / TICKS for task, ticks in by_task.items()}
    first_scorer = len(settings.generators) if settings.scorers else 0
    scorers = range(first_scorer, first_scorer + len(settings.scorers or settings.generators))
    generate = tuple((estimates.of(Task.GENERATE, i) or 1) / TICKS for i in range(len(settings.generators)))
    scored = settings.scoring != "inline" and by_task[Task.SCORE] is not None
    return SimulationCosts(
        generate=generate,
        score=tuple((estimates.of(Task.SCORE, i) or 1) / TICKS for i in scorers) if scored else None,
        update=seconds[Task.UPDATE],
        tag=None if settings.one_pool else seconds[Task.TAG] or max(generate),
        switch_in=seconds[Task.SWITCH_IN],
        switch_out=seconds[Task.SWITCH_OUT],
        encode=_mean_s(once.get(Encode)),
        optimizer=seconds[Task.OPTIMIZER],
        sync=seconds[Task.SYNC],
        evaluate=_mean_s(once.get(Evaluate)),
        save=_mean_s(once.get(SaveCheckpoint)),
        last_share=min(1.0, max(0.01, _mean_s(last) / fmean(generate))) if last else 1.0,
    )


def _mean_s(ticks: list[int] | None) -> float:
    return fmean(ticks) / TICKS if ticks else 0.0


def _index(command: WorkerCommand) -> int | None:
    return command.micro_batch.index if isinstance(command, Generate | Score | Accumulate) else None


def _task(command: WorkerCommand, *, trainer: WorkerId | None) -> Task | None:
    """The kind of work that a command is timed as; None for what happens once a step or less."""
    match command:
        case Generate():
            return Task.TAG if command.worker == trainer else Task.GENERATE
        case Score():
            return Task.SCORE
        case Accumulate():
            return Task.UPDATE
        case SwitchMode():
            return Task.SWITCH_IN if command.generating else Task.SWITCH_OUT
        case OptimizerStep():
            return Task.OPTIMIZER
        case SyncWeights():
            return Task.SYNC
    return None
