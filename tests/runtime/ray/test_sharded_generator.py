"""A generator whose ranks hold one network together gives the numbers of one process, and is lost and taken back as a whole."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from digenrl.config.loader import load_recipe
from digenrl.runtime.train import replay, train
from digenrl.scheduling.events import WorkerJoined, WorkerLost
from digenrl.trace.record import read_trace
from tests.runtime.ray.conftest import DISAGGREGATED, TrainSmall, small_recipe
from tests.runtime.ray.test_kill import check_trace, events, survive

pytestmark = [pytest.mark.usefixtures("ray_session"), pytest.mark.timeout(600)]

SHARDED = "cluster.generators=[{ranks: 2, shard: 2, resources: {cpus: 0.25}}]"


@pytest.fixture(scope="module")
def inline(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Digests of the same run in one process."""
    return train(small_recipe(tmp_path_factory.mktemp("inline") / "run"))["digests"]


def test_a_network_that_two_ranks_hold_together_gives_the_weights_of_one_process(inline: Any, train_small: TrainSmall) -> None:
    assert train_small("run", *DISAGGREGATED, SHARDED, "schedule.tag=never")["digests"] == inline


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        (),
        ("cluster.weight_transport=broadcast",),
        ("rollout.num_generations=5", "rollout.forward_batch_size=2"),
        ("schedule.micro_batching=batch_axis", "rollout.prompts_per_step=5"),
        ("cluster.generators.0.ranks=4",),
        ("cluster.trainer.ranks=2", "train.timestep_batch_size=4"),
    ],
    ids=["TAG", "broadcast", "one rank makes a pass more", "a last micro-batch of one group", "two networks", "two trainers"],
)
def test_the_weights_are_those_of_whole_networks_in_every_mode(
    changes: tuple[str, ...], train_small: TrainSmall, capsys: pytest.CaptureFixture[str]
) -> None:
    # A trainer of two ranks sums gradients in an order of its own: compared with the same on whole networks.
    whole = (*DISAGGREGATED, "cluster.trainer.ranks=2") if any("trainer" in change for change in changes) else ()
    plain = tuple(change for change in changes if not change.startswith("cluster."))
    wanted = train_small("whole", *whole, *plain)["digests"]
    assert train_small("run", *DISAGGREGATED, SHARDED, *changes)["digests"] == wanted
    assert "sent again" not in capsys.readouterr().out, "the broadcast failed, and the object store had to help out"


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["object_store", "broadcast"])
def test_stale_trajectories_of_a_sharded_network_can_be_followed_in_one_process(transport: str, tmp_path: Path) -> None:
    changes = (SHARDED, "schedule.max_stale_fraction=0.5", "train.steps=5", f"cluster.weight_transport={transport}")
    digests = train(small_recipe(tmp_path / "run", *DISAGGREGATED, *changes))["digests"]
    trace = read_trace(tmp_path / "run" / "trace.jsonl")
    recipe = load_recipe(tmp_path / "run" / "recipe.yaml", [f"run.output_dir={tmp_path / 'inline'}", "cluster.placement=inline"])
    assert replay(recipe, trace)["digests"] == digests


@pytest.mark.slow
@pytest.mark.parametrize("rank", ["generator-0", "generator-0.1"])
def test_a_rank_that_is_killed_takes_its_replica_with_it_and_they_come_back_together(rank: str, tmp_path: Path) -> None:
    trace = survive(tmp_path, rank, 1, 40, SHARDED, seed=0)
    (lost,) = events(trace, WorkerLost)
    assert isinstance(lost, WorkerLost) and lost.worker == "generator-0"
    assert len(events(trace, WorkerJoined)) == 1


@pytest.mark.slow
def test_a_rank_that_hangs_does_not_hold_up_the_run_for_longer_than_a_sign_of_life_may_take(tmp_path: Path, inline: Any) -> None:
    run = tmp_path / "run"

    def stop() -> None:
        pid = json.loads((run / "workers.json").read_text())["generator-0.1"]["pid"]
        os.kill(pid, signal.SIGSTOP)

    def when_there() -> None:
        while not over.wait(0.05):
            if (run / "workers.json").exists():
                stop()
                return

    over, thread = threading.Event(), threading.Thread(target=when_there, daemon=True)
    thread.start()
    try:
        recipe = small_recipe(run, *DISAGGREGATED, SHARDED, "schedule.tag=never", "cluster.heartbeat_timeout_s=5")
        assert train(recipe)["digests"] == inline
    finally:
        over.set()
        thread.join(10)
    trace = read_trace(run / "trace.jsonl")
    check_trace(trace)
    (lost,) = events(trace, WorkerLost)
    assert isinstance(lost, WorkerLost) and "no sign of life" in lost.error
    assert len(events(trace, WorkerJoined)) == 1


@pytest.mark.slow
def test_an_error_on_one_rank_in_the_middle_of_a_generation_starts_the_replica_anew(tmp_path: Path, inline: Any) -> None:
    run = tmp_path / "run"
    recipe = small_recipe(
        run, *DISAGGREGATED, SHARDED, "schedule.tag=never", "algorithm.type=tests.runtime.ray.stumbling:Stumbling"
    )
    assert train(recipe)["digests"] == inline
    assert (run / "stumbled").exists()
    trace = read_trace(run / "trace.jsonl")
    check_trace(trace)
    (lost,) = events(trace, WorkerLost)
    assert isinstance(lost, WorkerLost) and "out of memory, say" in lost.error
    assert len(events(trace, WorkerJoined)) == 1
