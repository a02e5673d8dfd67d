"""Components of a user's own, named by import path from the working directory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from digenrl.config.loader import load_recipe, recipe_from_plain
from digenrl.config.registry import KINDS, component_class, settings_class
from digenrl.errors import ConfigError

Write = Callable[[str | bytes], Path]
OwnModule = Callable[[str, str], None]

SHARP = """\
from pydantic import BaseModel

class Inner(BaseModel):
    radius: int = 1

class Sharp:
    class Settings(BaseModel):
        threshold: float = 0.5
        inner: Inner = Inner()
        more: list[Inner] = []

    def __init__(self, settings):
        self.settings = settings
"""


def refused(action: Callable[[], object]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        action()
    return caught.value


def test_a_reward_from_the_working_directory_brings_its_own_keys(write: Write, text: str, own_module: OwnModule) -> None:
    own_module("own_sharp", SHARP)
    recipe = load_recipe(write(text.replace("type: shapes", "type: own_sharp:Sharp, threshold: 0.25, inner: {radius: 3}")))
    reward = recipe.rewards[0]
    assert (reward.name, reward.weight) == ("Sharp", 2.0)
    assert (reward.settings.threshold, reward.settings.inner.radius) == (0.25, 3)
    assert component_class("reward", reward.type, where="test").Settings is type(reward.settings)
    assert recipe_from_plain(recipe.to_plain()) == recipe


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ("threshhold: 1", "rewards.0.threshhold is not a known key; did you mean threshold?"),
        ("wieght: 1", "rewards.0.wieght is not a known key; did you mean weight?"),
        ("inner: {radios: 1}", "rewards.0.inner.radios is not a known key; did you mean radius?"),
        ("inner: {wieght: 1}", "rewards.0.inner.wieght is not a known key; did you mean rewards.weight?"),
        ("more: [{radius: 1}, {radios: 1}]", "rewards.0.more.1.radios is not a known key; did you mean radius?"),
        ("inner: {radius: true}", "rewards.0.inner.radius cannot be true"),
        ("threshold: high", "rewards.0.threshold cannot be 'high'"),
        ("threshold: true", "rewards.0.threshold cannot be true: a number is asked for"),
    ],
)
def test_a_settings_class_that_forbids_nothing_is_checked_as_strictly_as_ours(
    write: Write, text: str, own_module: OwnModule, keys: str, says: str
) -> None:
    own_module("own_sharp", SHARP)
    path = write(text.replace("type: shapes", f"type: own_sharp:Sharp, {keys}"))
    error = refused(lambda: load_recipe(path))
    assert says in error.what
    assert f"({path}:15)" in error.what


def test_a_settings_class_that_allows_extra_keys_gets_them(write: Write, text: str, own_module: OwnModule) -> None:
    own_module("own_open", SHARP.replace("threshold: float", "model_config = {'extra': 'allow'}\n        threshold: float"))
    recipe = load_recipe(write(text.replace("type: shapes", "type: own_open:Sharp, anything: goes")))
    assert recipe.rewards[0].settings.anything == "goes"


def test_nested_settings_that_forbid_extra_keys_suggest_their_own(write: Write, text: str, own_module: OwnModule) -> None:
    own_module("own_strict", SHARP.replace("    radius: int = 1", "    model_config = {'extra': 'forbid'}\n    radius: int = 1"))
    path = write(text.replace("type: shapes", "type: own_strict:Sharp, inner: {wieght: 1}"))
    error = refused(lambda: load_recipe(path))
    assert "rewards.0.inner.wieght is not a known key; did you mean rewards.weight?" in error.what, "and not inner.weight"


def test_settings_that_clash_with_the_recipe_s_own_keys_are_refused(write: Write, text: str, own_module: OwnModule) -> None:
    own_module("own_clash", SHARP.replace("threshold", "weight"))
    error = refused(lambda: load_recipe(write(text.replace("type: shapes", "type: own_clash:Sharp"))))
    assert "rewards.0.type has settings of its own called weight, which the recipe keeps" in error.what


def test_an_algorithm_and_a_model_may_be_a_user_s_own_too(write: Write, text: str, own_module: OwnModule) -> None:
    own_module("own_parts", SHARP)
    changed = text.replace("type: flow_grpo", "type: own_parts:Sharp\n  threshold: 2").replace(
        "type: sd3", "type: own_parts:Sharp"
    )
    recipe = load_recipe(write(changed))
    assert recipe.algorithm.settings.threshold == 2
    assert recipe.model.settings.threshold == 0.5


@pytest.mark.parametrize(
    ("source", "name", "says"),
    [
        ("class Sharp: pass", "own_bad:Sharp", "own_bad:Sharp has no settings class"),
        ("class Sharp:\n    Settings = dict", "own_bad:Sharp", "own_bad:Sharp has no settings class"),
        ("class Other: pass", "own_bad:Sharp", "module 'own_bad' has no 'Sharp'"),
        ("class Other: pass", "own_bad:", "module 'own_bad' has no ''"),
        ("", "own_missing:Sharp", "cannot import 'own_missing:Sharp': No module named 'own_missing'"),
        ("import not_installed_here", "own_bad:Sharp", "cannot import 'own_bad:Sharp': No module named 'not_installed_here'"),
        ("from math import nothing_of_that_name", "own_bad:Sharp", "own_bad.py:1)"),
        ("x = 1\nx = 1 / 0", "own_bad:Sharp", "fails: ZeroDivisionError: division by zero"),
        ("x = 1\n\ny = (", "own_bad:Sharp", "own_bad.py:3)"),
        ("x = 1\nraise RuntimeError('no GPU')", "own_bad:Sharp", "own_bad.py:2)"),
        ("", ":Sharp", "importing ':Sharp' fails"),
        ("", ".:Sharp", "importing '.:Sharp' fails"),
    ],
)
def test_an_import_path_that_leads_nowhere_is_the_user_s_to_mend(
    write: Write, text: str, own_module: OwnModule, source: str, name: str, says: str
) -> None:
    own_module("own_bad", source)
    path = write(text.replace("type: shapes", f"type: '{name}'"))
    error = refused(lambda: load_recipe(path))
    assert error.what.startswith(f"rewards.0.type ({path}:15): ")
    assert says in error.what
    assert error.fix


def test_the_classes_of_a_module_are_named_when_the_wrong_one_is_asked_for(own_module: OwnModule) -> None:
    own_module("own_sharp", SHARP)
    assert "Sharp" in refused(lambda: settings_class("reward", "own_sharp:Blurry", where="x")).fix


def test_a_file_in_the_working_directory_cannot_stand_in_for_an_installed_module(own_module: OwnModule) -> None:
    own_module("own_sharp", SHARP)
    own_module("wave", "raise AssertionError('shadowed')")
    sys.modules.pop("wave", None)
    settings_class("reward", "own_sharp:Sharp", where="x")
    import wave

    assert wave.Wave_read


def test_built_in_components_leave_the_import_path_alone(write: Write, text: str, own_module: OwnModule) -> None:
    before = list(sys.path)
    load_recipe(write(text))
    assert sys.path == before


@pytest.mark.parametrize(
    ("kind", "name", "hint"),
    [
        ("algorithm", "flow_gpro", "Did you mean 'flow_grpo'?"),
        ("model", "sd33", "Did you mean 'sd3'?"),
        ("reward", "shape", "Did you mean 'shapes'?"),
        ("reward", "jpg", "Did you mean 'jpeg'?"),
        ("reward", "completely_else", "A class of your own is named by its import path"),
    ],
)
def test_a_misspelt_component_is_refused_with_the_nearest_name(kind: str, name: str, hint: str) -> None:
    for look_up in (settings_class, component_class):
        error = refused(lambda look_up=look_up: look_up(kind, name, where=f"{kind}.type"))
        assert error.what == f"{kind}.type: there is no {kind} called {name!r}."
        assert hint in error.fix
        assert all(known in error.why for known in KINDS[kind])


@pytest.mark.parametrize("wrong", ["3", "[shapes]", "{a: 1}", "true"])
def test_a_type_that_is_no_name_is_refused(write: Write, text: str, wrong: str) -> None:
    path = write(text.replace("type: shapes", f"type: {wrong}"))
    what = refused(lambda: load_recipe(path)).what
    assert what.startswith("rewards.0.type cannot be ")
    assert what.endswith(f": a name is asked for ({path}:15)")


def test_a_misspelt_component_is_named_with_its_line(write: Write, text: str) -> None:
    path = write(text.replace("flow_grpo", "flow_gpro"))
    assert refused(lambda: load_recipe(path)).what.startswith(f"algorithm.type ({path}:13): there is no algorithm called")


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, known in KINDS.items() for name in known])
def test_every_built_in_name_leads_to_a_class_and_its_settings(kind: str, name: str) -> None:
    settings = settings_class(kind, name, where="x")
    assert settings.model_config["frozen"] is True
    assert settings.model_config["extra"] == "forbid"
    module, _, cls = KINDS[kind][name].component.partition(":")
    source = Path(__file__).parents[2] / (module.replace(".", "/") + ".py")
    assert f"class {cls}" in source.read_text(encoding="utf-8"), "without importing torch"
