"""The inline executor: every command runs in this process, one after the other, on one policy.

The generator and the trainer share the network, so loading published weights is nothing to do; it is still a command, so
that the schedule is the one that a cluster runs.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import torch

from digenrl.config.schema import Recipe
from digenrl.diffusion.trajectory import Trajectory
from digenrl.errors import ProtocolError
from digenrl.ids import MicroBatchId, StepOutcome, WorkerId
from digenrl.models.base import Conditioning
from digenrl.runtime.build import (
    ALL_ROLES,
    Start,
    build_components,
    build_ledger,
    choose_device,
    evaluation_prompts,
    schedule_settings,
)
from digenrl.runtime.checkpointer import Checkpointer, write_checkpoint
from digenrl.runtime.interrupt import Interrupt
from digenrl.runtime.journal import Journal, Pictures
from digenrl.runtime.ledger import Ledger
from digenrl.runtime.system import Run, timing_name
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
from digenrl.scheduling.events import Event, Finished
from digenrl.scheduling.scheduler import Scheduler
from digenrl.scheduling.settings import SchedulerSettings
from digenrl.training.digest import digests
from digenrl.training.policy import Policy
from digenrl.training.report import StepReport, merged_updates
from digenrl.training.trainer import Trainer
from digenrl.workers.evaluator import EvaluationSampler, evaluation_samples, summarise
from digenrl.workers.generator import Generator, encode_prompts, text_batch_size
from digenrl.workers.scorer import Scorer

INLINE_WORKER = WorkerId("inline")


class InlineSystem:
    """One process that does everything for a run; loaded when it is made. Raises ConfigError for what cannot be loaded."""

    def __init__(self, recipe: Recipe) -> None:
        self.ledger: Ledger[Conditioning, Trajectory] = build_ledger(recipe)
        self.held_out = evaluation_prompts(recipe)
        built = build_components(recipe, ALL_ROLES, choose_device(recipe.run.device))
        assert built.policy and built.generator and built.scorer and built.trainer, "it has all roles"
        self.recipe = recipe
        self.policy: Policy = built.policy
        self.generator: Generator = built.generator
        self.scorer: Scorer = built.scorer
        self.judge: Scorer | None = built.judge
        self.trainer: Trainer = built.trainer
        self.evaluation: EvaluationSampler | None = built.evaluation

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a user should know before the run."""
        return self.ledger.warnings

    def describe(self) -> str:
        """One line for the console."""
        return f"training {self.policy.num_parameters:,} parameters on {self.policy.adapter.device}"

    def settings(self, start: Start) -> SchedulerSettings:
        """See System.settings."""
        return schedule_settings(self.recipe, start, generators=(INLINE_WORKER,), trainer=INLINE_WORKER)

    def begin(self, settings: SchedulerSettings, start: Start, journal: Journal, interrupt: Interrupt, checkpoints: Path) -> Run:
        """See System.begin."""
        if start.checkpoint is not None:
            self.trainer.restore(start.checkpoint)
        scheduler = Scheduler(settings)
        checkpointer = Checkpointer(checkpoints, self.recipe, scheduler, journal)
        # A recorded generator may load a version after the recorded trainer has gone on to the next.
        alone = settings.workers == (INLINE_WORKER,)
        return Run(scheduler=scheduler, executor=InlineExecutor(self, journal, interrupt, checkpointer, checks_versions=alone))


