"""How many micro-batches wait where, counted from the commands and events of a trace."""

from __future__ import annotations

from enum import IntEnum

from digenrl.errors import ConfigError
from digenrl.ids import MicroBatchId
from digenrl.scheduling.commands import Accumulate, Generate, Score
from digenrl.scheduling.settings import SchedulerSettings


class _Queue(IntEnum):
    PENDING = 0
    SCORING = 1
    UPDATE = 2


_FROM = {Generate: _Queue.PENDING, Score: _Queue.SCORING, Accumulate: _Queue.UPDATE}


class Queues:
    """The three queues of every open step."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self._settings = settings
        self._steps: dict[int, dict[int, _Queue | None]] = {}
        """By step and index of the micro-batch: where it waits; None while it is worked on and once it is accumulated."""
        self._lengths: dict[int, list[int]] = {}
        self._in_use: set[MicroBatchId] = set()
        """Trajectories that are being scored or accumulated."""
        self._doomed: set[MicroBatchId] = set()
        """Those of them that were lost in the meantime."""

    def lengths(self, step: int) -> tuple[int, int, int]:
        """Pending, SQ and UQ of one step; nothing waits after the last one."""
        if step >= self._settings.steps:
            return 0, 0, 0
        self._open(step)
        pending, scoring, update = self._lengths[step]
        return pending, scoring, update

    def start(self, command: Generate | Score | Accumulate) -> None:
        """A micro-batch leaves its queue. Raises ConfigError when it does not wait there."""
        if self._where(command.micro_batch) is not _FROM[type(command)]:
            raise ConfigError(f"{command}, and its micro-batch does not wait for that.")
        self._move(command.micro_batch, None)
        if not isinstance(command, Generate):
            self._in_use.add(command.micro_batch)

    def finish(self, command: Generate | Score | Accumulate) -> None:
        """A micro-batch waits for what comes next, if anything does."""
        doomed = self._release(command.micro_batch)
        if isinstance(command, Accumulate):
            return
        scored = isinstance(command, Score) or self._settings.scoring == "inline"
        waits = _Queue.UPDATE if scored else _Queue.SCORING
        self._move(command.micro_batch, _Queue.PENDING if doomed else waits)

    def give_back(self, command: Generate | Score | Accumulate) -> None:
        """A command was not carried out: its micro-batch waits as before."""
        doomed = self._release(command.micro_batch)
        self._move(command.micro_batch, _Queue.PENDING if doomed else _FROM[type(command)])

    def lose(self, micro_batch: MicroBatchId) -> None:
        """A trajectory is gone: its micro-batch is pending again, after what works on it has ended.

        Raises ConfigError when there was none.
        """
        if micro_batch in self._in_use and micro_batch not in self._doomed:
            self._doomed.add(micro_batch)
            return
        if self._where(micro_batch) not in (_Queue.SCORING, _Queue.UPDATE):
            raise ConfigError(f"the trajectory of {micro_batch} was lost, and there was none.")
        self._move(micro_batch, _Queue.PENDING)

    def forget(self, step: int) -> None:
        """A step is complete."""
        self._steps.pop(step, None)
        self._lengths.pop(step, None)

    def _release(self, micro_batch: MicroBatchId) -> bool:
        """Nobody works on a trajectory any more; whether it was lost in the meantime."""
        doomed = micro_batch in self._doomed
        self._in_use.discard(micro_batch)
        self._doomed.discard(micro_batch)
        return doomed

    def _where(self, micro_batch: MicroBatchId) -> _Queue | None:
        if not 0 <= micro_batch.step < self._settings.steps:
            raise ConfigError(f"micro-batch {micro_batch} is of none of the {self._settings.steps} steps.")
        self._open(micro_batch.step)
        return self._steps[micro_batch.step].get(micro_batch.index)

    def _open(self, step: int) -> None:
        if step not in self._steps:
            count = self._settings.micro_batches
            self._steps[step] = dict.fromkeys(range(count), _Queue.PENDING)
            self._lengths[step] = [count, 0, 0]

    def _move(self, micro_batch: MicroBatchId, target: _Queue | None) -> None:
        self._open(micro_batch.step)
        stages, lengths = self._steps[micro_batch.step], self._lengths[micro_batch.step]
        source = stages.get(micro_batch.index)
        if source is not None:
            lengths[source] -= 1
        if target is not None:
            lengths[target] += 1
        stages[micro_batch.index] = target
