"""The step in training as the searches see it: relative times from estimates, micro-batches by order of claim."""

from __future__ import annotations

from collections.abc import Sequence

from digenrl.scheduling.commands import Generate, Score, SyncWeights, WorkerCommand
from digenrl.scheduling.costs import Estimates, Task
from digenrl.scheduling.settings import SchedulerSettings
from digenrl.scheduling.state import Stage, StepState, Worker
from digenrl.scheduling.step_model import GENERATING, IDLE, OTHER, SCORING, Position, StepCosts


def costs_of(
    settings: SchedulerSettings, estimates: Estimates, generators: Sequence[Worker], trainer: Worker
) -> StepCosts | None:
    """Durations of the living generators and the trainer; None while one that matters was never measured."""
    score_task = settings.scoring == "generator"
    if settings.costs is not None:
        known = settings.costs
        indices = [worker.index for worker in generators]
        return StepCosts(
            generate=tuple(known.generate[i] for i in indices),
            score=tuple(known.score[i] for i in indices) if known.score is not None and score_task else None,
            update=known.update,
            tag=known.tag,
            switch_in=known.switch_in,
            switch_out=known.switch_out,
            optimizer=known.optimizer,
            sync=known.sync,
        )
    generate = [estimates.of(Task.GENERATE, worker.index) for worker in generators]
    score = [estimates.of(Task.SCORE, worker.index) for worker in generators] if score_task else []
    update, tag = estimates.of(Task.UPDATE, trainer.index), estimates.of(Task.TAG, trainer.index)
    if update is None or tag is None or None in generate or None in score:
        return None
    return StepCosts(
        generate=tuple(ticks for ticks in generate if ticks is not None),
        score=tuple(ticks for ticks in score if ticks is not None) if score_task else None,
        update=update,
        tag=tag,
        switch_in=estimates.of(Task.SWITCH_IN, trainer.index) or 0,
        switch_out=estimates.of(Task.SWITCH_OUT, trainer.index) or 0,
        optimizer=estimates.of(Task.OPTIMIZER, trainer.index) or 0,
        sync=estimates.of(Task.SYNC, trainer.index) or 0,
    )


def position_of(
    step: StepState, costs: StepCosts, generators: Sequence[Worker], *, now_us: int, mode_generating: bool
) -> Position:
    """The rest of the step in training, seen from a free trainer.

    In-flight micro-batches are numbered in order of index and pending ones after them, which is how they stand unless a
    failure has put a low one back.
    """
    flying = [i for i, stage in enumerate(step.stages) if stage not in (Stage.PENDING, Stage.ACCUMULATED)]
    number = {index: rank for rank, index in enumerate(flying)}
    # Scorers of their own are taken to be quick: what waits for them, or is with them, counts as scored.
    by_generators = costs.score is not None
    at_scorers = (Stage.SCORING_QUEUE, Stage.SCORING)
    scored_elsewhere = () if by_generators else tuple(i for i in flying if step.stages[i] in at_scorers)
    remaining, task, item = [], [], []
    for worker in generators:
        command, kind, claim = worker.running, IDLE, 0
        if isinstance(command, Generate | Score) and command.micro_batch.step == step.step:
            kind = GENERATING if isinstance(command, Generate) else SCORING
            claim = number[command.micro_batch.index]
        elif command is not None:
            kind = OTHER
        remaining.append(worker.remaining_us(now_us) if command is not None else 0)
        task.append(kind)
        item.append(claim)
    return Position(
        pending=step.pending,
        left=len(step.stages) - step.accumulated,
        remaining=remaining,
        task=task,
        item=item,
        queue=[number[index] for index in step.scoring_queue] if by_generators else [],
        scored=[number[index] for index in (*step.update_queue, *scored_elsewhere)],
        claimed=len(flying),
        generating=mode_generating,
    )


def expected_us(command: WorkerCommand, worker: Worker, settings: SchedulerSettings, estimates: Estimates) -> int | None:
    """Microseconds that a generator's command should take; None while nothing like it was ever measured."""
    known = settings.costs
    match command:
        case Generate():
            return known.generate[worker.index] if known else estimates.of(Task.GENERATE, worker.index)
        case Score():
            return known.score[worker.index] if known and known.score else estimates.of(Task.SCORE, worker.index)
        case SyncWeights():
            return known.sync if known else estimates.of(Task.SYNC, worker.index)
    return None
