"""``digenrl check`` of a recipe for a cluster: who does what, what it takes, and what of the schedule comes to nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from digenrl.cli.check import inspect
from digenrl.cli.main import app
from digenrl.cli.workers import worker_lines
from digenrl.config.checks import check_recipe
from digenrl.config.loader import load_recipe
from digenrl.runtime.build import ALL_ROLES
from digenrl.runtime.ray.placement import missing, ranks_of, sharing
from digenrl.scheduling.micro_batches import cut_into_micro_batches
from digenrl.scheduling.settings import stale_quota

QUICKSTART = str(Path(__file__).parents[2] / "recipes" / "quickstart.yaml")
POOLS = "cluster.placement=disaggregated"
Lines = Callable[..., list[str]]


def lines_of(*changes: str) -> list[str]:
    return worker_lines(load_recipe(QUICKSTART, changes))


def warnings_of(*changes: str) -> tuple[str, ...]:
    return inspect(load_recipe(QUICKSTART, [POOLS, *changes])).warnings


def test_a_run_in_one_process_has_no_workers_to_tell_of() -> None:
    assert lines_of("cluster.placement=inline") == []


def test_two_pools_are_told_with_what_each_does_and_takes() -> None:
    assert lines_of(POOLS) == [
        "on a cluster: 2 worker processes, in all 2 CPU, 2 GPU where the cluster has any (or less: on one machine with fewer "
        "cores, ranks that ask for no number share them)",
        "  generator-0: encode, generate, score; takes 1 CPU, 1 GPU where the cluster has any",
        "  trainer: train, evaluate, save, generate when idle (schedule.tag: bts_plus); takes 1 CPU, "
        "1 GPU where the cluster has any",
        "  driver, the process that you start: schedule",
    ]


def test_one_pool_does_everything_and_a_cpu_run_takes_no_gpu() -> None:
    assert lines_of("cluster.placement=colocated", "run.device=cpu", "eval=null", "cluster.trainer.resources.cpus=2") == [
        "on a cluster: 1 worker process, in all 2 CPU",
        "  pool: encode, generate, score, train, save; takes 2 CPU",
        "  driver, the process that you start: schedule",
    ]


def test_unlike_pools_scorers_and_labels_are_told_apart() -> None:
    fast = "{replicas: 4, ranks: 2, resources: {gpus: 0.5, custom: {h100: 1}, node_labels: {ray.io/accelerator-type: H100}}}"
    scorers = "cluster.scorers={placement: pool, replicas: 2, resources: {cpus: 0.5}}"
    found = lines_of(POOLS, f"cluster.generators=[{fast}, {{replicas: 1}}]", scorers, "schedule.tag=never")
    taken = "in all 11 CPU, 4 GPU, 8 h100, 4 more GPU where the cluster has any"
    assert found[0].startswith(f"on a cluster: 12 worker processes, {taken} (or less: ")
    assert found[1] == (
        "  generator-0 to generator-3, 2 ranks each: encode, generate; each rank takes 1 CPU, 0.5 GPU, 1 h100, on a node with "
        "ray.io/accelerator-type=H100"
    )
    assert found[2] == "  generator-4: encode, generate; takes 1 CPU, 1 GPU where the cluster has any"
    assert found[3] == "  scorer-0, scorer-1: score; each takes 0.5 CPU, 1 GPU where the cluster has any"
    assert found[4].startswith("  trainer: train, evaluate, save; takes ")


def test_ranks_that_hold_a_network_together_are_told() -> None:
    found = lines_of(POOLS, "cluster.generators=[{ranks: 4, shard: 2}, {ranks: 2}]", "cluster.trainer.ranks=2")
    assert found[1].startswith(
        "  generator-0, 4 ranks (each holds 1/2 of the network): encode, generate, score; each rank takes "
    )
    assert found[2].startswith("  generator-1, 2 ranks: encode, ")
    assert found[3].startswith("  trainer, 2 ranks (each holds 1/2 of the network): train, ")


def test_scoring_in_the_driver_is_told() -> None:
    assert lines_of(POOLS, "cluster.scorers.placement=driver")[-1].endswith("schedule, score (on its CPU)")


def test_check_prints_the_workers_and_has_them_in_json() -> None:
    told = CliRunner().invoke(app, ["check", QUICKSTART, POOLS]).output
    assert "\n  generator-0: encode, generate, score; takes " in told
    plain = json.loads(CliRunner().invoke(app, ["check", QUICKSTART, POOLS, "--json"]).output)
    assert [worker["name"] for worker in plain["workers"]] == ["generator-0", "trainer"]
    assert "workers" not in json.loads(
        CliRunner().invoke(app, ["check", QUICKSTART, "cluster.placement=inline", "--json"]).output
    )


def test_the_pool_that_does_everything_has_all_roles() -> None:
    (pool,) = ranks_of(load_recipe(QUICKSTART, ["cluster.placement=colocated"]), gpus=False)
    assert pool.roles == ALL_ROLES


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ((), ("(0.25) of a step's 3 micro-batches", "is 0.34", "schedule.groups_per_micro_batch=2 for 5 micro-batches")),
        (("schedule.micro_batching=none",), ("1 micro-batches", "is 1", "micro_batching=generation_axis schedule.groups_per")),
        (("schedule.max_stale_fraction=0.01",), ("(0.01)", "is 0.34")),
    ],
)
def test_a_stale_fraction_that_comes_to_nothing_is_warned_of_with_what_would_do(
    changes: tuple[str, ...], told: tuple[str, ...]
) -> None:
    (warning,) = warnings_of("schedule.max_stale_fraction=0.25", *changes)
    assert all(part in warning for part in told), warning


def test_no_finer_cut_is_proposed_where_there_is_none() -> None:
    (warning,) = warnings_of("schedule.max_stale_fraction=0.1", "schedule.groups_per_micro_batch=1")
    assert "cut finer" not in warning and "is 0.12" in warning


def test_a_stale_fraction_that_does_something_is_not_warned_of() -> None:
    assert warnings_of("schedule.max_stale_fraction=0.34") == ()
    assert warnings_of("schedule.max_stale_fraction=0") == ()


@settings(max_examples=60, deadline=None, database=None)
@given(
    prompts=st.integers(1, 40),
    groups=st.integers(1, 40),
    fraction=st.floats(0.004, 1),
    axis=st.sampled_from(["generation_axis", "batch_axis", "none"]),
    ranks=st.integers(1, 3),
)
def test_what_a_warning_proposes_does_something_and_nothing_less_would(
    prompts: int, groups: int, fraction: float, axis: str, ranks: int
) -> None:
    changes = [
        POOLS,
        f"rollout.prompts_per_step={prompts}",
        "data.stratify_by=null",
        f"schedule.groups_per_micro_batch={min(groups, prompts)}",
        f"schedule.max_stale_fraction={fraction}",
        f"schedule.micro_batching={axis}",
        f"cluster.generators.0.ranks={ranks}",
    ]
    recipe = load_recipe(QUICKSTART, changes)
    count = len(cut_into_micro_batches(prompts, recipe.groups_in_micro_batch))
    found = [warning for warning in inspect(recipe).warnings if "max_stale_fraction" in warning]
    assert bool(found) == (stale_quota(fraction, count) == 0)
    for warning in found:
        smallest = float(warning.partition("does something is ")[2].partition(",")[0])
        assert stale_quota(smallest, count) == 1
        assert stale_quota(smallest - 10 ** -max(2, len(str(count))), count) == 0
        proposed = [word for word in warning.split() if word.startswith("schedule.") and "=" in word]
        if proposed:
            finer = load_recipe(QUICKSTART, [*changes, *proposed])
            check_recipe(finer)
            many = len(cut_into_micro_batches(prompts, finer.groups_in_micro_batch))
            assert stale_quota(fraction, many) >= 1
            assert f"for {many} micro-batches" in warning


def test_the_ranks_of_one_worker_are_counted() -> None:
    found = lines_of("cluster.placement=disaggregated", "cluster.generators.0.ranks=3", "run.device=cpu")
    assert found[1] == "  generator-0, 3 ranks: encode, generate, score; each rank takes 1 CPU"


def test_sharing_that_is_proposed_where_there_is_no_room_makes_room() -> None:
    nodes = [{"Alive": True, "Resources": {"CPU": 2.0, "GPU": 1.0}, "Labels": {}}]
    pools = [POOLS, "cluster.generators=[{replicas: 6}, {resources: {cpus: 3}}]"]
    ranks = ranks_of(load_recipe(QUICKSTART, pools), gpus=True)
    assert missing(ranks, nodes)
    proposed = sharing(ranks, nodes[0]["Resources"])
    assert proposed[0] == "cluster.generators.0.resources.cpus=0.2"
    assert missing(ranks_of(load_recipe(QUICKSTART, [*pools, *proposed]), gpus=True), nodes) == []


def test_no_sharing_is_proposed_of_what_is_not_there() -> None:
    ranks = ranks_of(load_recipe(QUICKSTART, [POOLS, "cluster.trainer.resources.gpus=1"]), gpus=False)
    assert sharing(ranks, {"CPU": 8.0}) == []
