"""A trainer of several ranks does what one process does, and all of its ranks are of one mind.

The ranks are real processes (fsdp_ranks.py), started once with two and once with four of them, and here their numbers are judged.
Tolerances: sums of float32 in another order differ by 1e-7 or so, relative to the whole; a gradient that is wrong, by far more.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from digenrl.training.timestep_parallel import PairBatch, pack_pairs, pairs_per_batch, share_of_rank, turns_of_rank
from tests.families import FAMILIES
from tests.training.fsdp_ranks import GROUP_SIZE, STALL_S, STALL_TIMEOUT_S, STEPS

pytestmark = pytest.mark.timeout(400)

ROOT = Path(__file__).parents[2]
DEADLINE_S = 300.0

Found = dict[str, Any]
"""What each check of a rank has found, by ``shard:check``."""

TWO = (
    *(f"2:{check}" for check in ("gradients", "three_steps", "invalid", "packing", "unsharded", "bfloat16", "families")),
    *(f"2:{check}" for check in ("average", "checkpoint", "publication", "auto")),
    *(f"1:{check}" for check in ("few_gradients", "two_steps", "few_invalid")),
)
FOUR = ("4:few_gradients", "4:continued", "2:few_gradients", "2:two_steps", "2:stalled")


def run_ranks(folder: Path, size: int, checks: Sequence[str], module: str = "tests.training.fsdp_ranks") -> list[Found]:
    """What the ranks found, in order. module: what they run, as fsdp_ranks.py. All are over when this returns."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-m", module, str(folder)]
    logs = [folder / f"{size}-{rank}.log" for rank in range(size)]
    processes = []
    # One that earlier ranks left holds their addresses, which these would try to reach.
    (folder / f"store-{size}").unlink(missing_ok=True)
    try:
        for rank, path in enumerate(logs):
            with path.open("w", encoding="utf-8") as log:
                arguments = [*command, str(rank), str(size), *checks]
                processes.append(subprocess.Popen(arguments, cwd=ROOT, env=environment, stdout=log, stderr=log))
        deadline = time.monotonic() + DEADLINE_S
        for process in processes:
            process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        pytest.fail(f"the ranks hang:\n{_tails(logs)}")
    finally:
        for process in processes:
            process.kill()
            process.wait(10)
    if any(process.returncode for process in processes):
        pytest.fail(f"a rank failed:\n{_tails(logs)}")
    return [json.loads((folder / f"{size}-{rank}.json").read_text(encoding="utf-8")) for rank in range(size)]


def _tails(logs: Sequence[Path]) -> str:
    return "\n".join(f"--- {log.name}\n{log.read_text(encoding='utf-8')[-3000:]}" for log in logs)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Callable[[str], Path]) -> Path:
    """Where the ranks find the models and leave their checkpoints."""
    place = tmp_path_factory.mktemp("ranks")
    for case in FAMILIES:
        (place / case.name).symlink_to(tiny_folder(case.name))
    return place


@pytest.fixture(scope="module")
def two(folder: Path) -> list[Found]:
    """What two ranks found."""
    return run_ranks(folder, 2, TWO)


@pytest.fixture(scope="module")
def four(folder: Path, two: list[Found]) -> list[Found]:
    """What four ranks found, after the two have written their checkpoints."""
    del two
    return run_ranks(folder, 4, FOUR)


@pytest.fixture(scope="module")
def ways(two: list[Found], four: list[Found]) -> dict[str, list[Found]]:
    """By how many ranks there are and over how many of them weights are spread: what each rank found, by check."""
    return {
        f"{len(ranks)} ranks, shard {shard}": [
            {name[2:]: found for name, found in rank.items() if name.startswith(f"{shard}:")} for rank in ranks
        ]
        for ranks in (two, four)
        for shard in (1, 2, 4)
    }


WAYS = ("2 ranks, shard 2", "2 ranks, shard 1", "4 ranks, shard 4", "4 ranks, shard 2")


