"""Whatever happens to a recipe, by hand or by accident: it loads, or it is the user's to mend. Never a traceback."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from digenrl.cli.check import inspect
from digenrl.config.arithmetic import padding_advice, step_arithmetic
from digenrl.config.loader import load_recipe, recipe_from_plain
from digenrl.config.schema import Recipe
from digenrl.errors import ConfigError

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
QUICKSTART = next(path for path in RECIPES if path.name == "quickstart.yaml").read_text(encoding="utf-8")
JUNK: list[Any] = [
    None,
    True,
    0,
    1,
    -1,
    2,
    7,
    10**6,
    2**63,
    10**30,
    0.0,
    0.5,
    -0.5,
    1e308,
    float("inf"),
    float("nan"),
    "",
    " ",
    "0",
    "all",
    "auto",
    "ode",
    "李明 @ #1",
    "a\0b",
    "\ud83d\ude00",
    "x" * 5000,
    "~nobody-of-that-name/x",
    "owner/name",
    "builtin:",
    "builtin:../shapes",
    "os:getcwd",
    "json:JSONDecoder",
    ":",
    ".",
    "..",
    "/",
    [],
    [0, 5],
    [5, 0],
    [[]],
    {},
    {"type": "jpeg"},
    {"a": {"b": [1]}},
]


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [place for key, value in items for place in [(*path, key), *places(value, (*path, key))]]


def mutate_data(data: Any, rng: random.Random) -> None:
    """Replace, delete, add, misspell or move one value."""
    path = rng.choice(places(data))
    parent = data
    for key in path[:-1]:
        parent = parent[key]
    key = path[-1]
    kind = rng.choice(["replace", "replace", "replace", "delete", "add", "misspell", "copy"])
    if kind == "delete":
        del parent[key]
    elif kind == "add" and isinstance(parent, dict):
        parent[rng.choice(["settings", "type", "name", "seed", "guidance_scale", "", 3, None])] = rng.choice(JUNK)
    elif kind == "misspell" and isinstance(parent, dict):
        parent[str(key)[: rng.randint(0, len(str(key)))] + rng.choice(["", "x", "é"])] = parent.pop(key)
    elif kind == "copy" and isinstance(parent, dict):
        data[rng.choice(list(data))] = copy.deepcopy(parent)
    else:
        parent[key] = rng.choice(JUNK)


def mutate_text(text: str, rng: random.Random) -> str:
    """Delete, double, swap, indent or garble somewhere."""
    lines = text.split("\n")
    at = rng.randrange(len(lines))
    match rng.randrange(6):
        case 0:
            del lines[at]
        case 1:
            lines.insert(at, lines[at])
        case 2:
            lines.insert(at, lines.pop(rng.randrange(len(lines))))
        case 3:
            lines[at] = rng.choice([" ", "  ", "\t", "- "]) + lines[at]
        case _:
            where = rng.randrange(len(text))
            garble = rng.choice([*":#{}[],&*!|>%@`\"'\n\t\0-?", "é", "\u2028", "\ufeff", "<<: ", "&a ", "*a", "!!int ", "1e999"])
            return text[:where] + garble + text[where + rng.randint(0, 3) :]
    return "\n".join(lines)


def loaded(path: Path, overrides: Sequence[str] = ()) -> Recipe | None:
    """The checked recipe, or None for a ConfigError of a readable length. Anything else is a bug."""
    problem = ""
    try:
        recipe = load_recipe(path, overrides)
        inspect(recipe)
    except ConfigError as error:
        problem = str(error)
    assert len(problem) < 20_000
    return None if problem else recipe


@settings(max_examples=300, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), in_text=st.booleans(), times=st.integers(1, 3))
def test_a_mutated_recipe_is_a_recipe_or_a_config_error(tmp_path: Path, seed: int, in_text: bool, times: int) -> None:
    rng, text = random.Random(seed), QUICKSTART
    if in_text:
        for _ in range(times):
            text = mutate_text(text, rng)
    else:
        data = yaml.safe_load(text)
        for _ in range(times):
            mutate_data(data, rng)
        text = yaml.safe_dump(data, sort_keys=False, allow_unicode=False)
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8", newline="")
    recipe = loaded(path)
    if recipe is None:
        return
    assert recipe_from_plain(yaml.safe_load(yaml.safe_dump(recipe.to_plain(), sort_keys=False))) == recipe
    assert step_arithmetic(recipe).lines()
    padding_advice(recipe)


@settings(max_examples=100, deadline=None, database=None)
@given(seed=st.integers(0, 2**32))
def test_a_mutated_override_is_a_recipe_or_a_config_error(seed: int) -> None:
    rng = random.Random(seed)
    keys = [".".join(map(str, path)) for path in places(yaml.safe_load(QUICKSTART))] + ["", ".", "rewards.9.type", "new.key"]
    values = [*map(str, JUNK), "[", "{", '"', "[0, 5]", "{type: jpeg}", "2026-99-99", "#", "!!bool x", "*a", "\udcff"]
    overrides = [f"{rng.choice(keys)}={rng.choice(values)}" for _ in range(rng.randint(1, 3))]
    loaded(RECIPES[0], overrides)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_shipped_recipe_loads_checks_and_survives_its_own_plain_form(path: Path) -> None:
    recipe = load_recipe(path)
    inspect(recipe)
    assert recipe_from_plain(recipe.to_plain()) == recipe
    assert recipe_from_plain(yaml.safe_load(yaml.safe_dump(recipe.to_plain()))) == recipe


def test_there_are_shipped_recipes() -> None:
    assert any(path.name == "quickstart.yaml" for path in RECIPES)
