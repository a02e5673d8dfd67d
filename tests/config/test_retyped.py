"""A component's type changed by an override alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from digenrl.config.loader import load_recipe
from digenrl.errors import ConfigError
from digenrl.simulation.source import load_source

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"


def test_keys_that_only_the_old_type_has_are_left_out_and_named() -> None:
    said = list[str]()
    recipe = load_recipe(QUICKSTART, ["algorithm.type=dance_grpo"], say=said.append)
    assert recipe.algorithm.type == "dance_grpo"
    assert said == [
        "algorithm.type=dance_grpo: timestep_selection, sde_window_size, sde_window_range of "
        f"{QUICKSTART} are left out, keys of flow_grpo alone"
    ]


def test_keys_that_both_types_have_stay() -> None:
    said = list[str]()
    before, after = (
        load_recipe(QUICKSTART, changes, say=said.append).algorithm.settings.model_dump()
        for changes in ([], ["algorithm.type=mix_grpo"])
    )
    for key in ("sde_window_size", "sde_window_range"):
        assert after[key] == before[key] is not None
    assert said == [f"algorithm.type=mix_grpo: timestep_selection of {QUICKSTART} is left out, key of flow_grpo alone"]


def test_a_reward_is_retyped_too() -> None:
    said = list[str]()
    (reward,) = load_recipe(QUICKSTART, ["rewards.0.type=jpeg"], say=said.append).rewards
    assert reward.type == "jpeg"
    assert said == [f"rewards.0.type=jpeg: strict_weight, soft_weight of {QUICKSTART} are left out, keys of shapes alone"]


def test_nothing_is_said_where_nothing_is_left_out() -> None:
    said = list[str]()
    load_recipe(QUICKSTART, ["algorithm.type=flow_grpo", "train.steps=3"], say=said.append)
    load_recipe(QUICKSTART, ["algorithm={type: dance_grpo}"], say=said.append)
    assert said == []


def test_a_key_of_the_old_type_that_the_command_line_gives_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.sde_window_size is a key of another type.*command line"):
        load_recipe(QUICKSTART, ["algorithm.type=dance_grpo", "algorithm.sde_window_size=2"])


def test_a_mistake_of_the_file_is_refused_whatever_the_type(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(QUICKSTART.read_text().replace("  sde_window_size: 3", "  sde_windw_size: 3"))
    with pytest.raises(ConfigError, match=r"algorithm\.sde_windw_size is not a known key"):
        load_recipe(path, ["algorithm.type=dance_grpo"])


def test_an_unknown_type_is_refused_as_such() -> None:
    with pytest.raises(ConfigError, match="dance_gpro"):
        load_recipe(QUICKSTART, ["algorithm.type=dance_gpro"])


def test_a_simulation_takes_the_new_type_too() -> None:
    loaded = load_source(str(QUICKSTART), ["algorithm.type=dance_grpo"])
    assert loaded.recipe is not None
    assert loaded.recipe.algorithm.type == "dance_grpo"
    assert "sde_window_size" in loaded.notes[0]
