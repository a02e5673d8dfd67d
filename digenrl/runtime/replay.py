"""Train along a recorded run: every command ends when, and as, it ended there, so that all choices are made again.

Which trajectories were one version old depended on who was ready first; here the record says it. The scheduler gets the recorded
events, with their times, and must answer with the recorded commands; the work itself is done anew, in one process or on workers.
Invariant: what a recorded worker lost or failed at is not done, and what it finished is done once, in the recorded order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from digenrl.config.schema import Recipe
from digenrl.errors import ConfigError, ProtocolError, RunFailed, WorkerError
from digenrl.ids import MicroBatchId, StepOutcome
from digenrl.runtime.system import RunExecutor
from digenrl.scheduling.commands import StopRun, WorkerCommand
from digenrl.scheduling.events import CommandFailed, ConditioningLost, Event, Finished, RunStarted, TrajectoryLost, WorkerLost
from digenrl.scheduling.settings import SchedulerSettings
from digenrl.trace.record import Trace


class ReplayExecutor:
    """Leads another executor along a record; see RunExecutor."""

    def __init__(self, inner: RunExecutor, trace: Trace) -> None:
        self._inner = inner
        self._entries = deque(trace.entries)
        self._commands = deque(c for entry in trace.entries for c in entry.commands if not isinstance(c, StopRun))
        self._ends = deque(_finished(trace))
        self._later: list[WorkerCommand] = []
        """Given, and done when they are due to end."""
        self._awaited: list[WorkerCommand] = []
        """Given to the inner executor, and not ended there."""
        self._done: list[tuple[WorkerCommand, StepOutcome | None]] = []
        """Ended in the inner executor, and not yet due."""
        first = self._entries[0].events if self._entries else ()
        if len(first) != 1 or not isinstance(first[0], RunStarted):
            raise ConfigError("The trace does not begin with the start of a run.", fix="Give the trace.jsonl of a run folder.")
        self._entries.popleft()
        self._now_us = first[0].at_us

    def now_us(self) -> int:
        """The recorded time."""
        return self._now_us

    @property
    def policy_version(self) -> int:
        """See RunExecutor."""
        return self._inner.policy_version

    def digests(self) -> dict[str, str]:
        """See RunExecutor."""
        return self._inner.digests()

    def finish(self) -> None:
        """See RunExecutor."""
        self._inner.finish()

    def ahead(self, command: WorkerCommand) -> bool:
        """See RunExecutor."""
        return self._inner.ahead(command)

    def forget(self, micro_batch: MicroBatchId) -> None:
        """See RunExecutor."""
        self._inner.forget(micro_batch)

    def forget_conditioning(self, step: int) -> None:
        """See RunExecutor."""
        self._inner.forget_conditioning(step)

    def submit(self, command: WorkerCommand) -> None:
        """Give a command on, unless the record says that it was never carried out."""
        self._expect(command)
        if not self._ends.popleft():
            return
        if self._inner.ahead(command):
            self._awaited.append(command)
            self._inner.submit(command)
        else:
            self._later.append(command)

    def next_events(self, timeout_s: float) -> Sequence[Event]:
        """The next recorded instant, once all that ended in it has ended here. Raises RunFailed where the record stops early."""
        if not self._entries:
            raise RunFailed(
                "The record ends here, before its run was over.",
                why="It was killed or stopped at this moment, with commands in hand.",
                fix="What was trained until here is saved; `digenrl train --resume RUN` goes on from it, without a record.",
            )
        entry = self._entries.popleft()
        for event in entry.events:
            if isinstance(event, Finished):
                self._end(event, timeout_s)
            elif isinstance(event, TrajectoryLost):
                self._inner.forget(event.micro_batch)
            elif isinstance(event, ConditioningLost):
                self._inner.forget_conditioning(event.step)
        self._now_us = entry.events[0].at_us
        return entry.events

    def _expect(self, command: WorkerCommand) -> None:
        recorded = self._commands.popleft() if self._commands else None
        if command != recorded:
            raise ProtocolError(
                f"The scheduler answers with {command}, and the record has {recorded}.",
                why="The record was made by another version of DigenRL, or was edited.",
                fix="Replay it with the DigenRL that wrote it.",
            )

    def _end(self, event: Finished, timeout_s: float) -> None:
        if event.command in self._later:
            self._later.remove(event.command)
            self._awaited.append(event.command)
            self._inner.submit(event.command)
        while not any(command == event.command for command, _ in self._done):
            events = self._inner.next_events(timeout_s)
            if not events:
                raise WorkerError(
                    f"Nothing happened for {timeout_s:g} s; waiting for {event.command}.", fix="Look at the workers' logs."
                )
            for happened in events:
                self._note(happened)
        place = next(i for i, (command, _) in enumerate(self._done) if command == event.command)
        _, outcome = self._done.pop(place)
        if outcome is not event.outcome:
            raise ProtocolError(
                f"{event.command} ended as {outcome}, and as {event.outcome} in the record.",
                why="The run is not the recorded one: its weights, rewards or settings differ.",
                fix="Replay with the recipe, the model and the rewards of the recorded run.",
            )

    def _note(self, event: Event) -> None:
        if isinstance(event, Finished) and event.command in self._awaited:
            self._awaited.remove(event.command)
            self._done.append((event.command, event.outcome))
        elif isinstance(event, CommandFailed | WorkerLost):
            raise WorkerError(
                f"A worker failed while a record was replayed: {event.error}.",
                why="The record does not have this failure, so its order cannot be kept.",
                fix="Start the replay again.",
            )


def _finished(trace: Trace) -> list[bool]:
    """For each command of a record, in order: whether it was carried out to its end."""
    ends: list[bool] = []
    running: dict[str, int] = {}
    for entry in trace.entries:
        for event in entry.events:
            if isinstance(event, Finished) and event.command.worker in running:
                ends[running.pop(event.command.worker)] = True
            elif isinstance(event, CommandFailed):
                running.pop(event.command.worker, None)
            elif isinstance(event, WorkerLost):
                running.pop(event.worker, None)
        for command in entry.commands:
            if not isinstance(command, StopRun):
                running[command.worker] = len(ends)
                ends.append(False)
    return ends


def check_replayable(recipe: Recipe, trace: Trace, ours: SchedulerSettings) -> None:
    """Raise ConfigError when a record cannot be followed with a recipe. ours: the schedule that the recipe itself asks for."""
    recorded = trace.settings
    if trace.source != "run":
        raise ConfigError(
            f"The trace was made by a {trace.source}.",
            why="No sample of it was ever made.",
            fix="Give the trace of a training run.",
        )
    if recorded.first_version:
        raise ConfigError(
            f"The trace begins at step {recorded.first_version}.",
            why="A record is followed from untrained weights; this one continues an earlier one.",
            fix="Give trace.jsonl, the record of the run's first process.",
        )
    sizes = ("steps", "micro_batches", "groups_per_micro_batch", "updates_per_rollout", "evaluate_at", "update_after")
    inline = recipe.cluster.placement == "inline"
    if inline and recorded.updates_per_rollout > 1 and recorded.update_after == "group":
        raise ConfigError(
            f"The trace has {recorded.updates_per_rollout} updates per rollout, and some of its samples were generated after the "
            "first of them.",
            why="By then one process has no weights of the step's version left to generate with.",
            fix="Replay with the run's own cluster.placement, or record a run with schedule.update_after=step.",
        )
    for name in (*sizes, *(() if inline else ("generators", "trainer", "scorers"))):
        before, now = getattr(recorded, name), getattr(ours, name)
        if before != now:
            raise ConfigError(
                f"The trace was recorded with {name}={before}, and this recipe has {now}.",
                why="Every command of the record has to find its work, and its worker.",
                fix="Use the run's own recipe.yaml; cluster.placement=inline follows any record in one process.",
            )
