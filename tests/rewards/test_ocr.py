"""Text that is rendered, read and compared."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from digenrl.cli.check import inspect
from digenrl.config.loader import load_reward
from digenrl.config.settings.ocr import OcrSettings, comparable, target_of
from digenrl.errors import ConfigError
from digenrl.ids import SampleId
from digenrl.rewards.base import RewardSample
from digenrl.rewards.compose import WeightedRewards
from digenrl.rewards.ocr import likeness, rendered
from tests.conftest import RecipeMaker

WORDS = (
    "OPEN", "Coffee", "NO EXIT", "Hotel", "Bakery", "STOP", "Library", "Museum", "Airport", "Garden",
    "Pizza", "TAXI", "School", "Market", "Sunday", "Welcome", "Theatre", "Police", "Ocean", "HELLO 42",
)  # fmt: skip


@pytest.fixture(scope="module")
def ocr() -> WeightedRewards:
    return WeightedRewards.from_recipe([load_reward("ocr", ["detection_side=128"])])


def page(text: str, number: int) -> np.ndarray:
    """Sizes from 20 to 39 pixels, noise from none to strong."""
    clean = rendered(text, size=20 + number, width=240, height=64)
    noise = np.random.default_rng(number).normal(0, 2.5 * number, clean.shape)
    return np.clip(clean + noise, 0, 255).astype(np.uint8)


def test_twenty_rendered_texts_score_above_the_same_texts_with_wrong_ends(ocr: WeightedRewards) -> None:
    samples = []
    for number, word in enumerate(WORDS):
        broken = word[: len(word) // 2] + "XQ"
        for kind, text in enumerate((word, broken)):
            prompt = f'a sign that says "{word}" above a "door"'
            samples.append(RewardSample(id=SampleId(0, number, kind), prompt=prompt, metadata={}, image=page(text, number)))
    scored = ocr.score(samples)
    totals = scored.totals.reshape(-1, 2)
    assert np.array_equal(scored.parts["ocr/exact"], scored.totals == 1)
    assert 0 < scored.parts["ocr/exact"].mean() < 1
    assert (totals[:, 0] > totals[:, 1]).all(), [w for w, (good, bad) in zip(WORDS, totals, strict=True) if not good > bad]
    assert totals[:, 0].mean() > 0.9


def test_a_prompt_without_a_target_makes_its_sample_invalid(ocr: WeightedRewards) -> None:
    samples = [
        RewardSample(id=SampleId(0, 0, n), prompt=p, metadata={}, image=rendered("OPEN"))
        for n, p in enumerate(("a sign", 'a sign "OPEN"', 'an empty ""', 'half a "quote'))
    ]
    assert np.isfinite(ocr.score(samples).totals).tolist() == [False, True, False, False]


def test_a_recipe_whose_prompts_have_no_targets_is_refused_before_anything_starts(tiny_recipe: RecipeMaker) -> None:
    with pytest.raises(ConfigError, match="no text between double quotes") as caught:
        inspect(tiny_recipe(rewards=[{"type": "ocr"}]))
    assert "data.prompts" in caught.value.what


@pytest.mark.parametrize(
    ("given", "target"),
    [
        ({}, "helloworld"),
        ({"case": "keep"}, "HelloWorld"),
        ({"spaces": "keep"}, "hello world"),
        ({"case": "keep", "spaces": "keep"}, "Hello World"),
    ],
)
def test_the_target_is_the_first_quoted_text_by_the_rules_for_spaces_and_case(given: dict[str, str], target: str) -> None:
    rules = OcrSettings(**given)  # type: ignore[arg-type]
    assert target_of('It says " Hello   World ", not "Goodbye"', rules) == target
    assert comparable("Hello\n World", rules) == target


@pytest.mark.parametrize(
    ("target", "read", "whole", "within"),
    [
        ("open", "open", 1, 1),
        ("open", "", 0, 0),
        ("open", "opan", 0.75, 0.75),
        ("open", "ope", 0.75, 0.75),
        ("open", "openn", 0.75, 1),
        ("open", "weareopentoday", 0, 1),
        ("open", "shut", 0, 0),
        ("kitten", "sitting", 0.5, 4 / 6),
    ],
)
def test_likeness_is_one_minus_the_edit_distance_by_the_target_s_length(
    target: str, read: str, whole: float, within: float
) -> None:
    assert likeness(target, read, "whole") == pytest.approx(whole)
    assert likeness(target, read, "within") == pytest.approx(within)


def slow_distance(a: str, b: str) -> int:
    if not a or not b:
        return len(a) + len(b)
    return min(slow_distance(a[1:], b) + 1, slow_distance(a, b[1:]) + 1, slow_distance(a[1:], b[1:]) + (a[0] != b[0]))


@settings(max_examples=60, deadline=None)
@given(st.text("ab", min_size=1, max_size=5), st.text("abc", max_size=5))
def test_likeness_agrees_with_the_definition(target: str, read: str) -> None:
    stretches = [read[i:j] for i in range(len(read) + 1) for j in range(i, len(read) + 1)]
    whole, within = slow_distance(target, read), min(slow_distance(target, part) for part in stretches)
    assert likeness(target, read, "whole") == 1 - min(whole, len(target)) / len(target)
    assert likeness(target, read, "within") == 1 - min(within, len(target)) / len(target)
