"""The inline executor: every command runs in this process, one after the other, on one policy.

The generator and the trainer share the network, so loading published weights is nothing to do; it is still a command, so
that the schedule is the one that a cluster runs.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from digenrl.errors import ProtocolError
from digenrl.ids import StepOutcome, WorkerId
from digenrl.runtime.checkpointer import Checkpointer
from digenrl.runtime.interrupt import Interrupt
from digenrl.runtime.journal import Journal
from digenrl.runtime.ledger import Ledger
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
from digenrl.training.trainer import Trainer
from digenrl.workers.evaluator import Evaluator
from digenrl.workers.generator import Generator
from digenrl.workers.scorer import Scorer

INLINE_WORKER = WorkerId("inline")

_TIMING_NAMES: dict[type[WorkerCommand], str] = {
    Encode: "encode",
    Generate: "generate",
    Score: "score",
    Accumulate: "update",
    SwitchMode: "switch",
    OptimizerStep: "optimizer",
    SyncWeights: "sync",
    SaveCheckpoint: "save",
    Evaluate: "evaluate",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """Everything that one process can do for a run."""

    generator: Generator
    scorer: Scorer
    trainer: Trainer
    evaluator: Evaluator | None


class InlineExecutor:
    """Carries commands out in order of submission; see driver.Executor."""

    def __init__(self, workers: Workers, ledger: Ledger, journal: Journal, interrupt: Interrupt) -> None:
        self._interrupt = interrupt
        self.checkpointer: Checkpointer | None = None
        """Set once the scheduler is there; a run without one is never asked to save."""
        self._workers = workers
        self._ledger = ledger
        self._journal = journal
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
        began = self.now_us()
        outcome = self._carry_out(command, began)
        return (Finished(at_us=self.now_us(), command=command, outcome=outcome),)

    def _carry_out(self, command: WorkerCommand, began_us: int) -> StepOutcome | None:
        match command:
            case OptimizerStep():
                trainer = self._workers.trainer
                with self._interrupt.critical():
                    report = trainer.optimizer_step()
                    self._timed(command, began_us)
                    # A version whose step is not in the log must not be saved: it could not be logged again.
                    self._journal.stepped(command.step, report, self._ledger.close_step(command.step))
                    trainer.stepping = False
                return report.outcome
            case Encode():
                record = self._ledger.step(command.step)
                record.conditioning = self._workers.generator.encode(record.prompts)
                self._journal.encoded(self._workers.trainer.policy.adapter.truncated_prompts)
            case Generate():
                self._generate(command)
            case Score():
                self._score(command)
            case Accumulate():
                self._accumulate(command)
            case SyncWeights():
                held = self._workers.trainer.policy.version
                if held != command.policy_version:
                    raise ProtocolError(f"Version {command.policy_version} was to be loaded, and the policy is at {held}.")
            case Evaluate():
                self._evaluate(command)
            case SaveCheckpoint():
                with self._interrupt.critical():
                    self.save()
            case SwitchMode():
                raise ProtocolError("One process has no modes to switch between.", fix="This is a bug in the scheduler.")
        self._timed(command, began_us)
        return None

    def save(self) -> None:
        """Write a checkpoint of the version that the trainer is at, where a checkpointer is set."""
        if self.checkpointer is not None:
            self.checkpointer.skipped_steps = self._journal.skipped_steps
            self.checkpointer.save()

    def _timed(self, command: WorkerCommand, began_us: int) -> None:
        self._journal.timed(_TIMING_NAMES[type(command)], (self.now_us() - began_us) / 1e6)

    def _generate(self, command: Generate) -> None:
        samples = self._ledger.samples(command.micro_batch)
        record = self._ledger.step(command.micro_batch.step)
        record.trajectories[command.micro_batch.index] = self._workers.generator.generate(
            samples,
            self._ledger.conditioning(command.micro_batch.step),
            self._ledger.prompt_rows(samples),
            command.policy_version,
        )

    def _score(self, command: Score) -> None:
        record = self._ledger.step(command.micro_batch.step)
        trajectory = record.trajectories[command.micro_batch.index]
        prompts = [record.prompts[sample.prompt] for sample in trajectory.samples]
        batch = self._workers.scorer.score(trajectory.samples, prompts, trajectory.final_latents)
        self._ledger.add_rewards(command.micro_batch, trajectory.samples, batch.rewards)
        self._journal.scored(command.micro_batch, trajectory.samples, prompts, batch)

    def _accumulate(self, command: Accumulate) -> None:
        step, index = command.micro_batch.step, command.micro_batch.index
        trajectory = self._ledger.step(step).trajectories.pop(index)
        rows = self._ledger.prompt_rows([s for s in trajectory.samples if s.sample == 0])
        self._workers.trainer.accumulate(
            trajectory, self._ledger.conditioning(step).select(rows), self._ledger.advantages(command.micro_batch)
        )

    def _evaluate(self, command: Evaluate) -> None:
        evaluator = self._workers.evaluator
        assert evaluator is not None, "evaluations are scheduled only where the recipe has an eval section"
        self._journal.evaluated(command.policy_version, evaluator.evaluate(), evaluator.prompts)
