"""Running estimates of durations: what the searches plan with in a real run.

Of every (task, worker) the first sample is dropped once there is a second one (it is cold), and the mean of the last 64 is
taken with outliers pulled in to twice the median. Measured in simulation against means, medians, last values and moving
averages, this is the one that neither noise, stragglers, drift nor a cold start leads astray.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean, median

WINDOW = 64


class Task(StrEnum):
    """Kinds of work with a duration of their own."""

    GENERATE = "generate"
    SCORE = "score"
    UPDATE = "update"
    TAG = "tag"
    SWITCH_IN = "switch_in"
    SWITCH_OUT = "switch_out"
    OPTIMIZER = "optimizer"
    SYNC = "sync"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTask:
    """Durations of one task on one worker, as they are kept over a restart."""

    task: Task
    worker: int
    """Index of the worker."""
    ticks: tuple[int, ...]
    """The last ones, oldest first."""


class Estimates:
    """Durations by task and worker, in ticks. A worker without samples is taken to be like the others."""

    def __init__(self, measured: Iterable[MeasuredTask] = ()) -> None:
        self._samples: dict[Task, dict[int, deque[int]]] = {task: {} for task in Task}
        self._counts: dict[Task, int] = dict.fromkeys(Task, 0)
        self._means: dict[tuple[Task, int], int] = {}
        for known in measured:
            for ticks in known.ticks:
                self.observe(known.task, known.worker, ticks)

    def observe(self, task: Task, worker: int, ticks: int) -> None:
        """A task took so long on a worker (its index)."""
        samples = self._samples[task].get(worker)
        if samples is None:
            samples = self._samples[task][worker] = deque(maxlen=WINDOW + 1)
        samples.append(ticks)
        self._counts[task] += 1
        self._means.pop((task, worker), None)

    def measured(self) -> tuple[MeasuredTask, ...]:
        """All samples that are looked at, to start another one from."""
        return tuple(
            MeasuredTask(task=task, worker=worker, ticks=tuple(samples))
            for task, by_worker in self._samples.items()
            for worker, samples in by_worker.items()
        )

    def samples(self, task: Task) -> int:
        """Samples of a task so far, over all workers."""
        return self._counts[task]

    def samples_of(self, task: Task, worker: int) -> int:
        """Samples of a task on one worker that the estimate still looks at."""
        return len(self._samples[task].get(worker, ()))

    def of(self, task: Task, worker: int) -> int | None:
        """Expected ticks of a task on a worker; None while nothing like it was ever seen."""
        known = self._means.get((task, worker))
        if known is not None:
            return known
        samples = self._samples[task].get(worker)
        if samples is None:
            others = [self.of(task, other) for other in self._samples[task]]
            return round(fmean(ticks for ticks in others if ticks is not None)) if others else None
        mean = self._means[task, worker] = _robust_mean(samples)
        return mean


def _robust_mean(samples: deque[int]) -> int:
    # A window that is full has lost its cold first sample already.
    warm = list(samples)[1:] if len(samples) > 1 else list(samples)
    limit = 2 * median(warm)
    return max(1, round(fmean(min(ticks, limit) for ticks in warm)))
