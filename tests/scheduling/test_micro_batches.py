from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from digenrl.scheduling.micro_batches import MicroBatch, cut_into_micro_batches, filling, idle_share, spread_over_ranks


@settings(max_examples=300, deadline=None, database=None)
@given(prompts=st.integers(1, 60), groups=st.integers(1, 70))
def test_every_prompt_is_in_exactly_one_micro_batch_and_only_the_last_may_be_smaller(prompts: int, groups: int) -> None:
    cut = cut_into_micro_batches(prompts, groups)
    assert [prompt for micro_batch in cut for prompt in micro_batch.prompts] == list(range(prompts))
    assert [micro_batch.index for micro_batch in cut] == list(range(len(cut)))
    assert all(len(micro_batch.prompts) == groups for micro_batch in cut[:-1])
    assert 1 <= len(cut[-1].prompts) <= groups


def test_ten_prompts_by_four_are_four_and_four_and_two() -> None:
    assert cut_into_micro_batches(10, 4) == (
        MicroBatch(0, (0, 1, 2, 3)),
        MicroBatch(1, (4, 5, 6, 7)),
        MicroBatch(2, (8, 9)),
    )


@settings(max_examples=200, deadline=None, database=None)
@given(st.integers(1, 6), st.integers(1, 24), st.integers(1, 16), st.sampled_from(["generation_axis", "batch_axis"]))
def test_every_sample_is_on_exactly_one_rank_and_shares_are_balanced(groups: int, samples: int, ranks: int, axis: str) -> None:
    micro_batch = MicroBatch(0, tuple(range(groups)))
    shares = spread_over_ranks(micro_batch, samples, ranks, axis)
    assert sorted(pair for share in shares for pair in share) == [(p, s) for p in range(groups) for s in range(samples)]
    sizes = [len(share) for share in shares]
    assert len(sizes) == ranks
    assert max(sizes) - min(sizes) <= (1 if axis == "generation_axis" else samples)


def test_an_uneven_spread_costs_what_the_waiting_ranks_would_have_done() -> None:
    group = MicroBatch(0, (0,))
    assert idle_share(group, 12, 4, "generation_axis") == 0
    assert idle_share(group, 12, 5, "generation_axis") == pytest.approx(1 - 12 / 15)
    assert idle_share(group, 12, 4, "batch_axis") == pytest.approx(3 / 4), "one group keeps one of four ranks busy"


@settings(max_examples=300, deadline=None, database=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 6), st.data())
def test_ranks_that_hold_a_network_together_make_equally_many_passes_and_no_sample_more_than_that_takes(
    shard: int, networks: int, batch_size: int, data: st.DataObject
) -> None:
    ranks = shard * networks
    shares = data.draw(st.lists(st.integers(0, 20), min_size=ranks, max_size=ranks))
    fills = filling(shares, batch_size, shard)
    passes = [-(-(share + fill) // batch_size) for share, fill in zip(shares, fills, strict=True)]
    for first in range(0, ranks, shard):
        together = range(first, first + shard)
        assert {passes[rank] for rank in together} == {max(-(-shares[rank] // batch_size) for rank in together)}
    for share, fill, own in zip(shares, fills, passes, strict=True):
        assert fill >= 0
        assert not fill or -(-(share + fill - 1) // batch_size) < own


def test_ranks_with_networks_of_their_own_generate_nothing_beside_their_shares() -> None:
    assert filling([9, 0, 4, 1], 4, 1) == [0, 0, 0, 0]
    assert filling([9, 0, 4, 1], 4, 2) == [0, 9, 0, 0]
    assert filling([9, 0, 4, 1], 4, 4) == [0, 9, 5, 8]
