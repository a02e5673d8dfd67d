"""The scheduler: ``handle(event) -> commands``, a pure function of its state and the event.

One pool works in turn when the trainer is one of the generators (the inline executor, one process); with a trainer of
its own, generation of one micro-batch overlaps the update of another. Priorities of a free worker, first match wins:

    load newer weights > finish the step > evaluate > encode > score > accumulate > generate > stay idle

Invariants: an illegal event raises ProtocolError and changes nothing; the optimizer step comes after the last
micro-batch of its step and before any work of the next; while work is left, some command is outstanding.
"""

from __future__ import annotations

from digenrl.errors import ProtocolError
from digenrl.ids import WorkerId
from digenrl.scheduling.commands import (
    Accumulate,
    Command,
    Encode,
    Evaluate,
    Generate,
    OptimizerStep,
    Score,
    StopRun,
    SyncWeights,
    WorkerCommand,
)
from digenrl.scheduling.events import Event, Finished, RunStarted, StepOutcome
from digenrl.scheduling.state import SchedulerSettings, ScheduleState, Stage


class Scheduler:
    """Decides what every worker does next."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.settings = settings
        self._state = ScheduleState(settings)

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do and no command is outstanding."""
        state = self._state
        busy = any(worker.running for worker in state.workers.values())
        return state.started and not busy and (state.stopped or not (state.work_left or state.evaluations))

    @property
    def state(self) -> ScheduleState:
        """For views and tests; only the scheduler changes it."""
        return self._state

    def handle(self, event: Event) -> list[Command]:
        """Take one event and return the commands that it makes possible. Raises ProtocolError on an illegal event."""
        self._check(event)
        stop = self._apply(event)
        if stop is not None:
            return [stop]
        commands: list[Command] = []
        for worker in self.settings.workers:
            command = self._next_command(worker) if self._state.workers[worker].running is None else None
            if command is not None:
                self._start(command)
                commands.append(command)
        return commands

    def _check(self, event: Event) -> None:
        state = self._state
        if isinstance(event, RunStarted):
            if state.started:
                raise ProtocolError("The run has started twice.", fix="Send RunStarted once, as the first event.")
            return
        if not isinstance(event, Finished) or not isinstance(event.command, WorkerCommand):
            raise ProtocolError(f"{event} is not an event.", fix="This is a bug in the executor; please report it.")
        if not state.started:
            raise ProtocolError(f"{event} arrived before the run has started.", fix="Send RunStarted first.")
        worker = state.workers.get(event.command.worker)
        if worker is None or worker.running != event.command:
            running = worker.running if worker else "no worker of this run"
            raise ProtocolError(
                f"{event.command.worker} reports the end of {event.command}, which it was not doing.",
                why=f"It is: {running}.",
                fix="This is a bug in the executor; please report it with the run's trace.jsonl.",
            )
        if (event.outcome is not None) != isinstance(event.command, OptimizerStep):
            raise ProtocolError(
                f"{event.command} ended with outcome {event.outcome}.",
                why="An optimizer step has an outcome, and nothing else has one.",
                fix="This is a bug in the executor; please report it.",
            )
        if isinstance(event.command, Generate | Score | Accumulate):
            state.target(event.command.micro_batch, (type(event.command), "finished"))

    def _apply(self, event: Event) -> StopRun | None:
        state = self._state
        if isinstance(event, RunStarted):
            state.started = True
            return None
        command = event.command
        state.workers[command.worker].running = None
        match command:
            case Encode():
                state.encoded = True
            case Generate() | Score() | Accumulate():
                state.move(command.micro_batch, (type(command), "finished"))
            case SyncWeights():
                state.workers[command.worker].policy_version = command.policy_version
            case Evaluate():
                state.evaluations.remove(command.policy_version)
            case OptimizerStep():
                return self._close_step(event)
        return None

    def _close_step(self, event: Finished) -> StopRun | None:
        state = self._state
        state.skipped_in_a_row = state.skipped_in_a_row + 1 if event.outcome is StepOutcome.VOIDED else 0
        state.policy_version += 1
        if self.settings.trainer not in self.settings.generators:
            # A trainer of its own holds what it has just made; in one pool the load is a command like any other.
            state.workers[self.settings.trainer].policy_version = state.policy_version
        state.open_step()
        if state.skipped_in_a_row < self.settings.max_skipped_steps:
            return None
        state.stopped = True
        return StopRun(
            reason=f"{state.skipped_in_a_row} optimizer steps in a row were voided because the gradient was not finite "
            f"(steps {state.policy_version - state.skipped_in_a_row} to {state.policy_version - 1})"
        )

    def _start(self, command: WorkerCommand) -> None:
        state = self._state
        state.workers[command.worker].running = command
        if isinstance(command, Generate | Score | Accumulate):
            state.move(command.micro_batch, (type(command), "started"))

    def _next_command(self, name: WorkerId) -> WorkerCommand | None:
        if self._state.stopped:
            return None
        command = None
        if name in self.settings.generators:
            command = self._sync(name)
        if command is None and name == self.settings.trainer:
            command = self._finish_step(name) or self._evaluate(name)
        if command is None and name in self.settings.generators:
            command = self._encode(name) or self._score(name)
        if command is None and name == self.settings.trainer:
            command = self._accumulate(name)
        if command is None and name in self.settings.generators:
            command = self._generate(name)
        return command

    def _sync(self, name: WorkerId) -> WorkerCommand | None:
        state = self._state
        # After the last step generators need no weights any more; one that is also the trainer still evaluates them.
        needed = state.work_left or (name == self.settings.trainer and state.evaluations)
        if not needed or state.workers[name].policy_version == state.policy_version:
            return None
        return SyncWeights(
            worker=name,
            policy_version=state.policy_version,
            reason=f"holds version {state.workers[name].policy_version}, published is {state.policy_version}",
        )

    def _finish_step(self, name: WorkerId) -> WorkerCommand | None:
        state = self._state
        if not state.work_left or not state.all_at(Stage.ACCUMULATED):
            return None
        return OptimizerStep(
            worker=name, step=state.policy_version, reason=f"all {self.settings.micro_batches} micro-batches accumulated"
        )

    def _evaluate(self, name: WorkerId) -> WorkerCommand | None:
        state = self._state
        if not state.evaluations or state.evaluations[0] != state.policy_version:
            return None
        return Evaluate(worker=name, policy_version=state.policy_version, reason="evaluation is due at this version")

    def _encode(self, name: WorkerId) -> WorkerCommand | None:
        state = self._state
        if not state.work_left or state.encoded or name != self.settings.generators[0]:
            return None
        return Encode(worker=name, step=state.policy_version, reason="once per step, before its first trajectory")

    def _score(self, name: WorkerId) -> WorkerCommand | None:
        queue = self._state.scoring_queue
        if not queue:
            return None
        return Score(
            worker=name, micro_batch=queue[0], reason=f"oldest of {len(queue)} waiting; scoring goes before new generation"
        )

    def _accumulate(self, name: WorkerId) -> WorkerCommand | None:
        micro_batch = self._state.updatable()
        if micro_batch is None:
            return None
        order = "next by index" if self.settings.update_order == "index" else "first scored"
        return Accumulate(worker=name, micro_batch=micro_batch, reason=f"{order} of {len(self._state.update_queue)} scored")

    def _generate(self, name: WorkerId) -> WorkerCommand | None:
        state = self._state
        if not state.work_left or not state.encoded:
            return None
        pending = list(state.at(Stage.PENDING))
        if not pending:
            return None
        return Generate(
            worker=name,
            micro_batch=pending[0],
            policy_version=state.workers[name].policy_version,
            reason=f"first of {len(pending)} pending",
        )
