from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import pytest

from digenrl.driver import drive
from digenrl.errors import ProtocolError, RunFailed, WorkerError
from digenrl.ids import StepOutcome, WorkerId
from digenrl.scheduling.commands import Generate, OptimizerStep, WorkerCommand
from digenrl.scheduling.events import Event, Finished, WorkerLost
from digenrl.scheduling.scheduler import Scheduler
from digenrl.scheduling.settings import SchedulerSettings
from digenrl.trace.record import TraceWriter, read_trace
from digenrl.trace.replay import replay

GENERATORS, TRAINER = (WorkerId("generator-0"), WorkerId("generator-1")), WorkerId("trainer")


class InstantExecutor:
    """Finishes commands in order of submission on a virtual clock; never finishes the kinds that it is told to sit on."""

    def __init__(self, outcome: StepOutcome = StepOutcome.APPLIED, sits_on: tuple[type, ...] = ()) -> None:
        self.submitted: list[WorkerCommand] = []
        self.waits: list[float] = []
        self._queue: deque[WorkerCommand] = deque()
        self._outcome = outcome
        self._sits_on = sits_on
        self._clock_us = 0

    def now_us(self) -> int:
        self._clock_us += 1
        return self._clock_us

    def submit(self, command: WorkerCommand) -> None:
        self.submitted.append(command)
        if not isinstance(command, self._sits_on):
            self._queue.append(command)

    def next_events(self, timeout_s: float) -> Sequence[Event]:
        self.waits.append(timeout_s)
        if not self._queue:
            return ()
        command = self._queue.popleft()
        outcome = self._outcome if isinstance(command, OptimizerStep) else None
        return (Finished(at_us=self.now_us(), command=command, outcome=outcome),)


def schedule(**changes: object) -> Scheduler:
    settings = {"steps": 4, "micro_batches": 3, "generators": GENERATORS, "trainer": TRAINER}
    return Scheduler(SchedulerSettings(**{**settings, **changes}))


def run(scheduler: Scheduler, executor: InstantExecutor, trace: Path, command_timeout_s: float = 2.5) -> None:
    with TraceWriter(trace, scheduler.settings) as writer:
        drive(scheduler, executor, writer, command_timeout_s=command_timeout_s)


def test_a_run_is_driven_to_its_end_and_recorded_as_it_was(tmp_path: Path) -> None:
    scheduler, executor = schedule(evaluate_at=(0, 2, 4)), InstantExecutor()
    run(scheduler, executor, tmp_path / "trace.jsonl")
    assert scheduler.finished
    assert scheduler.state.policy_version == 4
    trace = read_trace(tmp_path / "trace.jsonl")
    assert [c for entry in trace.entries for c in entry.commands] == executor.submitted
    assert replay(trace) == len(executor.submitted)
    times = [event.at_us for entry in trace.entries for event in entry.events]
    assert times == sorted(times)


def test_a_run_of_no_steps_asks_the_executor_for_nothing(tmp_path: Path) -> None:
    executor = InstantExecutor()
    run(schedule(steps=0), executor, tmp_path / "trace.jsonl")
    assert executor.submitted == []
    assert executor.waits == []


def test_a_silent_executor_leads_to_an_error_that_names_what_is_waited_for(tmp_path: Path) -> None:
    executor = InstantExecutor(sits_on=(Generate,))
    began = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        run(schedule(), executor, tmp_path / "trace.jsonl")
    assert time.monotonic() - began < 1
    assert caught.value.what == "Nothing happened for 2.5 s."
    for worker in GENERATORS:
        assert f"Generate(worker='{worker}'" in caught.value.why
    assert "trainer" not in caught.value.why
    assert "None" not in caught.value.why, "the trainer is idle"
    assert set(executor.waits) == {2.5}, "every wait has the deadline"


def test_what_was_recorded_before_the_silence_replays(tmp_path: Path) -> None:
    with pytest.raises(WorkerError):
        run(schedule(), InstantExecutor(sits_on=(OptimizerStep,)), tmp_path / "trace.jsonl")
    assert replay(read_trace(tmp_path / "trace.jsonl")) > 0


def test_a_stopped_run_fails_with_the_scheduler_s_reason_and_submits_nothing_more(tmp_path: Path) -> None:
    executor = InstantExecutor(outcome=StepOutcome.VOIDED)
    with pytest.raises(RunFailed, match="3 optimizer steps in a row were voided") as caught:
        run(schedule(), executor, tmp_path / "trace.jsonl")
    assert not isinstance(caught.value, WorkerError)
    assert sum(isinstance(c, OptimizerStep) for c in executor.submitted) == 3
    assert executor.submitted[-1] == OptimizerStep(worker=TRAINER, step=2, reason=executor.submitted[-1].reason)
    assert "StopRun" in (tmp_path / "trace.jsonl").read_text(encoding="utf-8").splitlines()[-1]


def test_an_executor_that_lies_is_a_protocol_error(tmp_path: Path) -> None:
    class Liar(InstantExecutor):
        def next_events(self, timeout_s: float) -> Sequence[Event]:
            command = OptimizerStep(worker=TRAINER, step=0)
            return (Finished(at_us=1, command=command, outcome=StepOutcome.APPLIED),)

    with pytest.raises(ProtocolError, match="which its worker was not doing"):
        run(schedule(), Liar(), tmp_path / "trace.jsonl")


def test_a_run_that_waits_for_lost_workers_names_them(tmp_path: Path) -> None:
    class Loses(InstantExecutor):
        def next_events(self, timeout_s: float) -> Sequence[Event]:
            lost, self._lost = getattr(self, "_lost", list(GENERATORS)), []
            return [WorkerLost(at_us=self.now_us(), worker=worker) for worker in lost]

    with pytest.raises(WorkerError) as caught:
        run(schedule(), Loses(), tmp_path / "trace.jsonl")
    assert "to come back: generator-0, generator-1" in caught.value.why
