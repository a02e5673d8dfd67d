"""``a.b=value`` on the command line: typed where it is clearly a value, and otherwise text, byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from digenrl.config.loader import load_recipe
from digenrl.config.source import Source, apply_override
from digenrl.errors import ConfigError

Write = Callable[[str | bytes], Path]


def value_of(text: str) -> object:
    data: dict[str, object] = {}
    apply_override(data, f"key={text}", Source(file="test"))
    return data["key"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("-0.5", -0.5),
        ("3.0e-4", 3e-4),
        ("true", True),
        ("null", None),
        ("~", None),
        ("", ""),
        ("[0, 5]", [0, 5]),
        ("[]", []),
        ("{rank: 4, target_modules: [to_q]}", {"rank": 4, "target_modules": ["to_q"]}),
        ('"3"', "3"),
        ("'null'", "null"),
        (r'"line\nbreak"', "line\nbreak"),
        ("'李明 @ #1'", "李明 @ #1"),
    ],
)
def test_a_value_is_read_as_yaml_where_it_clearly_is_one(text: str, value: object) -> None:
    assert value_of(text) == value
    assert type(value_of(text)) is type(value)


@pytest.mark.parametrize(
    "text",
    [
        '李明 @ #1, (a) = "b"',
        "a # b",
        "3 # steps",
        "#1",
        "@home",
        "`x`",
        "%percent",
        "*star",
        "&and",
        "!important",
        "- a list item",
        "key: value",
        "? what",
        "| pipe",
        "> quote",
        '"A" sign that says "B"',
        "'tis a cat",
        '"unclosed',
        "it's",
        "a=b=c",
        "2026-01-31",
        "2026-99-99",
        "مرحبا بالعالم",
        "🎨👩‍🚀 é é",
        "a\u2028b\u200fc\ufeff",
        " spaces  inside and around ",
        "tab\tnewline\nend\r\n",
        "\\n C:\\path\\to",
        "!!python/object/apply:os.system [true]",
        "--- 3",
        "\x07",
        "=",
        "<<",
    ],
)
def test_any_other_text_arrives_byte_for_byte(text: str) -> None:
    assert value_of(text) == text


@settings(max_examples=300, deadline=None, database=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
@example("[")
@example("{a")
def test_no_text_is_ever_changed_in_silence(text: str) -> None:
    try:
        value = value_of(text)
    except ConfigError:
        assert text.lstrip()[:1] in {"[", "{"}, "only an open bracket is a mistake"
        return
    if isinstance(value, str) and text.strip()[:1] not in {"'", '"'}:
        assert value == text


def test_text_of_the_whole_kind_reaches_the_recipe(write: Write, text: str) -> None:
    odd = '李明 @ #1, (a) = "b"'
    recipe = load_recipe(write(text), [f"data.stratify_by={odd}", f"rewards.0.name={odd}", "run.output_dir=a: b"])
    assert recipe.data.stratify_by == odd
    assert recipe.rewards[0].name == odd
    assert recipe.run.output_dir == "a: b"


def test_items_of_lists_are_named_by_their_index(write: Write, text: str) -> None:
    recipe = load_recipe(write(text), ["rewards.0.weight=-3", "rewards.0.strict_weight=1"])
    assert recipe.rewards[0].weight == -3
    assert recipe.rewards[0].settings.strict_weight == 1


def test_a_later_override_wins_over_an_earlier_one(write: Write, text: str) -> None:
    assert load_recipe(write(text), ["train.steps=5", "train.steps=6"]).train.steps == 6


def test_a_section_that_is_absent_or_null_is_made(write: Write, text: str) -> None:
    recipe = load_recipe(write(text), ["model.lora=null", "model.lora.rank=4", "run.seed=7"])
    assert recipe.model.lora is not None
    assert (recipe.model.lora.rank, recipe.run.seed) == (4, 7)


def test_a_whole_section_can_be_given_or_taken_away(write: Write, text: str) -> None:
    recipe = load_recipe(write(text), ["train={steps: 9, ema: {decay: 0.5}}", "rewards=[{type: jpeg}]"])
    assert (recipe.train.steps, recipe.rewards[0].type) == (9, "jpeg")
    assert load_recipe(write(text), ["eval={prompts: x.txt}", "eval=null"]).eval is None


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.steps", "Cannot read the override 'train.steps'"),
        ("=3", "Cannot read the override '=3'"),
        ("train.steps=[3", "Cannot read the value of 'train.steps=[3'"),
        ("train.ema={decay: 0.9", "Cannot read the value of"),
        ("rewards.1.weight=2", "rewards is a list of 1, and '1' is not an index of it"),
        ("rewards.-1.weight=2", "'-1' is not an index of it"),
        ("rewards.shapes.weight=2", "'shapes' is not an index of it"),
        ("rewards.².weight=2", "'²' is not an index of it"),
        ("rewards.٠.weight=2", "'٠' is not an index of it"),
        ("rewards.99999999999.weight=2", "'99999999999' is not an index of it"),
        ("rewards.0.type.x=2", "rewards.0.type is a value, not a section, so it has no 'x'"),
        ("train.steps.more=2", "train.steps is a value, not a section, so it has no 'more'"),
        ("train.learning_rat=1", "train.learning_rat is not a known key; did you mean learning_rate? (command line, train.learn"),
        ("train.steps=many", "train.steps cannot be 'many': input should be a valid integer"),
        ("train.steps=3 # three", "train.steps cannot be '3 # three'"),
        ("train.=2", "train. is not a known key"),
        ("x.y.z=2", "x is not a known key"),
        ("train=5", "train cannot be 5"),
        ("run.name=a\udcff", "is not UTF-8"),
    ],
)
def test_a_bad_override_is_refused_in_its_own_words(write: Write, text: str, override: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(write(text), [override])
    assert says in caught.value.what
    assert caught.value.fix
