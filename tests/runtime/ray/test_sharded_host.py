"""A generator's ranks that hold one network together draw what one process draws, and each holds a share of it.

The ranks are real processes (sharded_hosts.py), and here their numbers are judged.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.training.test_fsdp import Found, run_ranks

pytestmark = pytest.mark.timeout(300)

MODULE = "tests.runtime.ray.sharded_hosts"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_sd3: Path) -> Iterator[Path]:
    """Where the ranks find the model."""
    place = tmp_path_factory.mktemp("ranks")
    (place / "sd3").symlink_to(tiny_sd3)
    return place


@pytest.fixture(scope="module")
def two(folder: Path) -> list[Found]:
    """What two ranks found that hold one network."""
    return run_ranks(folder, 2, ["2:generation", "2:damage"], MODULE)


def check_generation(ranks: list[Found]) -> None:
    for rank in ranks:
        for kind, found in rank["2:generation"].items():
            assert found["same pictures"] == [True, True], kind
            digests = found["digests"]
            assert all(len(set(each)) == 1 for each in digests), f"{kind}: published, said by both, and held by all ranks"
            assert digests[0] != digests[1], kind


def test_ranks_that_share_a_network_draw_bit_for_bit_what_one_process_draws(two: list[Found]) -> None:
    check_generation(two)


def test_each_rank_holds_about_half_of_the_network_and_both_together_the_whole_of_it(two: list[Found]) -> None:
    for kind in two[0]["2:generation"]:
        found = [rank["2:generation"][kind] for rank in two]
        assert sum(each["held"] for each in found) == found[0]["numbers"], kind
        assert all(each["held"] < 0.6 * each["numbers"] for each in found), kind


def test_passes_that_are_never_trained_do_not_pile_up(two: list[Found]) -> None:
    assert all(found["noted"] == 0 for rank in two for found in rank["2:generation"].values())


def test_a_rank_verifies_what_it_loads_by_itself_and_before_it_writes_its_share(two: list[Found]) -> None:
    for rank in two:
        assert all(rank["2:damage"].values()), rank["2:damage"]
    assert set(two[1]["2:damage"]) == {"again", "damaged", "untouched", "changed", "in the end"}


@pytest.mark.slow
def test_four_ranks_hold_two_networks(folder: Path) -> None:
    ranks = run_ranks(folder, 4, ["2:generation"], MODULE)
    check_generation(ranks)
    for rank in ranks:
        assert all(found["held"] < 0.6 * found["numbers"] for found in rank["2:generation"].values())