@pytest.mark.parametrize("way", WAYS)
def test_the_summed_gradient_its_norm_and_z_are_those_of_one_process(way: str, ways: dict[str, list[Found]]) -> None:
    ranks = ways[way]
    for rank in ranks:
        for name, found in (rank.get("gradients") or rank["few_gradients"]).items():
            assert found["relative"] <= 1e-5, name
            alone, shared = found["norm"]
            assert shared == pytest.approx(alone, rel=1e-6), name
            assert found["pairs"] == [2 * GROUP_SIZE * STEPS] * 2, name
            alone_without, shared_without = found["left out"]
            assert shared_without == alone_without, f"{name}: parameters that no gradient reaches"


@pytest.mark.parametrize("way", WAYS)
def test_a_reference_that_is_never_trained_does_not_pile_up_what_only_training_clears(
    way: str, ways: dict[str, list[Found]]
) -> None:
    noted = [rank.get("gradients") or rank["few_gradients"] for rank in ways[way]]
    assert all(found["noted"] == 0 for rank in noted for found in rank.values())


def test_every_model_family_has_the_gradient_of_one_process(two: list[Found]) -> None:
    judge_families([rank["2:families"] for rank in two])


@pytest.mark.slow
def test_every_model_family_has_the_gradient_of_one_process_with_adapters_too(folder: Path) -> None:
    judge_families([rank["2:lora_families"] for rank in run_ranks(folder, 2, ["2:lora_families"])])


def judge_families(ranks: Sequence[Found]) -> None:
    for rank in ranks:
        assert set(rank) == {case.name for case in FAMILIES}
        for name, found in rank.items():
            assert found["relative"] <= 1e-5, name
            assert found["norm"][1] == pytest.approx(found["norm"][0], rel=1e-6), name
            assert found["digest"] == ranks[0][name]["digest"], name


@pytest.mark.parametrize("way", WAYS)
def test_all_ranks_have_the_same_weights_after_a_step_of_any_kind(way: str, ways: dict[str, list[Found]]) -> None:
    for check in ("gradients", "few_gradients", "invalid", "few_invalid"):
        for name, found in ways[way][0].get(check, {}).items():
            assert {rank[check][name]["digest"] for rank in ways[way]} == {found["digest"]}, name


@pytest.mark.parametrize("way", ["2 ranks, shard 2", "2 ranks, shard 1", "4 ranks, shard 2"])
def test_weights_momentum_and_average_are_equal_on_all_ranks_after_every_step_and_near_those_of_one_process(
    way: str, ways: dict[str, list[Found]]
) -> None:
    ranks = [rank.get("three_steps") or rank["two_steps"] for rank in ways[way]]
    for kind, found in ranks[0].items():
        assert all(rank[kind]["digests"] == found["digests"] for rank in ranks), kind
        assert found["relative"] <= 1e-6 < 1e-3 < found["change"], kind


def test_two_ranks_give_the_same_bits_again(two: list[Found]) -> None:
    first, second = two[0]["2:three_steps"]["lora"]["digests"]
    assert first == second
    assert len({step["parameters"] for step in first}) == 3


def test_the_bits_do_not_depend_on_how_groups_are_cut_into_micro_batches(two: list[Found]) -> None:
    for accumulate, (apart, together) in two[0]["2:packing"].items():
        assert apart == together, accumulate


@pytest.mark.parametrize("way", ["2 ranks, shard 2", "2 ranks, shard 1"])
def test_what_is_not_finite_or_not_there_ends_as_in_one_process_and_hangs_nobody(way: str, ways: dict[str, list[Found]]) -> None:
    ranks = [rank.get("invalid") or rank["few_invalid"] for rank in ways[way]]
    for name, found in (each for rank in ranks for each in rank.items()):
        alone, shared = dict(found["alone"]), dict(found["shared"])
        assert shared.pop("norm") == pytest.approx(alone.pop("norm"), rel=1e-6, nan_ok=True), name
        assert shared == alone, name
        assert found["gradient"] <= 1e-5, name
        assert found["weights of the next step"] <= 1e-6, name
        assert shared["outcome"] == ("voided" if "infinite" in name else "applied"), name
    masked = {name: found["shared"]["nonfinite"] for name, found in ranks[0].items() if "NaN latent" in name}
    assert masked and all(count == (STEPS if "every pair" in name else 1) for name, count in masked.items())


