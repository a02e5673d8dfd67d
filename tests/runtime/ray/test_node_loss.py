"""A node that is lost takes its workers and what they had made with it; all of that is made again, and no number changes."""

from __future__ import annotations

import random
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from digenrl.runtime.ray.environment import prepare
from digenrl.runtime.train import train
from digenrl.scheduling.events import CommandFailed, TrajectoryLost, WorkerJoined, WorkerLost
from digenrl.trace.record import read_trace
from tests.runtime.ray.conftest import small_recipe
from tests.runtime.ray.test_kill import check_trace

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

STEPS, POINTS = 8, 5
# Until its step is complete, a trajectory waits where it was made.
HELD = (f"train.steps={STEPS}", "schedule.update_after=step")
FIRST, SECOND = "{cpus: 0.25, custom: {first: 0.1}}", "{cpus: 0.25, custom: {second: 0.1}}"
ON_TWO_NODES = (
    "cluster.placement=disaggregated",
    f"cluster.generators=[{{resources: {FIRST}}}, {{replicas: 2, resources: {SECOND}}}]",
    f"cluster.trainer.resources={FIRST}",
)


class Nodes:
    """A cluster of two nodes in this machine, to which this process is connected; a run uses that connection."""

    def __init__(self, folder: Path) -> None:
        import ray
        from ray.cluster_utils import Cluster

        # Small results would lie with the driver; so all of them lie on the node that made them, as large ones do.
        keep_nothing = {"max_direct_call_object_size": 0}
        first = {"num_cpus": 2, "resources": {"first": 1.0}, "temp_dir": str(folder), "_system_config": keep_nothing}
        self._cluster = Cluster(initialize_head=True, head_node_args=first)
        ray.init(address=self._cluster.address, log_to_driver=False)
        self._second = self._add()

    def lose_the_second(self) -> None:
        """Kill all processes of it, and start another one in its place."""
        self._cluster.remove_node(self._second, allow_graceful=False)
        self._second = self._add()

    def shutdown(self) -> None:
        import ray

        ray.shutdown()
        self._cluster.shutdown()

    def _add(self) -> Any:
        return self._cluster.add_node(num_cpus=2, resources={"second": 1.0})


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    prepare(private=True)
    folder = Path(tempfile.mkdtemp(prefix="nodes-", dir="/tmp"))  # sockets lie in it, whose paths have to be short
    found = Nodes(folder)
    try:
        yield found
    finally:
        found.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def is_scored(run: Path, step: int, index: int) -> bool:
    """Whether the trace of a run says that somebody was told to score a micro-batch."""
    trace = run / "trace.jsonl"
    wanted = rf'"Score", "worker": "[^"]+", "micro_batch": {{"step": {step}, "index": {index}}}'
    return trace.exists() and re.search(wanted, trace.read_text(encoding="utf-8")) is not None


def test_nodes_that_are_lost_change_no_number(nodes: Nodes, tmp_path: Path) -> None:
    seed = int(time.time())
    draw = random.Random(seed)
    calm = train(small_recipe(tmp_path / "calm", *HELD))
    seen: Counter[str] = Counter()
    for number in range(POINTS):
        run, step, after_s = tmp_path / f"run-{number}", draw.randrange(1, STEPS - 1), draw.uniform(0.0, 0.3)
        print(f"seed {seed}, point {number}: {after_s:.2f} s after the third micro-batch of step {step} was generated")
        # Nodes can be started in the main thread alone, and so the run is in the other one.
        with ThreadPoolExecutor(1) as other:
            under_loss = other.submit(train, small_recipe(run, *HELD, *ON_TWO_NODES))
            while not is_scored(run, step, 2) and not under_loss.done():
                time.sleep(0.02)
            time.sleep(after_s)
            nodes.lose_the_second()
            assert under_loss.result(300)["digests"] == calm["digests"]
        trace = read_trace(run / "trace.jsonl")
        check_trace(trace)
        events = [event for entry in trace.entries for event in entry.events]
        lost_at = [event.at_us for event in events if isinstance(event, WorkerLost)]
        assert len(lost_at) == 2, "both workers of the node are lost"
        known_at = [event.at_us for event in events if isinstance(event, CommandFailed)]
        late_s = (max(known_at) - min(lost_at)) / 1e6 if known_at else 0.0
        print(f"what was lost with the node was known {late_s:.1f} s after its workers were")
        seen.update(type(event).__name__ for event in events if isinstance(event, TrajectoryLost | WorkerJoined))
        seen["untouched"] += sum(isinstance(event, CommandFailed) and event.untouched for event in events)
    print(dict(seen))
    assert seen["TrajectoryLost"]
    assert seen["untouched"]
