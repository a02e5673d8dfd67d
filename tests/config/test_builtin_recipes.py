from __future__ import annotations

from pathlib import Path

import pytest

from digenrl.cli import show
from digenrl.cli.reward_serve import rewards_to_serve
from digenrl.cli.train import _what_to_train
from digenrl.config.builtin_recipes import builtin_recipes
from digenrl.config.loader import load_recipe
from digenrl.errors import ConfigError
from digenrl.simulation.source import load_source

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_recipe_of_the_repository_is_built_in_and_loads_by_name() -> None:
    shipped = builtin_recipes()
    assert set(shipped) == {path.stem for path in (ROOT / "recipes").glob("*.yaml")}
    for name, file in shipped.items():
        assert load_recipe(name) == load_recipe(file)


def test_overrides_change_a_built_in_recipe() -> None:
    assert load_recipe("quickstart", ["train.steps=3"]).train.steps == 3


def test_a_file_of_the_same_name_comes_first(elsewhere: Path) -> None:
    text = builtin_recipes()["quickstart"].read_text(encoding="utf-8")
    (elsewhere / "quickstart").write_text(text.replace("seed: 0", "seed: 41", 1), encoding="utf-8")
    assert load_recipe("quickstart").run.seed == 41


def test_an_unknown_name_lists_the_built_in_ones() -> None:
    with pytest.raises(ConfigError, match="There is no recipe 'quickstrat'") as raised:
        load_recipe("quickstrat")
    assert all(name in raised.value.why for name in builtin_recipes())


def test_simulate_and_plan_take_a_built_in_recipe_and_name_them_where_a_source_is_unknown() -> None:
    assert load_source("quickstart").recipe == load_recipe("quickstart")
    with pytest.raises(ConfigError) as raised:
        load_source("quickstrat")
    assert "quickstart" in raised.value.why


def test_the_rewards_of_a_built_in_recipe_can_be_served() -> None:
    assert [reward.type for reward in rewards_to_serve("quickstart", [])] == ["shapes"]


def test_a_built_in_recipe_beside_resume_is_two_recipes(elsewhere: Path) -> None:
    (elsewhere / "recipe.yaml").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="are two recipes"):
        _what_to_train("quickstart", [], str(elsewhere))


def test_show_lists_the_built_in_recipes_with_what_each_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    show.run("recipes", None)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(builtin_recipes()) + 1
    assert any(line.startswith("quickstart ") and "laptop CPU" in line for line in lines)


def test_show_prints_a_built_in_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    show.run("recipe", "quickstart")
    assert capsys.readouterr().out == builtin_recipes()["quickstart"].read_text(encoding="utf-8")