def test_gradients_that_wait_give_the_gradient_that_does_not_and_are_brought_together_once(two: list[Found]) -> None:
    for rank in two:
        for kind, found in rank["2:unsharded"].items():
            assert found["relative"] <= 1e-6, kind
            assert found["wrongly told"] <= 1e-6, f"{kind}: a trainer that was promised more brings all together by itself"
            groups, trained = found["groups"], found["trained groups"]
            # Two passes in each of two micro-batches, each of which gathers forwards and backwards; or once for all.
            assert found["collectives"]["sharded"] == [[2 * 2 * groups, 2 * trained]] * 2, kind
            assert found["collectives"]["unsharded"] == [[groups, 0], [0, trained]], kind


def test_gradients_that_wait_hold_whole_weights_and_gradients_and_others_a_share(two: list[Found]) -> None:
    for kind, found in two[0]["2:unsharded"].items():
        between, afterwards = found["held"]["unsharded"]
        assert between == [found["numbers"], found["trained"]], kind
        for weights, gradients in (afterwards, *found["held"]["sharded"]):
            assert weights <= 0.6 * found["numbers"], kind
            assert gradients == 0, kind


def test_in_bfloat16_rollout_and_ranks_run_the_same_policy(two: list[Found]) -> None:
    # Equal shapes, equal bits: as small as one process's own replay, which is 0.
    for rank in two:
        for kind, found in rank["2:bfloat16"].items():
            assert found["ranks"] == found["alone"] == 0.0, kind
            assert found["generates the same"], kind


def test_the_average_is_that_of_one_process_and_evaluated_in_the_place_of_the_weights(two: list[Found]) -> None:
    for rank in two:
        for kind, found in rank["2:average"].items():
            assert found["average"] <= 1e-6, kind
            apart = found["between evaluation and trained"]
            assert found["evaluation"] < apart / 100, f"{kind}: the averaged weights are the ones that draw"
            assert found["prediction before"] < apart / 100 > found["prediction after"], (
                f"{kind}: and then the trained ones again"
            )


def test_weights_that_lie_gathered_do_not_outlive_an_average_that_is_swapped_in(two: list[Found]) -> None:
    for kind, found in two[0]["2:average"].items():
        assert found["gathered in the middle"] == found["numbers"], f"{kind}: they must lie gathered for this to mean something"
        assert found["evaluation in the middle"] < found["between evaluation and trained"] / 100, kind
        assert found["weights at the end"] <= 1e-6, kind


def test_a_checkpoint_of_two_ranks_goes_on_bit_for_bit(two: list[Found]) -> None:
    for name, found in two[0]["2:checkpoint"].items():
        assert found["loaded"], name
        loaded, never_stopped = found["digests"]
        assert loaded == never_stopped, name
        assert all(found["held"].values()) and not any(two[1]["2:checkpoint"][name]["held"].values()), "rank 0 alone holds it"


@pytest.mark.parametrize("way", ["2 ranks, shard 2", "4 ranks, shard 4"])
def test_a_checkpoint_of_two_ranks_goes_on_with_one_and_with_four(way: str, ways: dict[str, list[Found]]) -> None:
    for rank in ways[way]:
        for name, found in (rank.get("checkpoint") or rank["continued"]).items():
            assert found["loaded"], name
            assert max(found["relative"].values()) <= 1e-6, name


def test_ranks_publish_what_one_process_with_the_same_weights_does(two: list[Found]) -> None:
    for kind, found in two[0]["2:publication"].items():
        assert found["same manifest"] and found["same bytes"], kind
        assert found["announced"] == found["buckets"] and found["buckets"][0] > 1, kind
        assert two[1]["2:publication"][kind]["digest"] == found["digest"], kind


