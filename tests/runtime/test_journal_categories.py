"""Held-out means are also told by category, where the prompts name theirs."""

from __future__ import annotations

import numpy as np
import pytest

from digenrl.data.prompts import Prompt
from digenrl.rewards.compose import Rewards
from digenrl.runtime.journal import category_means
from digenrl.runtime.train import _evaluation_summary
from digenrl.workers.evaluator import summarise


def prompts(*kinds: str | None) -> list[Prompt]:
    return [Prompt(text=f"{i}", metadata={} if kind is None else {"category": kind}) for i, kind in enumerate(kinds)]


def evaluation(totals: list[float], strict: list[float]):
    parts = {"shapes/strict": np.array(strict)}
    return summarise(np.zeros((1, 2, 2, 3), dtype=np.uint8), Rewards(totals=np.array(totals), parts=parts))


def test_each_category_has_the_mean_of_its_own_valid_rewards_and_parts() -> None:
    found = evaluation([0.25, 1.0, 0.75, np.nan], [0.0, 1.0, 1.0, np.nan])
    assert category_means(found, prompts("color", "single", "color", "color")) == {
        "category/color/reward": 0.5,
        "category/color/shapes/strict": 0.5,
        "category/single/reward": 1.0,
        "category/single/shapes/strict": 1.0,
    }


def test_a_category_without_a_valid_reward_and_prompts_without_one_are_left_out() -> None:
    found = evaluation([np.nan, 1.0, 0.5], [np.nan, 1.0, 0.0])
    assert category_means(found, prompts("color", None, "a/b")) == {
        "category/a_b/reward": 0.5,
        "category/a_b/shapes/strict": 0.0,
    }


def test_a_field_of_very_many_values_names_no_categories() -> None:
    count = 30
    assert category_means(evaluation([0.5] * count, [0.5] * count), prompts(*map(str, range(count)))) == {}


def test_the_summary_has_each_category_before_and_after() -> None:
    first = {"step": 0, "reward": 0.5, "num_images": 4, "invalid_samples": 0, "category/color/shapes/strict": 0.25}
    last = {**first, "step": 9, "category/color/shapes/strict": 0.75}
    summary = _evaluation_summary([first, last])
    assert summary is not None
    assert summary["categories"] == {"color": {"strict_before": 0.25, "strict_after": 0.75}}


def test_means_of_parts_leave_out_what_is_not_finite() -> None:
    assert evaluation([0.5, 1.0], [np.inf, 1.0]).parts == {"shapes/strict": pytest.approx(1.0)}
