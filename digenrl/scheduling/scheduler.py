"""The scheduler: ``handle(events) -> commands``, a pure function of its state and the events.

A free generator: load newer weights > encode > score > generate > generate for the next step (TCSS) > stay idle. In a resumed
run it keeps the weights that it holds while micro-batches are left that were claimed with them (exactly the same come out).
A free trainer: publish > save > evaluate > continue a plan of back-to-back TAGs > accumulate > finish the step > at a
bubble, TAG or wait > stay idle. A worker that is both (one pool, in turn) does what the trainer would, and generates when
there is nothing to accumulate.

Invariants: an illegal event raises ProtocolError and changes nothing; the optimizer step comes after the last micro-batch of
its range and before any gradient of the next; no generation and no update starts without the encoded prompts; a trajectory has
one version, at most one step old, and no more than the quota are old; while work is left and a worker lives, some command is
outstanding.
"""

from __future__ import annotations

from digenrl.ids import MicroBatchId
from digenrl.scheduling.commands import (
    Accumulate,
    Command,
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
from digenrl.scheduling.costs import Task
from digenrl.scheduling.events import Event
from digenrl.scheduling.schedule_state import ScheduleState
from digenrl.scheduling.settings import SchedulerSettings
from digenrl.scheduling.state import Move, StepState, Worker
from digenrl.scheduling.tag import FORCED_SAMPLES, Bubble, TagDecider
from digenrl.scheduling.view import costs_of, expected_us, position_of

SAMPLES_BEFORE_DECLINING = 4
"""Generations of a replica, the cold first one among them, before it may leave work to others."""


class Scheduler:
    """Decides what every worker does next."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.settings = settings
        self._state = ScheduleState(settings)
        workers = self._state.workers
        self._generators = [workers[name] for name in settings.generators]
        self._scorers = [workers[name] for name in settings.scorers]
        self._trainer = workers[settings.trainer]
        self._encoders = frozenset(settings.encoders or settings.generators)
        self._decider = TagDecider(settings)
        # The reserve rule is the planner's: without it replicas take whatever is pending, as in the paper.
        self._reserves = settings.tag == "bts_plus"
        self._searches = settings.tag in ("bts", "bts_plus")

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do and no command is outstanding."""
        state = self._state
        return (
            state.started and not state.outstanding and (state.stopped or not (state.steps or state.evaluations or state.saves))
        )

    @property
    def state(self) -> ScheduleState:
        """For views and tests; only the scheduler changes it."""
        return self._state

    def handle(self, *events: Event) -> list[Command]:
        """Take in what happened at one instant and return the commands that it makes possible.

        Raises ProtocolError on an illegal event; the state is then as it was.
        """
        self._state.check(events)
        stop = self._state.apply(events)
        if stop is not None:
            return [stop]
        commands: list[Command] = []
        if not self._state.stopped:
            self._dispatch(commands)
        return commands

    def _dispatch(self, commands: list[Command]) -> None:
        look_at_all, self._state.look_at_all = self._state.look_at_all, False
        self._dispatch_generators(commands, look_at_all=look_at_all)
        for worker in self._scorers:
            if worker.running is None and worker.alive:
                command = self._score(worker)
                if command is None:
                    break
                self._start(worker, command, commands)
        if self._trainer.running is None and self._trainer.alive:
            step = self._state.step if self._reserves else None
            left = step.available - step.reserved if step is not None else 0
            command = self._for_trainer(self._trainer)
            if command is not None:
                self._start(self._trainer, command, commands)
            if step is not None and step.available - step.reserved > left:
                # A new plan leaves less to the trainer than the one before it, and the generators have not been asked for that.
                self._dispatch_generators(commands, look_at_all=True)

    def _dispatch_generators(self, commands: list[Command], *, look_at_all: bool) -> None:
        for worker in self._generators:
            if worker.running is not None or not worker.alive or worker is self._trainer:
                continue
            command = self._for_generator(worker)
            if command is not None:
                self._start(worker, command, commands)
            elif not look_at_all and not self._work_for_generators():
                break

    def _start(self, worker: Worker, command: WorkerCommand, commands: list[Command]) -> None:
        now = self._state.now_us
        worker.running, worker.started_us = command, now
        if self._searches and worker.index < len(self._generators):
            worker.expected_us = now + (expected_us(command, worker, self.settings, self._state.estimates) or 0)
        self._state.outstanding += 1
        commands.append(command)

    def _work_for_generators(self) -> bool:
        """Whether another free generator might still find something to do."""
        return any(step.scoring_queue or step.pending or step.needs_encoding for step in self._state.steps.values())

    def _for_generator(self, worker: Worker) -> WorkerCommand | None:
        state, step = self._state, self._state.step
        if step is None:
            return None
        if worker.policy_version != state.policy_version:
            if step.stale_claims and worker.policy_version == step.step - 1:
                return self._encode(worker, step) or self._score(worker) or self._generate_claimed_before(worker, step)
            return self._sync(worker)
        return self._encode(worker, step) or self._score(worker) or self._generate(worker, step) or self._stale(worker, step)

    def _for_trainer(self, worker: Worker) -> WorkerCommand | None:
        state = self._state
        if state.after_switch is not None:
            command, state.after_switch = state.after_switch, None
            return command
        step = state.step
        save_due = state.policy_version in state.saves[:1]
        due = state.policy_version in state.evaluations[:1]
        if worker.policy_version != state.policy_version and (step is not None or due or save_due):
            return self._sync(worker)
        if save_due:
            return SaveCheckpoint(worker=worker.name, policy_version=state.policy_version, reason="a checkpoint is due")
        if due:
            return Evaluate(worker=worker.name, policy_version=state.policy_version, reason="evaluation is due at this version")
        if step is None:
            return None
        if self.settings.one_pool:
            return (
                self._optimizer_step(worker, step)
                or self._encode(worker, step)
                or self._score(worker)
                or self._accumulate(worker, step)
                or self._generate(worker, step)
            )
        return (
            self._planned_tag(worker, step)
            or self._accumulate(worker, step)
            or self._optimizer_step(worker, step)
            or self._bubble(worker, step)
        )

    def _sync(self, worker: Worker) -> WorkerCommand:
        version = self._state.policy_version
        held = "none yet" if worker.policy_version < 0 else str(worker.policy_version)
        verb = "publish" if worker is self._trainer and not self.settings.one_pool else "load"
        return SyncWeights(worker=worker.name, policy_version=version, reason=f"{verb} version {version}; holds {held}")

    def _encode(self, worker: Worker, step: StepState) -> WorkerCommand | None:
        if worker.name not in self._encoders or not step.needs_encoding:
            return None
        step.encoding = True
        reason = "again: the encoded prompts were lost" if step.encoded_before else "once per step, before its first trajectory"
        return Encode(worker=worker.name, step=step.step, reason=reason)

    def _score(self, worker: Worker) -> WorkerCommand | None:
        if self.settings.scoring == "pool" and not (self._scorers and worker in self._scorers):
            return None
        for step in self._state.steps.values():
            if step.scoring_queue:
                index = step.scoring_queue[0]
                step.move(index, Score, Move.START)
                return Score(
                    worker=worker.name,
                    micro_batch=MicroBatchId(step.step, index),
                    reason=f"oldest of {len(step.scoring_queue) + 1} waiting; scoring goes before new generation",
                )
        return None

    def _generate(self, worker: Worker, step: StepState) -> WorkerCommand | None:
        if not step.encoded or not step.available:
            return None
        reserved = step.reserved
        if self._reserves and not self._should_claim(worker, step):
            return None
        left = f", {reserved} of them the trainer's" if reserved else ""
        return self._claim(worker, step, step.lowest_available(), f"first of {step.available} pending{left}")

    def _generate_claimed_before(self, worker: Worker, step: StepState) -> WorkerCommand | None:
        """What the run that this one continues had claimed with the weights of the step before, which this worker still holds.

        Without the encoded prompts it waits, rather than load the weights with which the same would come out differently.
        """
        if not step.encoded:
            return None
        step.stale_used += 1
        return self._claim(worker, step, step.stale_claims[0], "stale: claimed before the run was interrupted")

    def _should_claim(self, worker: Worker, step: StepState) -> bool:
        """The reserve rule (step_model.may_claim): leave the trainer's micro-batches, and what others would finish earlier."""
        jobs = step.available - step.reserved
        own = self._generate_us(worker)
        if jobs <= 0 or own is None or not self._well_known(worker):
            return jobs > 0
        now, before = self._state.now_us, 0
        for other in self._generators:
            if other is worker or not other.alive:
                continue
            spare = own if other.running is None else own - other.remaining_us(now)
            if spare > 0:
                before += (spare - (other.index > worker.index)) // (self._generate_us(other) or own)
                if before >= jobs:
                    return False
        return True

    def _well_known(self, worker: Worker) -> bool:
        """Whether a replica was measured often enough to decline: one slow sample must not lock it out for good."""
        known = self._state.estimates.samples_of(Task.GENERATE, worker.index)
        return self.settings.costs is not None or known >= SAMPLES_BEFORE_DECLINING

    def _generate_us(self, worker: Worker) -> int | None:
        if self.settings.costs is not None:
            return self.settings.costs.generate[worker.index]
        return self._state.estimates.of(Task.GENERATE, worker.index)

    def _stale(self, worker: Worker, step: StepState) -> WorkerCommand | None:
        """Generation for the next step with the present weights, while the quota lasts and nothing of this step is pending."""
        quota = self.settings.stale_quota
        if step.available or not quota:
            return None
        following = self._state.open(step.step + 1)
        if following is None or following.stale_used >= quota or not following.available:
            return None
        encode = self._encode(worker, following)
        if encode is not None or not following.encoded:
            return encode
        following.stale_used += 1
        reason = f"stale: {following.stale_used} of {quota} allowed for step {following.step}"
        return self._claim(worker, following, following.lowest_available(), reason)

    def _claim(self, worker: Worker, step: StepState, index: int, reason: str) -> Generate:
        step.move(index, Generate, Move.START)
        step.versions[index] = worker.policy_version
        return Generate(
            worker=worker.name,
            micro_batch=MicroBatchId(step.step, index),
            policy_version=worker.policy_version,
            reason=reason,
        )

    def _accumulate(self, worker: Worker, step: StepState) -> WorkerCommand | None:
        # A gradient needs the encoded prompts as well.
        index = step.updatable() if step.encoded else None
        if index is None:
            return None
        if self._state.trainer_generating:
            return self._back_to_training(worker, "an update")
        order = "next by index" if self.settings.update_order == "index" else "first scored"
        age = ", one version old" if step.stale(index) else ""
        reason = f"{order} of {len(step.update_queue)} scored{age}"
        step.move(index, Accumulate, Move.START)
        step.bubble_closed = False
        return Accumulate(worker=worker.name, micro_batch=MicroBatchId(step.step, index), reason=reason)

    def _optimizer_step(self, worker: Worker, step: StepState) -> WorkerCommand | None:
        if step.accumulated < step.update_end:
            return None
        return OptimizerStep(
            worker=worker.name,
            step=step.step,
            update=step.update,
            reason=f"all {step.update_end} of {self.settings.micro_batches} micro-batches accumulated",
        )

    def _planned_tag(self, worker: Worker, step: StepState) -> WorkerCommand | None:
        """TAGs that do not wait for a bubble: static ones, and the rest of a plan that is back to back."""
        if not step.encoded or not step.available or step.update:
            return None
        if self.settings.tag == "static" and step.tags < self.settings.tag_static and not step.accumulated:
            return self._tag(worker, step, f"TAG: {step.tags + 1} of {self.settings.tag_static}, fixed by tag_static")
        if step.sticky and step.reserved:
            step.reserved -= 1
            return self._tag(worker, step, f"TAG: back to back, {step.reserved} more planned")
        return None

    def _bubble(self, worker: Worker, step: StepState) -> WorkerCommand | None:
        """The trainer is free and has nothing to update: generate or wait."""
        policy = self.settings.tag
        # Between the updates of one rollout the weights have moved on: what were generated now would be of another policy.
        if policy == "never" or not step.encoded or not step.available or step.update:
            return None
        if not any(generator.alive for generator in self._generators):
            return self._tag(worker, step, "TAG: no generator is left")
        if policy == "static" or step.bubble_closed:
            return None
        if step.planned and self.settings.replan == "step":
            if not step.reserved:
                return None
            step.reserved -= 1
            return self._tag(worker, step, f"TAG: planned at the step's first bubble, {step.reserved} more")
        decision = self._decider.decide(self._look(step))
        # The searches count all that is pending; what only a generator may claim cannot be reserved for the trainer.
        reserved = min(decision.reserved, step.available - 1)
        step.planned, step.reserved, step.sticky = True, reserved, decision.sticky
        if decision.tag:
            return self._tag(worker, step, decision.reason)
        step.bubble_closed = True
        return None

    def _look(self, step: StepState) -> Bubble:
        alive = self._alive_generators()
        costs = costs_of(self.settings, self._state.estimates, alive, self._trainer)
        position = None
        if costs is not None:
            position = position_of(step, costs, alive, now_us=self._state.now_us, mode_generating=self._state.trainer_generating)
        measured = self._state.estimates.samples(Task.TAG) if self.settings.costs is None else FORCED_SAMPLES
        following = self._state.open(step.step + 1) if self.settings.stale_quota else None
        stale_left = self.settings.stale_quota - following.stale_used if following is not None else 0
        return Bubble(position=position, costs=costs, tag_samples=measured, stale_left=stale_left)

    def _tag(self, worker: Worker, step: StepState, reason: str) -> WorkerCommand:
        """Claim a micro-batch for the trainer; where its mode has to change first, the claim waits for that."""
        step.tags += 1
        command = self._claim(worker, step, step.lowest_available(), reason)
        if self._state.trainer_generating:
            return command
        self._state.after_switch = command
        return SwitchMode(worker=worker.name, generating=True, reason=reason)

    def _back_to_training(self, worker: Worker, what: str) -> WorkerCommand:
        # Nothing is claimed yet: what is updatable now may be lost by the time the mode has changed.
        return SwitchMode(worker=worker.name, generating=False, reason=f"for {what}")

    def _alive_generators(self) -> list[Worker]:
        return [worker for worker in self._generators if worker.alive]
