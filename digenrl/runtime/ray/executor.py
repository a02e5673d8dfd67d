"""The Ray executor: commands become calls of worker processes, and what they answer becomes events.

The driver keeps references: conditioning, trajectories and latents go from worker to worker, and ids, rewards and timings come
back here. Invariants: a command ends in exactly one event, whatever is answered twice or too late; a process that dies is a
WorkerLost, and what was lost with it is said in the same instant; no wait is without a deadline.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from ray import ObjectRef
from ray.exceptions import RayActorError, RayError, RayTaskError

from digenrl.errors import DigenError, ProtocolError, WorkerError
from digenrl.ids import MicroBatchId, SampleId, StepOutcome, WorkerId
from digenrl.rewards.compose import join_rewards
from digenrl.runtime.checkpointer import Checkpointer
from digenrl.runtime.interrupt import Interrupt
from digenrl.runtime.journal import Journal, Pictures
from digenrl.runtime.ray.answers import Pieces
from digenrl.runtime.ray.distribution import Distribution
from digenrl.runtime.ray.evaluation import RemoteEvaluation
from digenrl.runtime.ray.in_flight import Call, InFlight, Outcomes, Running, describe
from digenrl.runtime.ray.placement import DRIVER, Rank
from digenrl.runtime.ray.pool import Process, worker_exception
from digenrl.runtime.system import timing_name
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
from digenrl.scheduling.events import CommandFailed, ConditioningLost, Event, Finished, TrajectoryLost, WorkerJoined, WorkerLost
from digenrl.scheduling.micro_batches import filling, spread_over_ranks
from digenrl.scheduling.settings import SchedulerSettings
from digenrl.training.report import StepReport, merged_updates

if TYPE_CHECKING:
    from digenrl.runtime.ray.system import RaySystem

_TICK_S = 0.1
_SAVE_TIMEOUT_S = 12.0
"""How long a stop waits for the trainer's present command and its checkpoint, each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemotePart:
    """What one rank generated of a micro-batch."""

    samples: tuple[SampleId, ...]
    trajectory: ObjectRef[Any]
    """PackedTrajectory."""
    latents: ObjectRef[Any]
    """PackedTensor of its final latents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteTrajectory:
    """A micro-batch that lies in the object store."""

    policy_version: int
    parts: tuple[RemotePart, ...]

    def references(self) -> set[str]:
        """All that it is made of, in hex."""
        return {ref.hex() for part in self.parts for ref in (part.trajectory, part.latents)}


class RayExecutor(Outcomes):
    """Carries commands out on a cluster; see driver.Executor and system.RunExecutor."""

    def __init__(
        self,
        system: RaySystem,
        settings: SchedulerSettings,
        journal: Journal,
        interrupt: Interrupt,
        checkpointer: Checkpointer,
        weights: Distribution,
    ) -> None:
        self._system = system
        self._pool = system.pool
        self._ledger = system.ledger
        self._settings = settings
        self._journal = journal
        self._interrupt = interrupt
        self._checkpointer = checkpointer
        self._weights = weights
        self._policy_version = settings.first_version
        self._in_flight = InFlight(system.pool, system.inbox, self, journal.warn)
        self._loads: list[SyncWeights] = []
        """Loads that wait until their version is being published."""
        self._digests: dict[int, str] = {}
        """Of the published weights, by version; the newest."""
        self._reports: list[list[StepReport]] = []
        """Of the updates of the present step."""
        self._truncated: set[str] = set()
        self._local = ThreadPoolExecutor(max_workers=1, thread_name_prefix="scorer") if system.local_scorer else None
        self._evaluation = RemoteEvaluation(
            system.pool,
            system.held_out,
            system.recipe.log.num_samples,
            journal,
            self._run,
            partial(self._locally, "score_held_out") if system.local_scorer else None,
        )
        self._clock_us = 0
        self._began = time.perf_counter_ns()
        self._workers_file = checkpointer.folder.parent / "workers.json"
        self._pool.write_list(self._workers_file)
        self._pool.on_lost = self._lost
        self._pool.on_back = self._back

    def now_us(self) -> int:
        """Microseconds since the executor was made; never goes back."""
        self._clock_us = max(self._clock_us, (time.perf_counter_ns() - self._began) // 1000)
        return self._clock_us

    @property
    def policy_version(self) -> int:
        """Completed RL steps."""
        return self._policy_version

    def submit(self, command: WorkerCommand) -> None:
        """Send a command; returns at once."""
        match command:
            case Encode():
                self._encode(command)
            case Generate():
                self._generate(command)
            case Score():
                self._score(command)
            case Accumulate():
                self._accumulate(command)
            case OptimizerStep():
                self._run(command, self._calls(command.worker, "optimizer_step"), lambda a: self._stepped(command, a))
            case SwitchMode():
                self._run(command, self._calls(command.worker, "switch", command.generating), _nothing)
            case SyncWeights():
                self._sync(command)
            case Evaluate():
                self._evaluation.start(command, self._trainer())
            case SaveCheckpoint():
                self._run(command, self._calls(command.worker, "save", *self._checkpoint()), _nothing)

    def next_events(self, timeout_s: float) -> Sequence[Event]:
        """Wait for the next thing that happens; empty when nothing did for ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._interrupt.check()
            lost = self._pool.beat()
            if lost:
                return lost
            try:
                handler, future = self._system.inbox.items.get(timeout=_TICK_S)
            except queue.Empty:
                if time.monotonic() >= deadline:
                    return ()
                continue
            events = handler(future)
            if events:
                return events

    def finish(self) -> None:
        """Take a step in hand to its end, and save the version that the trainer is at, as far as that is quick."""
        if not all(process.up for process in self._trainer()) or not self._settle():
            return
        if self._reports:
            self._journal.warn(
                "save", "the run stops between two updates of a step, so the newest checkpoint stays the one before"
            )
            return
        refs = [self._pool.call(process, "save", *self._checkpoint())[0] for process in self._trainer()]
        _, late = ray.wait(refs, num_returns=len(refs), timeout=_SAVE_TIMEOUT_S)
        if late:
            self._journal.warn("save", "the trainer is busy, so the newest checkpoint stays the one before")
            return
        try:
            ray.get(refs)
        except RayTaskError as error:
            raise worker_exception(str(self._settings.trainer), "saving", error) from error
        except RayActorError:
            self._journal.warn("save", "the trainer died before it could save")

    def _checkpoint(self) -> tuple[str, dict[str, Any], int]:
        return str(self._checkpointer.folder), self._checkpointer.state(), self._checkpointer.keep_last

    def _settle(self) -> bool:
        """Wait for an optimizer step in hand, which could otherwise neither be saved nor be logged again. Whether it ended."""
        deadline = time.monotonic() + _SAVE_TIMEOUT_S
        while (running := self._in_flight.of(self._settings.trainer)) and isinstance(running.command, OptimizerStep):
            if time.monotonic() > deadline:
                return False
            try:
                handler, future = self._system.inbox.items.get(timeout=_TICK_S)
                handler(future)
            except queue.Empty:
                continue
            except DigenError:
                return False
        return True

    def digests(self) -> dict[str, str]:
        """See RunExecutor.digests."""
        refs = [self._pool.call(process, "digests")[0] for process in self._trainer()]
        try:
            found: dict[str, str] = ray.get(refs, timeout=self._system.recipe.cluster.command_timeout_s)[0]
        except RayError as error:
            raise worker_exception(str(self._settings.trainer), "summing up", error) from error
        return found

    def ahead(self, command: WorkerCommand) -> bool:
        """Every worker does its commands in the order in which they are given, so all may begin at once."""
        del command
        return True

    def forget(self, micro_batch: MicroBatchId) -> None:
        """See RunExecutor."""
        self._ledger.discard(micro_batch)

    def forget_conditioning(self, step: int) -> None:
        """See RunExecutor."""
        self._ledger.step(step).conditioning = None

    def _trainer(self) -> list[Process]:
        return self._pool.processes(self._settings.trainer)

    def _encode(self, command: Encode) -> None:
        record = self._ledger.step(command.step)

        def finish(answers: list[Any]) -> None:
            self._truncated |= answers[0]
            record.conditioning = conditioning
            self._journal.encoded(self._truncated)

        process = self._pool.processes(command.worker)[0]
        first, conditioning = self._pool.call(process, "encode", record.prompts, num_returns=2)
        self._run(command, [(process, first)], finish)

    def _generate(self, command: Generate) -> None:
        micro_batch, version = command.micro_batch, command.policy_version
        conditioning = self._ledger.conditioning(micro_batch.step)
        recipe, processes = self._system.recipe, self._pool.processes(command.worker)
        shares = spread_over_ranks(
            self._ledger.micro_batch(micro_batch),
            recipe.rollout.num_generations,
            len(processes),
            recipe.schedule.micro_batching,
        )
        fills = filling([len(share) for share in shares], recipe.rollout.forward_batch_size, processes[0].rank.shard)
        calls: list[Call] = []
        parts = []
        for process, share, fill in zip(processes, shares, fills, strict=True):
            samples = tuple(SampleId(micro_batch.step, prompt, sample) for prompt, sample in share)
            filled = samples + (self._ledger.samples(micro_batch)[0],) * fill
            if not filled:
                continue
            arguments = (filled, version, conditioning, len(samples))
            first, trajectory, latents = self._pool.call(process, "generate", *arguments, num_returns=3)
            calls.append((process, first))
            if samples:
                parts.append(RemotePart(samples=samples, trajectory=trajectory, latents=latents))

        def finish(_: list[Any]) -> None:
            record = self._ledger.step(micro_batch.step)
            record.trajectories[micro_batch.index] = RemoteTrajectory(policy_version=version, parts=tuple(parts))

        self._run(command, calls, finish)

    def _score(self, command: Score) -> None:
        record = self._ledger.step(command.micro_batch.step)
        trajectory: RemoteTrajectory = record.trajectories[command.micro_batch.index]
        samples = tuple(sample for part in trajectory.parts for sample in part.samples)
        due = set(self._journal.picture_rows(samples))
        calls: list[Call] = []
        start = 0
        for number, parts in enumerate(self._scored_together(command, trajectory)):
            ids = tuple(sample for part in parts for sample in part.samples)
            prompts = [record.prompts[sample.prompt] for sample in ids]
            rows = [row for row in range(len(ids)) if start + row in due]
            start += len(ids)
            latents = [part.latents for part in parts]
            if command.worker == DRIVER:
                calls.append(self._locally("score", ids, prompts, rows, *latents))
            else:
                processes = self._pool.processes(command.worker)
                process = processes[number % len(processes)]
                calls.append((process, self._pool.call(process, "score", ids, prompts, rows, *latents)[0]))

        def finish(answers: list[Any]) -> None:
            pieces: list[Pieces] = answers
            rewards = join_rewards([each.rewards for each in pieces])
            prompts = [record.prompts[sample.prompt] for sample in samples]
            self._ledger.add_rewards(command.micro_batch, samples, rewards)
            pictures = Pictures(rows=sorted(due), images=np.concatenate([each.pictures for each in pieces]))
            self._journal.scored(samples, prompts, rewards, pictures, trajectory.policy_version)

        self._run(command, calls, finish)

    def _scored_together(self, command: Score, trajectory: RemoteTrajectory) -> list[tuple[RemotePart, ...]]:
        """What is scored in one call: each rank's part by itself, or all where a reward has to see whole groups."""
        if command.worker == DRIVER:
            host = self._system.local_scorer
            compares = host is not None and host.hello().compares_groups
        else:
            compares = any(p.hello is not None and p.hello.compares_groups for p in self._pool.processes(command.worker))
        return [trajectory.parts] if compares else [(part,) for part in trajectory.parts]

    def _accumulate(self, command: Accumulate) -> None:
        step, index = command.micro_batch.step, command.micro_batch.index
        record, conditioning = self._ledger.step(step), self._ledger.conditioning(step)
        trajectory: RemoteTrajectory = record.trajectories[index]
        refs = tuple(part.trajectory for part in trajectory.parts)
        prompts, advantages = self._ledger.micro_batch(command.micro_batch).prompts, self._ledger.advantages(command.micro_batch)

        def finish(_: list[Any]) -> None:
            # Kept until now: a loss before the trainer began is mended by generating again.
            record.trajectories.pop(index)
            record.accumulated += 1

        more = record.accumulated + 1 < self._settings.update_range(record.update)[1]
        calls = self._calls(command.worker, "accumulate", prompts, advantages, more, conditioning, *refs)
        self._run(command, calls, finish)

    def _stepped(self, command: OptimizerStep, reports: list[StepReport]) -> StepOutcome:
        outcome = reports[0].outcome
        with self._interrupt.critical():
            self._ledger.step(command.step).update += 1
            self._reports.append(reports)
            if command.update == self._settings.updates_per_rollout - 1:
                self._policy_version = command.step + 1
                merged, metrics = merged_updates(self._reports)
                self._reports = []
                self._journal.stepped(command.step, merged, metrics, self._ledger.close_step(command.step))
        return outcome

    def _sync(self, command: SyncWeights) -> None:
        version = command.policy_version

        def hold(answers: list[tuple[int, str]]) -> None:
            for held, digest in answers:
                self._holds(held, digest, version)

        if self._settings.one_pool:
            self._run(command, self._calls(command.worker, "weights_digest"), hold)
        elif command.worker == self._settings.trainer:
            manifest = self._weights.publish(version, "publish")
            self._run(command, [(self._trainer()[0], manifest)], lambda a: self._holds(a[0].version, a[0].digest, version))
            waiting, self._loads = self._loads, []
            for load in waiting:
                self._sync(load)
        elif self._weights.has(version):
            self._load(command)
        else:
            # The trainer is told to publish at the same instant, after the generators: its bytes are waited for.
            self._loads.append(command)

    def _load(self, command: SyncWeights) -> None:
        holders = [process for process in self._pool.processes(command.worker) if "generate" in process.rank.roles]
        calls: list[Call] = [(process, self._weights.load(process, command.policy_version)) for process in holders]
        version = command.policy_version

        def loaded(answers: list[Any]) -> None:
            for digest in answers:
                self._holds(version, digest, version)

        self._run(command, calls, loaded)

    def _holds(self, held: int, digest: str, version: int) -> None:
        """Raise ProtocolError unless a worker that was to be at a version holds the very weights that all others hold."""
        known = self._digests.setdefault(version, digest)
        for old in sorted(self._digests)[:-2]:
            del self._digests[old]
        if held != version or digest != known:
            raise ProtocolError(
                f"A worker that was to be at version {version} holds {held} with digest {digest}, and {known} was published.",
                why="Samples would be of one policy, and their importance ratios of another.",
                fix="This is a bug, or a fault of the machine's memory; please report it with the run's trace.jsonl.",
            )

    def _calls(self, worker: WorkerId, method: str, *arguments: Any) -> list[Call]:
        """The same call to all ranks of a worker."""
        return [(process, self._pool.call(process, method, *arguments)[0]) for process in self._pool.processes(worker)]

    def _locally(
        self, method: str, samples: Sequence[SampleId], prompts: Sequence[Any], rows: Sequence[int], *latents: ObjectRef[Any]
    ) -> Call:
        """Score in this process, beside the driver's loop. method: of ScoringHost."""
        host, local = self._system.local_scorer, self._local
        assert host is not None and local is not None, "scorers.placement: driver has them"
        timeout = self._system.recipe.cluster.command_timeout_s
        score = getattr(host, method)
        return None, local.submit(lambda: score(samples, prompts, rows, *ray.get(list(latents), timeout=timeout)))

    def _run(self, command: WorkerCommand, calls: Sequence[Call], finish: Callable[[list[Any]], Any]) -> None:
        self._in_flight.run(command, calls, finish, now_us=self.now_us())

    def finished(self, running: Running, outcome: Any) -> Sequence[Event]:
        """See Outcomes."""
        at_us = self.now_us()
        self._journal.timed(timing_name(running.command), (at_us - running.began_us) / 1e6)
        return (Finished(at_us=at_us, command=running.command, outcome=outcome),)

    def failed(self, running: Running, error: str) -> Sequence[Event]:
        """See Outcomes."""
        return (CommandFailed(at_us=self.now_us(), command=running.command, error=error),)

    def resend(self, running: Running, process: Process, error: str) -> Sequence[Event]:
        """See Outcomes."""
        command = running.command
        assert isinstance(command, SyncWeights), "weights are sent by syncs alone"
        if self._weights.give_up(process, command.policy_version):
            self._load(command)
            return ()
        if not self._weights.has(command.policy_version):
            # The others have gone on while this was on its way: the newest version is loaded instead.
            return (CommandFailed(at_us=self.now_us(), command=command, error=error, untouched=True),)
        return self.failed(running, error)

    def input_lost(self, running: Running, lost: str, error: str) -> Sequence[Event]:
        """See Outcomes. What is gone is made again; it is reported together with the command, so that nothing comes between."""
        command, at_us = running.command, self.now_us()
        failed = CommandFailed(at_us=at_us, command=command, error=f"its input is gone: {error}", untouched=True)
        if isinstance(command, Evaluate):
            self._evaluation.forget_conditioning()
        elif isinstance(command, Generate | Score | Accumulate):
            micro_batch, record = command.micro_batch, self._ledger.step(command.micro_batch.step)
            trajectory = record.trajectories.get(micro_batch.index)
            if record.conditioning is not None and lost == record.conditioning.hex():
                record.conditioning = None
                return (failed, ConditioningLost(at_us=at_us, step=micro_batch.step))
            if trajectory is not None and lost in trajectory.references():
                self._ledger.discard(micro_batch)
                return (failed, TrajectoryLost(at_us=at_us, micro_batch=micro_batch))
            # Reported already, by another command that needed the same.
        elif not isinstance(command, SyncWeights):
            raise WorkerError(
                f"{describe(command)} needs data that is gone: {error}",
                why="It lay on a node that was lost.",
                fix="Go on from the newest checkpoint: digenrl train --resume RUN.",
            )
        return (failed,)

    def _lost(self, rank: Rank, error: str) -> Sequence[Event]:
        """A process is gone, and with it its worker and the command in hand."""
        self._in_flight.forget(rank.worker)
        self._pool.write_list(self._workers_file)
        self._loads = [load for load in self._loads if load.worker != rank.worker]
        again = "it is" if rank.crew is None else f"all ranks of {rank.worker} are"
        self._journal.warn(
            f"lost-{rank.name}-{self.now_us()}",
            f"{rank.name} is lost: {error}" + ("" if "train" in rank.roles else f"; {again} started anew"),
        )
        return (WorkerLost(at_us=self.now_us(), worker=rank.worker, error=f"{rank.name}: {error}"),)

    def _back(self, worker: WorkerId) -> Sequence[Event]:
        self._pool.write_list(self._workers_file)
        self._journal.say(f"{worker} is back")
        self._evaluation.worker_is_back()
        return (WorkerJoined(at_us=self.now_us(), worker=worker),)


def _nothing(answers: list[Any]) -> None:
    del answers