class InlineExecutor:
    """Carries commands out in order of submission; see driver.Executor and system.RunExecutor."""

    def __init__(
        self,
        system: InlineSystem,
        journal: Journal,
        interrupt: Interrupt,
        checkpointer: Checkpointer,
        *,
        checks_versions: bool,
    ) -> None:
        self._system = system
        self._checks_versions = checks_versions
        self._ledger = system.ledger
        self._journal = journal
        self._interrupt = interrupt
        self._checkpointer = checkpointer
        self._eval_conditioning: Conditioning | None = None
        self._reports: list[StepReport] = []
        """Of the updates of the present step."""
        self._queue: deque[WorkerCommand] = deque()
        self._began = time.perf_counter_ns()

    def now_us(self) -> int:
        """Microseconds since the executor was made."""
        return (time.perf_counter_ns() - self._began) // 1000

    def submit(self, command: WorkerCommand) -> None:
        """Queue a command."""
        self._queue.append(command)

    def next_events(self, timeout_s: float) -> Sequence[Event]:
        """Carry out the oldest command; nothing when there is none. A running command is never cut short."""
        self._interrupt.check()
        if not self._queue:
            return ()
        command = self._queue.popleft()
        outcome = self._carry_out(command)
        return (Finished(at_us=self.now_us(), command=command, outcome=outcome),)

    @property
    def policy_version(self) -> int:
        """Completed RL steps."""
        return self._system.policy.version

    def digests(self) -> dict[str, str]:
        """See RunExecutor.digests."""
        return digests(self._system.trainer.weights())

    def finish(self) -> None:
        """Save the version that the trainer is at, unless its weights are in the middle of a change."""
        if self._system.trainer.settled:
            with self._interrupt.critical():
                self._save()

    def ahead(self, command: WorkerCommand) -> bool:
        """What depends on the weights that the policy holds when it is given, and changes none."""
        return isinstance(command, Encode | Generate | Score)

    def forget(self, micro_batch: MicroBatchId) -> None:
        """See RunExecutor."""
        self._ledger.discard(micro_batch)

    def forget_conditioning(self, step: int) -> None:
        """See RunExecutor."""
        self._ledger.step(step).conditioning = None

    def _carry_out(self, command: WorkerCommand) -> StepOutcome | None:
        """Do what a command says, now. Returns the outcome of an OptimizerStep."""
        began_us, trainer = self.now_us(), self._system.trainer
        match command:
            case OptimizerStep():
                with self._interrupt.critical():
                    report = trainer.optimizer_step()
                    self._reports.append(report)
                    self._timed(command, began_us)
                    if not self._system.policy.between_updates:
                        # A version whose step is not in the log must not be saved: it could not be logged again.
                        outcome, metrics = merged_updates([[each] for each in self._reports])
                        self._journal.stepped(command.step, outcome, metrics, self._ledger.close_step(command.step))
                        self._reports = []
                    trainer.stepping = False
                return report.outcome
            case Encode():
                record = self._ledger.step(command.step)
                record.conditioning = self._system.generator.encode(record.prompts)
                self._journal.encoded(self._system.policy.adapter.truncated_prompts)
            case Generate():
                self._generate(command)
            case Score():
                self._score(command)
            case Accumulate():
                self._accumulate(command)
            case SyncWeights():
                held = self._system.policy.version
                if self._checks_versions and held != command.policy_version:
                    raise ProtocolError(f"Version {command.policy_version} was to be loaded, and the policy is at {held}.")
            case Evaluate():
                self._evaluate(command)
            case SaveCheckpoint():
                with self._interrupt.critical():
                    self._save()
            case SwitchMode():
                pass  # of a recorded trainer; one process has no modes to switch between
        self._timed(command, began_us)
        return None

    def _save(self) -> None:
        checkpointer = self._checkpointer
        write_checkpoint(checkpointer.folder, self._system.trainer, checkpointer.state(), keep_last=checkpointer.keep_last)

    def _timed(self, command: WorkerCommand, began_us: int) -> None:
        self._journal.timed(timing_name(command), (self.now_us() - began_us) / 1e6)

    def _generate(self, command: Generate) -> None:
        samples = self._ledger.samples(command.micro_batch)
        record = self._ledger.step(command.micro_batch.step)
        record.trajectories[command.micro_batch.index] = self._system.generator.generate(
            samples,
            self._ledger.conditioning(command.micro_batch.step),
            torch.tensor([sample.prompt for sample in samples]),
            command.policy_version,
        )

    def _score(self, command: Score) -> None:
        record = self._ledger.step(command.micro_batch.step)
        trajectory = record.trajectories[command.micro_batch.index]
        samples = trajectory.samples
        prompts = [record.prompts[sample.prompt] for sample in samples]
        batch = self._system.scorer.score(samples, prompts, trajectory.final_latents)
        self._ledger.add_rewards(command.micro_batch, samples, batch.rewards)
        rows = self._journal.picture_rows(samples)
        pictures = Pictures(rows=rows, images=batch.images[rows])
        self._journal.scored(samples, prompts, batch.rewards, pictures, trajectory.policy_version)

    def _accumulate(self, command: Accumulate) -> None:
        step, index = command.micro_batch.step, command.micro_batch.index
        trajectory = self._ledger.step(step).trajectories.pop(index)
        rows = torch.tensor(self._ledger.micro_batch(command.micro_batch).prompts)
        self._system.trainer.accumulate(
            trajectory, self._ledger.conditioning(step).select(rows), self._ledger.advantages(command.micro_batch)
        )

    def _evaluate(self, command: Evaluate) -> None:
        system = self._system
        assert system.evaluation and system.judge, "evaluations are scheduled only where the recipe has an eval section"
        if self._eval_conditioning is None:
            size = text_batch_size(system.recipe)
            self._eval_conditioning = encode_prompts(system.policy.adapter, system.held_out, size)
        latents = system.evaluation.generate(self._eval_conditioning)
        scored = system.judge.score(evaluation_samples(command.policy_version, len(latents)), system.held_out, latents)
        self._journal.evaluated(command.policy_version, summarise(scored.images, scored.rewards), system.held_out)
