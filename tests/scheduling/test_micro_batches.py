from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from digenrl.scheduling.micro_batches import MicroBatch, cut_into_micro_batches


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
