"""Which prompts a step trains on: a pure function of seed and step, fair over strata and over time."""

from __future__ import annotations

from collections import Counter
from math import gcd

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from digenrl.data.prompts import Prompt
from digenrl.data.sampler import PromptSampler
from digenrl.errors import ConfigError


def prompts(*sizes: int) -> tuple[Prompt, ...]:
    """Prompts of categories 0, 1, ..., of these sizes, mixed like a hand of cards."""
    rows = [Prompt(text=f"{c}-{i}", metadata={"category": c}) for c, size in enumerate(sizes) for i in range(size)]
    return tuple(sorted(rows, key=lambda prompt: prompt.text[::-1]))


def sampler(
    of: tuple[Prompt, ...], per_step: int, *, seed: int = 0, shuffle: bool = True, stratified: bool = False
) -> PromptSampler:
    return PromptSampler(
        of, prompts_per_step=per_step, seed=seed, shuffle=shuffle, stratify_by="category" if stratified else None
    )


sizes = st.lists(st.integers(1, 12), min_size=1, max_size=5)
common = {
    "of": sizes.map(lambda s: prompts(*s)),
    "per_step": st.integers(1, 9),
    "seed": st.integers(0, 2**63 - 1),
    "shuffle": st.booleans(),
    "stratified": st.booleans(),
}
quick = settings(max_examples=150, deadline=None, database=None)


@quick
@given(**common, steps=st.lists(st.integers(0, 10_000), min_size=1, max_size=6))
def test_a_step_s_prompts_depend_on_seed_and_step_alone(
    of: tuple[Prompt, ...], per_step: int, seed: int, shuffle: bool, stratified: bool, steps: list[int]
) -> None:
    one = sampler(of, per_step, seed=seed, shuffle=shuffle, stratified=stratified)
    expected = {step: one.indices_of_step(step) for step in sorted(steps)}
    other = sampler(of, per_step, seed=seed, shuffle=shuffle, stratified=stratified)
    for step in steps:  # in another order, by another object, as after a resume
        assert other.indices_of_step(step) == expected[step]
        assert other.prompts_of_step(step) == tuple(of[i] for i in expected[step])


@quick
@given(**common)
def test_a_step_has_its_number_of_prompts_and_none_twice_unless_it_warned(
    of: tuple[Prompt, ...], per_step: int, seed: int, shuffle: bool, stratified: bool
) -> None:
    drawn = sampler(of, per_step, seed=seed, shuffle=shuffle, stratified=stratified)
    for step in range(50):
        indices = drawn.indices_of_step(step)
        assert len(indices) == per_step
        if not drawn.warnings:
            assert len(set(indices)) == per_step


@quick
@given(**common)
def test_every_category_has_its_share_of_every_step_and_exactly_equal_shares_over_a_cycle(
    of: tuple[Prompt, ...], per_step: int, seed: int, shuffle: bool, stratified: bool
) -> None:
    drawn = sampler(of, per_step, seed=seed, shuffle=shuffle, stratified=True)
    categories = {prompt.metadata["category"] for prompt in of}
    total: Counter[object] = Counter()
    cycle = len(categories) // gcd(per_step, len(categories))
    for step in range(7 * cycle, 8 * cycle):
        shares = Counter(prompt.metadata["category"] for prompt in drawn.prompts_of_step(step))
        total += shares
        low, high = per_step // len(categories), -(-per_step // len(categories))
        assert all(low <= shares[category] <= high for category in categories)
    assert len(set(total.values())) == 1
    assert set(total) == categories


@quick
@given(**common)
def test_every_prompt_is_drawn_sooner_or_later(
    of: tuple[Prompt, ...], per_step: int, seed: int, shuffle: bool, stratified: bool
) -> None:
    drawn = sampler(of, per_step, seed=seed, shuffle=shuffle, stratified=stratified)
    seen: set[int] = set()
    for step in range(2000):
        seen |= set(drawn.indices_of_step(step))
        if len(seen) == len(of):
            return
    raise AssertionError(f"never drawn: {set(range(len(of))) - seen}")


@quick
@given(of=sizes.map(lambda s: prompts(*s)), per_step=st.integers(1, 9), stratified=st.booleans())
def test_without_shuffle_prompts_come_in_the_order_of_the_file_pass_after_pass(
    of: tuple[Prompt, ...], per_step: int, stratified: bool
) -> None:
    drawn = sampler(of, per_step, shuffle=False, stratified=stratified)
    sequence = [i for step in range(60) for i in drawn.indices_of_step(step)]
    categories = sorted({prompt.metadata["category"] for prompt in of}) if stratified else [None]
    for category in categories:
        of_category = [i for i in range(len(of)) if category is None or of[i].metadata["category"] == category]
        its = [i for i in sequence if i in set(of_category)]
        assert its == [of_category[k % len(of_category)] for k in range(len(its))]


