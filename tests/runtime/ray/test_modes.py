"""The numbers of a run do not depend on where and in which order its work is done."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from digenrl.metrics.log import read_metrics
from tests.runtime.ray.conftest import DISAGGREGATED, SHARED, TrainSmall

pytestmark = [pytest.mark.usefixtures("ray_session"), pytest.mark.timeout(400)]

MODES = {
    "colocated": ("cluster.placement=colocated", *SHARED),
    "naive": (*DISAGGREGATED, "schedule.micro_batching=none", "schedule.tag=never"),
    "batch axis": (*DISAGGREGATED, "schedule.micro_batching=batch_axis", "cluster.generators.0.ranks=2", "schedule.tag=never"),
    "GAP without TAG": (*DISAGGREGATED, "schedule.tag=never"),
    "static TAG": (*DISAGGREGATED, "schedule.tag=static", "schedule.tag_static=2"),
    "greedy TAG": (*DISAGGREGATED, "schedule.tag=greedy"),
    "BTS": (*DISAGGREGATED, "schedule.tag=bts"),
    "BTS+, two generators": (*DISAGGREGATED, "cluster.generators.0.replicas=2"),
    "BTS+, three generators": (*DISAGGREGATED, "cluster.generators.0.replicas=3"),
    "GAP over two ranks": (*DISAGGREGATED, "cluster.generators.0.ranks=2"),
    "scorers of their own": (*DISAGGREGATED, "cluster.scorers={placement: pool, resources: {cpus: 0.25}}"),
    "scoring in the driver": (*DISAGGREGATED, "cluster.scorers.placement=driver"),
}


@pytest.fixture(scope="module")
def inline(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Digests of the same run in one process."""
    from digenrl.runtime.train import train
    from tests.runtime.ray.conftest import small_recipe

    digests: dict[str, str] = train(small_recipe(tmp_path_factory.mktemp("inline") / "run"))["digests"]  # type: ignore[assignment]
    return digests


FAST = ("colocated", "naive", "BTS+, two generators", "scoring in the driver")
"""The most unlike ones; the others run with the slow tests."""


@pytest.mark.parametrize("mode", [mode if mode in FAST else pytest.param(mode, marks=pytest.mark.slow) for mode in MODES])
def test_every_mode_gives_the_weights_of_one_process(mode: str, inline: dict[str, str], train_small: TrainSmall) -> None:
    assert train_small("run", *MODES[mode])["digests"] == inline


@pytest.mark.slow
def test_weights_that_are_broadcast_are_the_weights_of_the_object_store(
    inline: dict[str, str], train_small: TrainSmall, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = (*DISAGGREGATED, "cluster.generators.0.replicas=2", "cluster.weight_transport=broadcast")
    assert train_small("run", *changes)["digests"] == inline
    assert "sent again" not in capsys.readouterr().out, "the broadcast failed, and the object store had to help out"


TWO_RANKS = ("cluster.trainer.ranks=2", "train.timestep_batch_size=4")


@pytest.mark.slow
def test_two_trainer_ranks_give_the_same_weights_in_both_placements_and_those_of_one_rank_to_rounding(
    train_small: TrainSmall, tmp_path: Path
) -> None:
    apart = train_small("apart", *DISAGGREGATED, *TWO_RANKS)
    together = train_small("together", "cluster.placement=colocated", *SHARED, *TWO_RANKS)
    assert apart["digests"] == together["digests"]
    train_small("alone", *DISAGGREGATED, "train.timestep_batch_size=4")
    norms = {name: [row["grad_norm"] for row in read_metrics(tmp_path / name / "metrics.jsonl")] for name in ("apart", "alone")}
    assert norms["apart"][0] == pytest.approx(norms["alone"][0], rel=1e-6)
    assert norms["apart"] == pytest.approx(norms["alone"], rel=1e-2), "later steps start from weights that AdamW has spread"


def test_workers_of_a_private_cluster_have_the_priority_of_their_driver() -> None:
    import ray

    @ray.remote(num_cpus=0)
    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, 0)

    assert ray.get(priority.remote(), timeout=60) == os.getpriority(os.PRIO_PROCESS, 0)
