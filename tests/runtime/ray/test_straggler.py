"""Workers that are slow, or stand still: the numbers stay, and the schedule makes the best of it."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest

from digenrl.runtime.train import train
from digenrl.scheduling.commands import OptimizerStep
from digenrl.scheduling.events import Finished, WorkerLost
from digenrl.simulation.measured import costs_of_trace
from digenrl.simulation.run import simulate
from digenrl.trace.record import Trace, read_trace
from tests.runtime.ray.conftest import DISAGGREGATED, small_recipe
from tests.runtime.ray.drivers import steps_done, workers
from tests.runtime.ray.test_kill import TWO_GENERATORS, check_trace

pytestmark = [pytest.mark.usefixtures("ray_session"), pytest.mark.timeout(600)]

HEARTBEAT_S = 2.0


class Slow:
    """Lets a worker run for a share of the time only, from a thread of its own; a context manager."""

    def __init__(self, run: Path, worker: str, share: float) -> None:
        self._run, self._worker = run, worker
        # Short against a generation, and against a heartbeat.
        self._on_s, self._off_s = 0.05 * share, 0.05 * (1 - share)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Slow:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(10)

    def _work(self) -> None:
        while not self._over.wait(0.02):
            pid = workers(self._run).get(self._worker)
            while pid is not None and not self._over.wait(self._on_s):
                os.kill(pid, signal.SIGSTOP)
                self._over.wait(self._off_s)
                os.kill(pid, signal.SIGCONT)


def stand_still(run: Path, worker: str, after_s: float, known_s: list[float]) -> None:
    """In a thread of its own: stop a worker for good, and note how long it took until the run gave it up."""
    deadline = time.monotonic() + 240
    while not steps_done(run) and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(after_s)
    pid, began = workers(run)[worker], time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    while workers(run).get(worker) == pid and time.monotonic() < deadline:
        time.sleep(0.02)
    known_s.append(time.monotonic() - began)


def trained_s(trace: Trace) -> float:
    """From the start of a run to its last optimizer step."""
    events = [event for entry in trace.entries for event in entry.events]
    return max(e.at_us for e in events if isinstance(e, Finished) and isinstance(e.command, OptimizerStep)) / 1e6


@pytest.mark.slow
def test_a_generator_that_is_five_times_slower_costs_no_more_than_it_must(tmp_path: Path) -> None:
    steps = "train.steps=40"
    calm = train(small_recipe(tmp_path / "calm", steps))
    run = tmp_path / "slow"
    with Slow(run, "generator-1", share=0.2):
        slowed = train(small_recipe(run, *DISAGGREGATED, TWO_GENERATORS, steps))
    assert slowed["digests"] == calm["digests"]
    trace = read_trace(run / "trace.jsonl")
    check_trace(trace)
    # The simulator gets the durations of this very run, in which other work on the machine and the cores that workers share
    # are contained. What is left to compare is what the schedule makes of them: waiting that it could have avoided.
    costs = costs_of_trace(trace, "the run's trace")
    predicted_s, took_s = sum(simulate(trace.settings, costs).step_times_s), trained_s(trace)
    print(
        f"generation {costs.generate[0]:.3f} s and {costs.generate[1]:.3f} s: predicted {predicted_s:.1f} s, took {took_s:.1f} s"
    )
    assert costs.generate[1] > 2 * costs.generate[0], "the generator was not slow"
    assert took_s <= 1.5 * predicted_s


@pytest.mark.slow
def test_a_worker_that_stands_still_is_given_up_after_the_heartbeat_s_time(tmp_path: Path) -> None:
    seed = int(time.time())
    steps, heartbeat = "train.steps=8", f"cluster.heartbeat_timeout_s={HEARTBEAT_S}"
    calm = train(small_recipe(tmp_path / "calm", steps))
    run, known_s = tmp_path / "still", list[float]()
    arguments = (run, "generator-0", random.Random(seed).uniform(0.0, 0.7), known_s)
    stop = threading.Thread(target=stand_still, args=arguments, daemon=True)
    stop.start()
    stilled = train(small_recipe(run, *DISAGGREGATED, TWO_GENERATORS, steps, heartbeat))
    stop.join(10)
    print(f"seed {seed}: given up {known_s[0]:.1f} s after it stood still")
    assert HEARTBEAT_S <= known_s[0] < HEARTBEAT_S + 5
    assert stilled["digests"] == calm["digests"]
    trace = read_trace(run / "trace.jsonl")
    check_trace(trace)
    lost = [event for entry in trace.entries for event in entry.events if isinstance(event, WorkerLost)]
    assert any(event.worker == "generator-0" and "no sign of life" in event.error for event in lost)
