"""docs/reference/recipe.md is what the tool writes now, and it names every key that a recipe may have."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel

from digenrl.config.loader import recipe_from_plain
from digenrl.config.registry import KINDS, settings_class
from digenrl.config.schema import Recipe, Section

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "recipe.md"
TOOL = runpy.run_path(str(ROOT / "tools" / "docs" / "recipe_reference.py"))
WHERE = {"algorithm": "algorithm", "model": "model", "reward": "rewards.N"}


def every_row() -> list[list[str]]:
    """Cells of each table row."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def rows_of_the_page() -> dict[str, list[str]]:
    """Cells of each table row, by the key that it is about; of a key that several components have, the last row."""
    return {row[0].strip("`"): row for row in every_row()}


def keys_of(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key below a model with its field, found by walking the annotations (the tool walks the JSON schema)."""
    for name, field in model.model_fields.items():
        if name == "settings":
            continue
        nested, is_list = section_in(field.annotation)
        if prefix:
            yield prefix + name, field
        if nested:
            yield from keys_of(nested, f"{prefix}{name}.N." if is_list else f"{prefix}{name}.")


def section_in(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation, False
    inner = next((found for found in map(section_in, get_args(annotation)) if found[0]), (None, False))
    return inner[0], inner[1] or (inner[0] is not None and getattr(annotation, "__origin__", None) is tuple)


def all_fields() -> Iterator[tuple[str, Any]]:
    """Every key with its field; once for each component that has it."""
    yield from keys_of(Recipe)
    for kind, where in WHERE.items():
        for component in KINDS[kind]:
            settings = settings_class(kind, component, where=kind)
            yield from ((f"{where}.{name}", field) for name, field in settings.model_fields.items())


def all_keys() -> dict[str, Any]:
    return dict(all_fields())


def test_the_page_is_what_the_tool_writes_now() -> None:
    assert PAGE.read_text(encoding="utf-8") == TOOL["render"](), "run: python tools/docs/recipe_reference.py"


def test_every_key_of_a_recipe_has_a_row_and_no_row_is_about_anything_else() -> None:
    keys = all_keys()
    assert {"rollout.num_generations", "train.ema.decay", "cluster.generators.N.ranks", "rewards.N.weight"} <= set(keys)
    assert set(rows_of_the_page()) == set(keys)


def test_every_row_says_what_the_key_means() -> None:
    rows = every_row()
    for key, field in all_fields():
        described = (field.description or "").replace("<", "&lt;").replace("|", "\\|")
        own = [row for row in rows if row[0].strip("`") == key]  # of each component that has such a key
        assert own and all(len(row) == 5 for row in own), key
        assert any(row[4].startswith(described) and len(row[4]) > 5 for row in own), key


@pytest.mark.parametrize(
    ("key", "cells"),
    [
        ("train.timestep_batch_size", ["integer or `all`, `auto`", "`all`", "≥ 1, ≤ 1 000 000"]),
        ("train.learning_rate", ["number", "`0.0003`", "> 0"]),
        ("train.max_grad_norm", ["number or null", "`1.0`", "> 0"]),
        ("rollout.num_generations", ["integer", "required", "≥ 1, ≤ 1 000 000"]),
        ("run.seed", ["integer", "`0`", "≥ 0, < 2^63"]),
        ("schedule.update_order", ["`arrival`, `index`", "`arrival`", ""]),
        ("algorithm.sde_window_range", ["list of 2 integers or null", "`null`", ""]),
        ("cluster.generators", ["list of sections", "one with its defaults", "at least 1"]),
        ("rewards.N.quality", ["integer", "`75`", "≥ 1, ≤ 100"]),
    ],
)
def test_types_defaults_and_bounds_are_those_of_the_schema(key: str, cells: list[str]) -> None:
    assert rows_of_the_page()[key][1:4] == cells


def test_who_comes_from_another_trainer_finds_the_key_by_its_old_name() -> None:
    rows = rows_of_the_page()
    for key, alias in (("rollout.num_generations", "group_size"), ("algorithm.kl_beta", "kl_loss_coef")):
        assert alias in rows[key][4]
    shown = {key for key in TOOL["ALIASES"] if key in rows}
    assert all("*Also known as:" in rows[key][4] for key in shown)
    assert {key.partition(".")[0] for key in TOOL["ALIASES"]} <= set(Recipe.model_fields)


def test_the_example_at_the_top_is_a_complete_recipe() -> None:
    example = PAGE.read_text(encoding="utf-8").partition("```yaml\n")[2].partition("```")[0]
    assert recipe_from_plain(yaml.safe_load(example)).run.name == "quickstart"
