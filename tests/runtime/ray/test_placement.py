"""Who runs where, and what is said to be missing, without a cluster."""

from __future__ import annotations

from typing import Any

import pytest

from digenrl.config.checks import check_recipe
from digenrl.config.loader import load_recipe
from digenrl.errors import ConfigError
from digenrl.runtime.ray.placement import missing, ranks_of
from tests.runtime.ray.conftest import QUICKSTART


def ranks(*changes: str, gpus: bool = False, cores: float | None = None) -> Any:
    return ranks_of(load_recipe(QUICKSTART, ["cluster.placement=disaggregated", *changes]), gpus=gpus, cores=cores)


def node(cpus: float, *, gpus: float = 0, labels: dict[str, str] | None = None, **custom: float) -> dict[str, Any]:
    return {"Alive": True, "Resources": {"CPU": cpus, "GPU": gpus, **custom}, "Labels": labels or {}}


def test_every_rank_of_every_pool_is_a_process_with_the_parts_that_its_work_needs() -> None:
    found = ranks("cluster.generators=[{replicas: 2, ranks: 2}]", "cluster.trainer.ranks=2")
    assert [rank.name for rank in found] == [
        "generator-0", "generator-0.1", "generator-1", "generator-1.1", "trainer", "trainer.1",
    ]  # fmt: skip
    assert found[0].roles == {"encode", "generate", "score"}
    assert found[1].roles == {"generate", "score"}, "one rank of a replica encodes"
    assert found[4].roles == found[5].roles == {"generate", "train"}, "a trainer that helps holds neither encoders nor VAE"


def test_ranks_that_hold_a_network_together_are_a_crew_and_others_are_not() -> None:
    found = ranks("cluster.generators=[{ranks: 4, shard: 2, timeout_s: 30}, {ranks: 2}]", "cluster.trainer.ranks=2")
    crews = {rank.name: rank.crew and (rank.crew.size, rank.crew.shard, rank.crew.timeout_s) for rank in found}
    assert crews == {
        **dict.fromkeys(("generator-0", "generator-0.1", "generator-0.2", "generator-0.3"), (4, 2, 30.0)),
        **dict.fromkeys(("generator-1", "generator-1.1"), None),
        **dict.fromkeys(("trainer", "trainer.1"), (2, 2, 600.0)),
    }


@pytest.mark.parametrize(
    ("sizes", "fix"), [("ranks: 3, shard: 2", "shard=3"), ("shard: 2", "shard=1"), ("ranks: 2, shard: 4", "shard=2")]
)
def test_a_shard_that_does_not_divide_the_ranks_of_its_pool_is_refused_with_both_numbers(sizes: str, fix: str) -> None:
    pools = f"cluster.generators=[{{ranks: 2}}, {{{sizes}}}]"
    with pytest.raises(ConfigError, match=r"cluster\.generators\.1\.shard \(\d\) does not divide .*ranks \(\d\)") as caught:
        check_recipe(load_recipe(QUICKSTART, ["cluster.placement=disaggregated", pools]))
    assert caught.value.fix is not None and f"cluster.generators.1.{fix} for one network" in caught.value.fix


def test_ranks_that_hold_a_network_together_do_not_share_a_gpu() -> None:
    pool = "cluster.generators=[{{ranks: 2, shard: {}, resources: {{gpus: 0.5}}}}]"
    check_recipe(load_recipe(QUICKSTART, ["cluster.placement=disaggregated", pool.format(1)]))
    with pytest.raises(ConfigError, match=r"shard \(2\) needs whole GPUs, and its ranks take 0\.5 each"):
        check_recipe(load_recipe(QUICKSTART, ["cluster.placement=disaggregated", pool.format(2)]))


def test_scorers_of_their_own_take_scoring_from_the_generators() -> None:
    found = ranks("cluster.scorers={placement: pool, replicas: 2}")
    assert [rank.name for rank in found] == ["generator-0", "scorer-0", "scorer-1", "trainer"]
    assert "score" not in found[0].roles
    assert found[1].roles == {"score"}


def test_colocated_ranks_do_everything_and_the_first_one_encodes() -> None:
    found = ranks("cluster.placement=colocated", "cluster.trainer.ranks=2")
    assert [rank.roles for rank in found] == [{"encode", "generate", "score", "train"}, {"generate", "score", "train"}]


def test_every_rank_takes_a_core_and_a_gpu_where_there_are_any() -> None:
    assert dict(ranks()[0].resources) == {"CPU": 1.0}
    assert dict(ranks(gpus=True)[0].resources) == {"CPU": 1.0, "GPU": 1.0}
    assert dict(ranks("run.device=cpu", gpus=True)[0].resources) == {"CPU": 1.0}
    assert dict(ranks("run.device=cuda")[0].resources) == {"CPU": 1.0, "GPU": 1.0}, "missing GPUs are then an error"


@pytest.mark.parametrize(("workers", "share"), [(1, 1.0), (3, 0.5), (7, 0.25), (8, 1.0)])
def test_on_a_small_machine_ranks_share_cores_down_to_a_quarter(workers: int, share: float) -> None:
    found = ranks(f"cluster.generators.0.replicas={workers}", cores=2.0)
    assert {rank.resources["CPU"] for rank in found} == {share}
    assert sum(rank.resources["CPU"] for rank in found) <= 2.0 or share == 1.0


def test_who_asks_for_a_number_of_cores_gets_it_and_the_others_share_the_rest() -> None:
    found = ranks("cluster.generators=[{replicas: 3}]", "cluster.trainer.resources.cpus=1", cores=2.0)
    assert [rank.resources["CPU"] for rank in found] == [0.33, 0.33, 0.33, 1.0]


def test_what_is_missing_is_named_with_amounts_labels_and_the_key_that_asks_for_it() -> None:
    found = ranks("cluster.generators=[{replicas: 3, resources: {gpus: 2, custom: {fast: 1}, node_labels: {kind: h100}}}]")
    lacking = missing(found, [node(8, gpus=4, fast=3), node(8, gpus=1, labels={"kind": "h100"}, fast=1)])
    assert lacking[0] == "6 GPU (5 there)"
    assert lacking[1] == (
        "a node with labels {'kind': 'h100'} that has 1 CPU, 2 GPU, 1 fast for generator-0 (cluster.generators.0.resources)"
    )
    assert missing(found, [node(8, gpus=8, labels={"kind": "h100"}, fast=3)]) == []


def test_a_dead_node_offers_nothing() -> None:
    dead = {**node(8), "Alive": False}
    assert "2 CPU (0 there)" in missing(ranks(), [dead])


def test_what_others_use_is_not_free() -> None:
    assert missing(ranks(), [node(8)], {"CPU": 1.5}) == ["2 CPU (1.5 free)"]


@pytest.mark.parametrize("sizes", ["ranks=4, shard=3", "ranks=4, shard=2, replicate=1", "ranks=3, replicate=2"])
def test_hsdp_sizes_that_do_not_multiply_are_refused_with_both_numbers(sizes: str) -> None:
    changes = [f"cluster.trainer.{size.strip()}" for size in sizes.split(",")]
    with pytest.raises(ConfigError, match=r"cluster\.trainer\.ranks \(\d\) is not shard"):
        check_recipe(load_recipe(QUICKSTART, ["cluster.placement=disaggregated", *changes]))
