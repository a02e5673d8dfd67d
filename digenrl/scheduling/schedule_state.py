"""The state of a whole run's schedule, and how events change it.

Checking comes first and changes nothing: a batch of events is refused as a whole when one of them cannot be.
"""

from __future__ import annotations

from digenrl.errors import ProtocolError
from digenrl.ids import StepOutcome, WorkerId
from digenrl.scheduling.commands import (
    Accumulate,
    Encode,
    Evaluate,
    Generate,
    OptimizerStep,
    SaveCheckpoint,
    Score,
    StopRun,
    SwitchMode,
    SyncWeights,
    WorkerCommand,
)
from digenrl.scheduling.costs import Estimates, Task
from digenrl.scheduling.events import (
    CommandFailed,
    ConditioningLost,
    Event,
    Finished,
    RunStarted,
    TrajectoryLost,
    WorkerJoined,
    WorkerLost,
    WorkerOverdue,
)
from digenrl.scheduling.settings import SchedulerSettings
from digenrl.scheduling.state import Move, Stage, StepState, Worker


class ScheduleState:
    """The one mutable object of the schedule, owned by the Scheduler."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.settings = settings
        self.estimates = Estimates(settings.measured)
        self.started = False
        self.stopped = False
        self.now_us = 0
        self.policy_version = first = settings.first_version
        """Completed RL steps, which is also the step in training."""
        held = first - 1 if settings.stale_claims else first
        self.workers: dict[WorkerId, Worker] = {name: Worker(name, i, held) for i, name in enumerate(settings.workers)}
        self.steps: dict[int, StepState] = {first: StepState(first, settings)} if first < settings.steps else {}
        """Open steps: the one in training and, with stale generation, the next."""
        self.evaluations = list(settings.evaluate_at)
        """Versions still to be evaluated, ascending."""
        self.saves = list(settings.save_at)
        """Versions still to be saved, ascending."""
        self.skipped_in_a_row = settings.skipped_before
        self.trainer_generating = False
        """Mode of the trainer."""
        self.after_switch: Generate | None = None
        """What the trainer has claimed and is switching its mode for."""
        self.failures: dict[tuple[str, int], int] = {}
        """How often commands without a micro-batch have failed, by kind and by step or version."""
        self.outstanding = 0
        """Commands that workers are doing."""
        self.look_at_all = True
        """Something has happened that may concern every free worker, not only the ones that have just become free."""

    @property
    def trainer(self) -> Worker:
        """The worker that updates."""
        return self.workers[self.settings.trainer]

    @property
    def step(self) -> StepState | None:
        """The step in training; None when all are done."""
        return self.steps.get(self.policy_version)

    @property
    def stale_claims(self) -> tuple[int, ...]:
        """Micro-batches of the step in training that are claimed with the version before it, or still to be claimed with it.

        A checkpoint keeps them for ``SchedulerSettings.stale_claims`` of the run that continues from it. Empty when no step is
        open.
        """
        step = self.step
        if step is None:
            return ()
        return tuple(sorted([*step.stale_claims, *(index for index in range(len(step.stages)) if step.stale(index))]))

    def open(self, number: int) -> StepState | None:
        """A step that may be worked on; None past the last one."""
        if number not in self.steps and number < self.settings.steps:
            self.steps[number] = StepState(number, self.settings)
        return self.steps.get(number)

    def check(self, events: tuple[Event, ...]) -> None:
        """Raise ProtocolError unless all of these events can have happened at one instant."""
        subjects = set()
        for event in events:
            self._check(event)
            subject = _subject(event)
            if subject in subjects:
                raise ProtocolError(f"Two events of {subject} at one instant.", fix="Report them one after the other.")
            subjects.add(subject)

    def apply(self, events: tuple[Event, ...]) -> StopRun | None:
        """Take in checked events; the first reason to stop the run, if there is one."""
        stops = [stop for event in self._in_order(events) if (stop := self._apply(event)) is not None]
        self.stopped = self.stopped or bool(stops)
        return stops[0] if stops else None

    def _check(self, event: Event) -> None:
        if not isinstance(event, Event):
            raise ProtocolError(f"{event!r} is not an event.", fix="This is a bug in the executor; please report it.")
        if event.at_us < self.now_us:
            raise ProtocolError(f"{event} lies before {self.now_us} us, the time of the last event.", fix="Report in order.")
        if isinstance(event, RunStarted) == self.started:
            what = "The run has started twice." if self.started else f"{event} arrived before the run has started."
            raise ProtocolError(what, fix="Send RunStarted once, as the first event.")
        if isinstance(event, Finished | CommandFailed):
            self._check_command(event)
        elif isinstance(event, WorkerLost | WorkerJoined | WorkerOverdue):
            worker = self.workers.get(event.worker)
            if worker is None or worker.alive == isinstance(event, WorkerJoined):
                known = "no worker of this run" if worker is None else "alive" if worker.alive else "lost"
                raise ProtocolError(f"{event} cannot be: the worker is {known}.", fix="This is a bug in the executor.")
        elif isinstance(event, TrajectoryLost):
            step = self.steps.get(event.micro_batch.step)
            if step is None:
                raise ProtocolError(f"{event}: step {event.micro_batch.step} is not open.", fix="This is a bug in the executor.")
            if step.stage_of(event.micro_batch.index) not in _IN_WORK or event.micro_batch.index in step.doomed:
                step.target(event.micro_batch.index, None, Move.LOSE)
        elif isinstance(event, ConditioningLost):
            step = self.steps.get(event.step)
            if step is None or not step.encoded:
                state = "not open" if step is None else "not encoded"
                raise ProtocolError(f"{event}: step {event.step} is {state}.", fix="This is a bug in the executor.")

    def _check_command(self, event: Finished | CommandFailed) -> None:
        worker = self.workers.get(event.command.worker) if isinstance(event.command, WorkerCommand) else None
        if worker is None or (worker.running is not event.command and worker.running != event.command):
            running = worker.running if worker else "no worker of this run"
            raise ProtocolError(
                f"The end of {event.command} was reported, which its worker was not doing.",
                why=f"It is: {running}.",
                fix="This is a bug in the executor; please report it with the run's trace.jsonl.",
            )
        if isinstance(event, Finished) and (event.outcome is not None) != isinstance(event.command, OptimizerStep):
            raise ProtocolError(
                f"{event.command} ended with outcome {event.outcome}.",
                why="An optimizer step has an outcome, and nothing else has one.",
                fix="This is a bug in the executor; please report it.",
            )

    def _in_order(self, events: tuple[Event, ...]) -> list[Event]:
        """Completions of one instant by index of the worker, the trainer last; losses of what they made after them."""
        if len(events) == 1:
            return list(events)
        return sorted(events, key=self._rank)

    def _rank(self, event: Event) -> int:
        if isinstance(event, RunStarted | TrajectoryLost | ConditioningLost):
            return len(self.workers)
        name = event.command.worker if isinstance(event, Finished | CommandFailed) else event.worker
        return self.workers[name].index

    def _apply(self, event: Event) -> StopRun | None:
        self.now_us = event.at_us
        match event:
            case Finished():
                return self._finish(event)
            case RunStarted():
                self.started = True
            case CommandFailed():
                self._free(self.workers[event.command.worker])
                return self._give_back(event.command, event.error, untouched=event.untouched)
            case WorkerLost():
                return self._lose(event)
            case WorkerJoined():
                worker = self.workers[event.worker]
                worker.alive, worker.policy_version = True, -1
                self.look_at_all = True
            case WorkerOverdue():
                self._reopen_bubble()
            case TrajectoryLost():
                self._lose_trajectory(event)
            case ConditioningLost():
                self._lose_conditioning(event)
        return None

    def _finish(self, event: Finished) -> StopRun | None:
        command = event.command
        worker = self.workers[command.worker]
        if self.settings.costs is None:
            self._observe(worker, command, event.at_us - worker.started_us)
        self._free(worker)
        match command:
            case Generate():
                inline = self.settings.scoring == "inline"
                move = Move.FINISH_SCORED if inline else Move.FINISH
                self.steps[command.micro_batch.step].move(command.micro_batch.index, Generate, move)
            case Score():
                self.steps[command.micro_batch.step].move(command.micro_batch.index, Score, Move.FINISH)
                self._drop_lost(command)
            case Accumulate():
                step = self.steps[command.micro_batch.step]
                step.move(command.micro_batch.index, Accumulate, Move.FINISH)
                step.doomed.discard(command.micro_batch.index)  # its gradient is in all the same
            case Encode():
                self.steps[command.step].encoded = True
                self.look_at_all = True
            case SyncWeights():
                worker.policy_version = command.policy_version
            case Evaluate():
                self.evaluations.remove(command.policy_version)
            case SaveCheckpoint():
                self.saves.remove(command.policy_version)
            case SwitchMode():
                self.trainer_generating = command.generating
            case OptimizerStep():
                return self._close_update(event)
        return None

    def _observe(self, worker: Worker, command: WorkerCommand, ticks: int) -> None:
        task = _TASKS.get(type(command))
        if isinstance(command, Generate | Score | Accumulate):
            last = command.micro_batch.index == self.settings.micro_batches - 1
            if last and self.settings.partial_last:
                return
            if isinstance(command, Generate) and worker is self.trainer and not self.settings.one_pool:
                task = Task.TAG
        elif isinstance(command, SwitchMode):
            task = Task.SWITCH_IN if command.generating else Task.SWITCH_OUT
        if task is not None:
            self.estimates.observe(task, worker.index, ticks)

    def _close_update(self, event: Finished) -> StopRun | None:
        step = self.steps[self.policy_version]
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if event.outcome is StepOutcome.VOIDED else 0
        step.update += 1
        # No TAG between the updates of one rollout: what was planned for the trainer is everybody's again.
        step.reserved, step.sticky = 0, False
        self.look_at_all = True
        if step.update == self.settings.updates_per_rollout:
            del self.steps[self.policy_version]
            self.policy_version += 1
            self.open(self.policy_version)
        if self.skipped_in_a_row < self.settings.max_skipped_steps:
            return None
        first = step.step - (self.skipped_in_a_row - 1) // self.settings.updates_per_rollout
        return StopRun(
            reason=f"{self.skipped_in_a_row} optimizer steps in a row were voided because the gradient was not finite "
            f"(steps {first} to {step.step})"
        )

    def _lose(self, event: WorkerLost) -> StopRun | None:
        worker = self.workers[event.worker]
        worker.alive = False
        self._release_stale_claims()
        self._reopen_bubble()
        command = worker.running
        if command is not None:
            self._free(worker)
        if worker is self.trainer:
            return StopRun(reason=f"the trainer was lost{_because(event.error)}")
        return self._give_back(command, event.error or "its worker was lost") if command is not None else None

    def _release_stale_claims(self) -> None:
        """Let anybody generate what only workers with the version before could, once there is none of them left."""
        step = self.step
        if step is None or not step.stale_claims:
            return
        generators = (self.workers[name] for name in self.settings.generators)
        if not any(worker.alive and worker.policy_version == step.step - 1 for worker in generators):
            step.release_stale_claims()

    def _lose_trajectory(self, event: TrajectoryLost) -> None:
        step, index = self.steps[event.micro_batch.step], event.micro_batch.index
        stage = step.stages[index]
        if stage in _IN_WORK:
            step.doomed.add(index)  # its worker is still at it, and reports before it can be given back
        elif stage is not Stage.ACCUMULATED:  # else its update ended at this very instant
            step.move(index, None, Move.LOSE)
        self._reopen_bubble()

    def _lose_conditioning(self, event: ConditioningLost) -> None:
        step = self.steps.get(event.step)
        if step is None:
            return  # its last optimizer step ended at this very instant
        step.encoded = step.encoding = False
        step.encoded_before = True
        if self.after_switch is not None and self.after_switch.micro_batch.step == step.step:
            self._abandon_tag()
        self._reopen_bubble()

    def _abandon_tag(self) -> None:
        """What the trainer has claimed and is switching its mode for waits for anybody again."""
        command, self.after_switch = self.after_switch, None
        if command is None:
            return
        step = self.steps[command.micro_batch.step]
        step.move(command.micro_batch.index, Generate, Move.FAIL)
        step.tags -= 1
        step.planned, step.reserved, step.sticky = False, 0, False  # the plan has counted it

    def _give_back(self, command: WorkerCommand, error: str, *, untouched: bool = False) -> StopRun | None:
        """A command was not carried out: what it worked on waits again. Stops the run when it has failed too often."""
        self._reopen_bubble()
        if isinstance(command, Encode):
            self.steps[command.step].encoding = False
        if untouched and isinstance(command, SwitchMode):
            self._abandon_tag()
        # An update that failed half-way has touched the gradient.
        if not isinstance(command, Generate | Score) and not (untouched and isinstance(command, Accumulate)):
            return None if untouched else self._fail(command, error)
        step, index = self.steps[command.micro_batch.step], command.micro_batch.index
        step.move(index, type(command), Move.FAIL)
        if self._drop_lost(command) or untouched:
            return None
        step.attempts[index] += 1
        if step.attempts[index] < self.settings.max_attempts:
            return None
        first = index * self.settings.groups_per_micro_batch
        last = self.settings.partial_last and index == self.settings.micro_batches - 1
        until = "and after" if last else f"to {first + self.settings.groups_per_micro_batch - 1}"
        prompts = f"prompts {first} {until}"
        return StopRun(
            reason=f"micro-batch {command.micro_batch} ({prompts} of step {step.step}, all their samples) has failed "
            f"{step.attempts[index]} times{_because(error)}"
        )

    def _fail(self, command: WorkerCommand, error: str) -> StopRun | None:
        """A command without a micro-batch of its own has failed: it is tried again, unless that would repeat a change."""
        key = (type(command).__name__, getattr(command, "step", getattr(command, "policy_version", 0)))
        self.failures[key] = self.failures.get(key, 0) + 1
        # An update that failed half-way has touched the gradient, and a step cannot be taken twice.
        harmless = isinstance(command, Encode | SyncWeights | Evaluate)
        if harmless and self.failures[key] < self.settings.max_attempts:
            return None
        return StopRun(reason=f"{key[0]} has failed {self.failures[key]} times, last on {command.worker}{_because(error)}")

    def _drop_lost(self, command: Generate | Score | Accumulate) -> bool:
        """Give a micro-batch back whose trajectory was lost while a worker was at it; whether it was."""
        step, index = self.steps[command.micro_batch.step], command.micro_batch.index
        if index not in step.doomed:
            return False
        step.doomed.discard(index)
        step.move(index, None, Move.LOSE)
        self._reopen_bubble()
        return True

    def _reopen_bubble(self) -> None:
        if self.step is not None:
            self.step.bubble_closed = False
        self.look_at_all = True

    def _free(self, worker: Worker) -> None:
        worker.running = None
        self.outstanding -= 1


_IN_WORK = (Stage.SCORING, Stage.UPDATING)
"""Stages in which a trajectory is used."""

_TASKS: dict[type[WorkerCommand], Task] = {
    Generate: Task.GENERATE,
    Score: Task.SCORE,
    Accumulate: Task.UPDATE,
    OptimizerStep: Task.OPTIMIZER,
    SyncWeights: Task.SYNC,
}


def _subject(event: Event) -> object:
    """What an event is about: a worker, a micro-batch, or the run."""
    if isinstance(event, Finished | CommandFailed):
        return event.command.worker
    if isinstance(event, TrajectoryLost):
        return event.micro_batch
    if isinstance(event, ConditioningLost):
        return f"the encoded prompts of step {event.step}"
    return event.worker if isinstance(event, WorkerLost | WorkerJoined | WorkerOverdue) else None


def _because(error: str) -> str:
    return f": {error}" if error else ""
