"""Long and often repeated runs use no more memory, files, processes or folders than short ones."""

from __future__ import annotations

import os
import stat
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from digenrl.runtime.ray.environment import prepare
from digenrl.runtime.train import train
from tests.runtime.ray.conftest import DISAGGREGATED, small_recipe
from tests.runtime.ray.drivers import Remains, steps_done, workers

pytestmark = pytest.mark.timeout(1200)

STEPS, WARM = 100, 50
CYCLES = 20
KIB = 1024


class Meter:
    """Looks at a run's processes once a step, from a thread of its own; a context manager."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self.steps: list[int] = []
        self.memory: dict[str, list[int]] = {}
        """Bytes that a process has to itself, see ``own_bytes``; what it shares is the object store's, and counted there."""
        self.files: dict[str, list[int]] = {}
        """Open files by process."""

    def __enter__(self) -> Meter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(30)

    def _work(self) -> None:
        processes: dict[str, psutil.Process] = {}
        while not self._over.wait(0.05):
            done = steps_done(self._run)
            if not done or done in self.steps:
                continue
            processes = processes or self._processes()
            self.steps.append(done)
            for name, process in processes.items():
                self.memory.setdefault(name, []).append(own_bytes(process))
                self.files.setdefault(name, []).append(process.num_fds())
            self.memory.setdefault("object store", []).append(stored_bytes())

    def _processes(self) -> dict[str, psutil.Process]:
        this = psutil.Process()
        (server,) = (process for process in this.children() if process.name() == "gcs_server")
        named = {name: psutil.Process(pid) for name, pid in workers(self._run).items()}
        return {"driver": this, "gcs_server": server, **named}


def own_bytes(process: psutil.Process) -> int:
    """Memory that a process has written to and that nobody shares.

    Not its unique set size, which has the unwritten pages of its program, too, while no other process runs that program: Ray's
    GCS gains 15 MiB at the moment at which another test's cluster ends.
    """
    return sum(part.private_dirty for part in process.memory_maps())


def stored_bytes() -> int:
    """In the object store of this node, by Ray's own count, for which it has no public function."""
    import ray
    from ray._private.internal_api import node_stats

    (node,) = ray.nodes()
    reply = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], False)
    return int(reply.store_stats.object_store_bytes_used)


@pytest.mark.slow
def test_a_hundred_steps_take_no_more_memory_and_files_than_fifty(tmp_path: Path) -> None:
    run = tmp_path / "run"
    prepare(private=True)
    from digenrl.runtime.ray.session import RaySession

    # With adapters a version of the weights is small: one that happens to be there at a look does not hide a slow leak, and one
    # that is never given back is one all the same.
    with RaySession(None), Meter(run) as meter:
        train(small_recipe(run, *DISAGGREGATED, f"train.steps={STEPS}", "model.lora={rank: 4, alpha: 8}"))
    late = [place for place, step in enumerate(meter.steps) if step >= WARM]
    assert len(late) > (STEPS - WARM) / 2, f"it was looked at too seldom: {meter.steps}"
    assert set(meter.memory) == {"driver", "gcs_server", "generator-0", "trainer", "object store"}
    for name, values in meter.memory.items():
        growth = np.polyfit([meter.steps[place] for place in late], [values[place] for place in late], 1)[0]
        print(f"{name}: {growth / KIB:.1f} KiB a step, at most {max(values) / KIB**2:.0f} MiB")
        assert growth < 50 * KIB, name
    for name, values in meter.files.items():
        print(f"{name}: {min(values)} to {max(values)} open files")
        assert np.median(values[late[-10] :]) <= np.median(values[late[0] : late[10]]), name


@pytest.mark.slow
def test_twenty_clusters_one_after_the_other_leave_nothing_and_their_driver_as_it_was() -> None:
    prepare(private=True)
    import ray

    from digenrl.runtime.ray.session import RaySession

    @ray.remote
    class Worker:
        def make(self) -> np.ndarray:
            return np.ones(1_000_000)

    files: list[int] = []
    took_s: list[float] = []
    for _ in range(CYCLES):
        remains = Remains(os.getpid())
        with RaySession(None):
            assert ray.get(Worker.remote().make.remote(), timeout=60).sum() == 1_000_000
            remains.look()
            assert len(remains.processes()) > 5
            began = time.monotonic()
        took_s.append(time.monotonic() - began)
        remains.wait_until_gone(5)
        files.append(open_files())
    print(f"ended within {max(took_s):.1f} s; open files after each: {files}")
    assert files[-1] <= files[0]


def open_files() -> int:
    """Of this process, without sockets, of which gRPC keeps some until later."""
    found = 0
    for name in os.listdir("/dev/fd"):
        try:
            found += not stat.S_ISSOCK(os.fstat(int(name)).st_mode)
        except OSError:
            continue  # the listing's own
    return found