def test_a_batch_size_is_measured_within_the_budget_of_the_rank_with_least_room(two: list[Found]) -> None:
    found = two[0]["2:auto"]
    assert two[1]["2:auto"] == found
    assert found["without a limit"] == [12, 12], "a rank's share of 12 samples x 2 steps"
    peaks = [found["peaks"][str(pairs)] for pairs in (4, 8, 12)]
    assert peaks == sorted(peaks) and peaks[2] - peaks[0] > 8 * 2**20, "a pair takes a MiB or more"
    assert 3 <= found["between 4 and 8"] <= 8, "a measurement is good to a few MiB"
    assert f"takes {found['between 4 and 8']} of 12 pairs" in found["line"]
    assert found["relative"] <= 1e-5


def test_a_budget_for_not_even_one_pair_is_refused_with_one_that_is_enough(two: list[Found]) -> None:
    found = two[0]["2:auto"]
    assert "train.memory_budget_gib (0.01) is less than" in found["too small"]
    assert found["peaks"]["1"] < 1.2 * found["enough"]


def test_a_measured_batch_size_is_kept_by_a_checkpoint(two: list[Found]) -> None:
    chosen, saved, resumed = two[0]["2:auto"]["kept"]
    assert chosen == saved == resumed


def test_a_rank_that_stalls_ends_the_wait_of_all_others_in_time_also_of_its_own_shard(four: list[Found]) -> None:
    for rank in four[:3]:
        waited = rank["2:stalled"]["failed after"]
        assert waited is not None and waited < STALL_S - 0.5, "a timeout of torch's own lasts minutes"
        assert waited >= STALL_TIMEOUT_S - 0.5


@pytest.mark.slow
def test_every_combination_has_the_gradient_of_one_process(folder: Path) -> None:
    for rank in run_ranks(folder, 2, ["2:all_gradients", "1:all_gradients"]):
        for check in rank.values():
            for name, found in check.items():
                assert found["relative"] <= 1e-5, name
                assert found["norm"][1] == pytest.approx(found["norm"][0], rel=1e-6), name


@settings(max_examples=200, deadline=None, database=None)
@given(
    ranks=st.integers(1, 5),
    groups=st.integers(1, 4),
    samples=st.integers(1, 6),
    steps=st.integers(1, 4),
    size=st.integers(1, 12) | st.just("all"),
    data=st.data(),
)
def test_ranks_share_every_pair_once_and_make_as_many_passes_where_they_meet_in_each(
    ranks: int, groups: int, samples: int, steps: int, size: Any, data: st.DataObject
) -> None:
    useful = [data.draw(st.lists(st.integers(0, samples - 1), unique=True).map(sorted)) for _ in range(groups)]
    batch_size = pairs_per_batch(size, samples, steps, ranks)
    packed = [list(pack_pairs(torch.tensor(rows, dtype=torch.int64), steps, batch_size)) for rows in useful]
    found = [
        [(group, batch) for group, batches in enumerate(packed) for batch in share_of_rank(batches, rank, ranks)]
        for rank in range(ranks)
    ]
    assert pairs_of(found) == [(group, row, slot) for group in range(groups) for row in useful[group] for slot in range(steps)]
    assert len({tuple(group for group, _ in mine) for mine in found}) == 1, "all ranks go through the same groups together"
    per_group = -(-samples * steps // batch_size)
    alone = [
        [
            (group, batch)
            for group, batches in enumerate(packed)
            for batch in turns_of_rank(batches, group * per_group, rank, ranks)
        ]
        for rank in range(ranks)
    ]
    assert pairs_of(alone) == pairs_of(found)
    if all(len(rows) == samples for rows in useful):
        passes = [len(mine) for mine in alone]
        assert max(passes) - min(passes) <= 1, "whole groups keep ranks that do not meet equally busy"


def pairs_of(shares: list[list[tuple[int, PairBatch]]]) -> list[tuple[int, int, int]]:
    return sorted(
        (group, int(row), int(slot))
        for mine in shares
        for group, batch in mine
        for row, slot, weight in zip(batch.rows, batch.slots, batch.weights, strict=True)
        if weight
    )