def test_with_shuffle_a_pass_draws_every_prompt_once_in_a_new_order_each_time() -> None:
    drawn = sampler(prompts(12), 4)
    passes = [[i for step in range(3 * p, 3 * p + 3) for i in drawn.indices_of_step(step)] for p in range(20)]
    assert all(sorted(order) == list(range(12)) for order in passes)
    assert len({tuple(order) for order in passes}) == 20


def test_a_pass_holds_no_prompt_twice_also_where_its_length_is_no_multiple_of_a_step() -> None:
    drawn = sampler(prompts(10), 4)
    for first in range(0, 40, 2):
        assert not set(drawn.indices_of_step(first)) & set(drawn.indices_of_step(first + 1))


def test_a_pass_over_a_category_is_whole_too_when_a_step_has_room_for_only_some_categories() -> None:
    drawn = sampler(prompts(6, 6), 1, stratified=True)
    sequence = [drawn.indices_of_step(step)[0] for step in range(12)]
    assert sorted(sequence) == list(range(12))


def test_the_category_that_gets_one_more_changes_from_step_to_step() -> None:
    drawn = sampler(prompts(20, 20, 20), 4, stratified=True)
    more = [
        Counter(prompt.metadata["category"] for prompt in drawn.prompts_of_step(step)).most_common(1)[0][0] for step in range(6)
    ]
    assert more == [0, 1, 2, 0, 1, 2]


def test_another_seed_draws_others_and_seed_0_is_a_seed_like_any_other() -> None:
    of = prompts(40)
    runs = {tuple(sampler(of, 5, seed=seed).indices_of_step(step) for step in range(4)) for seed in range(20)}
    assert len(runs) == 20
    assert sampler(of, 5, seed=0).indices_of_step(0) != tuple(range(5))


def test_steps_differ() -> None:
    drawn = sampler(prompts(40), 5)
    assert len({drawn.indices_of_step(step) for step in range(8)}) == 8


def test_two_categories_of_one_size_are_shuffled_independently() -> None:
    drawn = sampler(prompts(30, 30), 2, stratified=True)
    pairs = [tuple(prompt.text.partition("-")[2] for prompt in drawn.prompts_of_step(step)) for step in range(30)]
    assert any(a != b for a, b in pairs)


def test_fewer_prompts_than_a_step_needs_cycle_with_a_warning_that_names_both_numbers() -> None:
    drawn = sampler(prompts(3), 8)
    assert drawn.warnings == (
        "3 prompts are fewer than the 8 that a step needs: they cycle, so a step holds some of them more than once",
    )
    for step in range(5):
        assert sorted(Counter(drawn.indices_of_step(step)).values()) == [2, 3, 3]


def test_a_category_with_too_few_prompts_is_named_in_the_warning() -> None:
    drawn = sampler(prompts(2, 9), 6, stratified=True)
    (warning,) = drawn.warnings
    assert warning.startswith("2 prompts with category = 0 are fewer than the 3 that a step needs")


def test_a_single_prompt_is_enough() -> None:
    assert sampler(prompts(1), 1).indices_of_step(5) == (0,)
    assert sampler(prompts(1), 3).indices_of_step(5) == (0, 0, 0)


def test_exactly_enough_prompts_bring_no_warning() -> None:
    assert sampler(prompts(8), 8).warnings == ()
    assert sampler(prompts(4, 4), 8, stratified=True).warnings == ()


def test_prompts_of_equal_text_are_prompts_of_their_own() -> None:
    same = (Prompt(text="a"),) * 3
    assert sorted(sampler(same, 3).indices_of_step(0)) == [0, 1, 2]


def test_no_prompts_at_all_are_refused() -> None:
    with pytest.raises(ConfigError, match="no prompts"):
        sampler((), 3)


def test_a_prompt_without_the_category_is_refused_by_its_text() -> None:
    of = (*prompts(3), Prompt(text="a stray cat", metadata={"tag": "x"}))
    with pytest.raises(ConfigError, match="prompt 'a stray cat' has no field 'category'") as caught:
        sampler(of, 2, stratified=True)
    assert "This line has: tag" in caught.value.fix


def test_over_fifty_steps_every_group_is_one_prompt_of_its_step() -> None:
    """Known fault 27: group sizes go wrong when a loader's order changes under way; here there is no loader."""
    drawn = sampler(prompts(25), 6)
    for step in range(50):
        groups = Counter((step, prompt, sample) for prompt in drawn.indices_of_step(step) for sample in range(4))
        assert len(groups) == 6 * 4
        assert set(groups.values()) == {1}


@pytest.mark.parametrize("values", [(1, "1"), (True, "True"), (["a"], "['a']")])
def test_categories_are_told_apart_by_how_they_read(values: tuple[object, str]) -> None:
    of = tuple(Prompt(text=str(i), metadata={"category": value}) for i, value in enumerate(values))
    assert sampler(of, 2, stratified=True).warnings == (), "one category of two prompts"
