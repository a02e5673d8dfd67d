"""Workers that are killed: the run goes on, and its numbers are those of a run in which nothing happened."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from digenrl.runtime.train import train
from digenrl.scheduling.commands import Accumulate, Generate
from digenrl.scheduling.events import Finished, WorkerJoined, WorkerLost
from digenrl.trace.record import Trace, read_trace
from digenrl.trace.replay import replay
from tests.runtime.ray.conftest import DISAGGREGATED, small_recipe

pytestmark = [pytest.mark.usefixtures("ray_session"), pytest.mark.timeout(900)]


class Killer:
    """Kills workers of a run, at random moments, from a thread of its own; a context manager."""

    def __init__(self, run: Path, kind: str, kills: int, seed: int) -> None:
        self._file = run / "workers.json"
        self._kind = kind
        self._left = kills
        self._random = random.Random(seed)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self.killed: list[str] = []

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(10)

    def _work(self) -> None:
        seen: set[int] = set()
        while self._left and not self._over.wait(0.05):
            if not self._file.exists():
                continue
            alive = {name: entry["pid"] for name, entry in json.loads(self._file.read_text()).items()}
            fresh = sorted(name for name, pid in alive.items() if name.startswith(self._kind) and pid not in seen)
            if not fresh:
                continue
            if self._over.wait(self._random.uniform(0.0, 1.5)):
                return
            name = self._random.choice(fresh)
            seen.add(alive[name])
            os.kill(alive[name], signal.SIGKILL)
            self.killed.append(name)
            self._left -= 1


def check_trace(trace: Trace) -> None:
    """Each micro-batch is trained exactly once, under the version of its step, and the record replays."""
    trained = Counter(
        event.command.micro_batch
        for entry in trace.entries
        for event in entry.events
        if isinstance(event, Finished) and isinstance(event.command, Accumulate)
    )
    assert set(trained.values()) == {1}
    assert len(trained) == trace.settings.steps * trace.settings.micro_batches
    for entry in trace.entries:
        for command in entry.commands:
            if isinstance(command, Generate) and not trace.settings.max_stale_fraction:
                assert command.policy_version == command.micro_batch.step
    replay(trace)


def events(trace: Trace, kind: type) -> list[object]:
    return [event for entry in trace.entries for event in entry.events if isinstance(event, kind)]


def survive(tmp_path: Path, kind: str, kills: int, steps: int, *changes: str, seed: int, calm: Any = None) -> Trace:
    """Train once undisturbed in one process and once on a cluster under fire; same digests. Returns the trace of the latter.

    calm: digests of the undisturbed run, where they are known.
    """
    print(f"kill points are drawn from seed {seed}")
    calm = calm or train(small_recipe(tmp_path / "calm", f"train.steps={steps}"))["digests"]
    run = tmp_path / "fire"
    with Killer(run, kind, kills, seed) as killer:
        under_fire = train(small_recipe(run, *DISAGGREGATED, f"train.steps={steps}", *changes))
    assert len(killer.killed) == kills, f"the run was over after {len(killer.killed)} kills: {killer.killed}"
    assert under_fire["digests"] == calm
    trace = read_trace(run / "trace.jsonl")
    check_trace(trace)
    assert events(trace, WorkerLost)
    return trace


TWO_GENERATORS = "cluster.generators.0.replicas=2"
POOL = "cluster.scorers={placement: pool, replicas: 2, resources: {cpus: 0.25}}"


def test_killed_generators_change_no_number(tmp_path: Path) -> None:
    trace = survive(tmp_path, "generator", 2, 16, TWO_GENERATORS, seed=int(time.time()))
    assert events(trace, WorkerLost)


@pytest.mark.slow
def test_a_run_whose_only_generator_is_killed_goes_on_with_the_trainer_and_takes_it_back(tmp_path: Path) -> None:
    trace = survive(tmp_path, "generator", 1, 24, seed=int(time.time()))
    assert events(trace, WorkerJoined)


LONG = 100


@pytest.fixture(scope="module")
def long_calm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Digests of a long run that nothing happens to."""
    return train(small_recipe(tmp_path_factory.mktemp("calm") / "run", f"train.steps={LONG}"))["digests"]


@pytest.mark.slow
@pytest.mark.parametrize("round_", range(4))
def test_twenty_killed_generators_change_no_number(round_: int, tmp_path: Path, long_calm: Any) -> None:
    # A broadcast that a generator dies in fails for the other, which takes the weights from the object store.
    transport = f"cluster.weight_transport={('object_store', 'broadcast')[round_ % 2]}"
    changes = (TWO_GENERATORS, "schedule.max_attempts=20", transport)
    survive(tmp_path, "generator", 5, LONG, *changes, seed=int(time.time()) + round_, calm=long_calm)


@pytest.mark.slow
@pytest.mark.parametrize("round_", range(2))
def test_ten_killed_scorers_change_no_number(round_: int, tmp_path: Path, long_calm: Any) -> None:
    survive(tmp_path, "scorer", 5, LONG, POOL, "schedule.max_attempts=20", seed=int(time.time()) + round_, calm=long_calm)
