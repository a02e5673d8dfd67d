"""``digenrl sample``: the pictures that were asked for, where they were asked for, and nothing overwritten."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from digenrl.cli import sample
from digenrl.config.schema import Recipe
from digenrl.diffusion.noise import Purpose, normal
from digenrl.errors import ConfigError, RunFailed
from digenrl.runtime.saved_run import OpenOptions, open_model
from digenrl.testing.tiny_runs import build_run

RecipeMaker = Callable[..., Recipe]
OWLS = ["an owl", "two owls"]
STEPS = 3


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory, tiny_recipe: RecipeMaker) -> str:
    """A LoRA run with an average. Read only."""
    evaluation = {"prompts": "builtin:shapes/heldout.jsonl", "num_inference_steps": STEPS, "seed": 5}
    recipe = tiny_recipe(model={"lora": {"rank": 4, "alpha": 16}}, train={"ema": {"decay": 0.9}}, eval=evaluation)
    return str(build_run(tmp_path_factory.mktemp("runs") / "tiny", recipe, moved_by=0.2))


@pytest.fixture
def draw(tiny_run: str, tmp_path: Path) -> Callable[..., list[np.ndarray]]:
    """Sample into a fresh folder and return the pictures in the order of their names."""
    count = 0

    def call(prompts: list[str] | None = None, **options: Any) -> list[np.ndarray]:
        nonlocal count
        count += 1
        folder = tmp_path / f"out-{count}"
        sample.run(options.pop("source", tiny_run), prompts=prompts or ["an owl"], out=str(folder), **options)
        return [np.asarray(Image.open(path)).astype(int) for path in sorted(folder.iterdir())]

    return call


def test_a_picture_is_the_plain_ode_from_keyed_noise_with_the_runs_own_settings_and_averaged_weights(
    draw: Callable[..., Any], tiny_run: str
) -> None:
    (picture,) = draw()
    adapter = open_model(tiny_run, OpenOptions(weights="ema")).adapter
    schedule = adapter.noise_schedule(STEPS, 32, 32)
    x = normal(adapter.latent_shape(32, 32), 5, Purpose.EVALUATION, 0, 0)[None]
    text = adapter.encode_prompts(["an owl"], [""]).tensors
    network: Any = adapter.transformer
    with torch.no_grad():
        for step in range(STEPS):
            velocity = network(
                hidden_states=x,
                timestep=schedule.timesteps[step : step + 1],
                encoder_hidden_states=text["prompt_embeds"],
                pooled_projections=text["pooled_prompt_embeds"],
                return_dict=False,
            )[0]
            x = x + (schedule.sigmas[step + 1] - schedule.sigmas[step]) * velocity
        wanted = (adapter.decode(x)[0] * 255).round().permute(1, 2, 0).int().numpy()
    assert np.abs(picture - wanted).max() <= 1


@pytest.mark.parametrize(
    "option",
    [
        {"weights": "raw"},
        {"seed": 6},
        {"steps": 4},
        {"true_cfg_scale": 4.0},
        {"source": "builtin:shapes"},
        {"prompts": ["a dog"]},
    ],
)
def test_every_option_changes_the_picture(option: dict[str, Any], draw: Callable[..., Any]) -> None:
    (plain,), (changed,) = draw(), draw(**option)
    assert not np.array_equal(plain, changed)


def test_a_picture_does_not_depend_on_how_many_others_are_drawn(draw: Callable[..., Any]) -> None:
    alone, (first, second, third, fourth) = draw(), draw(OWLS, num=2)
    # Another batch size: last bits of the forward pass, so at most one level of 255.
    assert np.abs(alone[0] - first).max() <= 1
    pictures = [first, second, third, fourth]
    assert all(np.abs(a - b).max() > 1 for i, a in enumerate(pictures) for b in pictures[:i])


def test_every_picture_is_of_its_own_prompt(draw: Callable[..., Any]) -> None:
    different, equal = draw(OWLS), draw([OWLS[0]] * 2)
    assert np.array_equal(different[0], equal[0])
    assert np.abs(different[1] - equal[1]).max() > 1


def test_the_same_command_gives_the_same_picture(draw: Callable[..., Any]) -> None:
    assert np.array_equal(draw(OWLS), draw(OWLS))


def test_the_size_can_be_changed(draw: Callable[..., Any]) -> None:
    assert draw(height=48, width=64)[0].shape == (48, 64, 3)


@pytest.mark.parametrize(
    ("out", "prompts", "num", "names"),
    [
        ("x.png", 1, 1, ["x.png"]),
        ("x.png", 2, 1, ["x-000.png", "x-001.png"]),
        ("deep/x.png", 1, 2, ["deep/x-000.png", "deep/x-001.png"]),
        ("x", 2, 1, ["x/prompt-000-sample-000.png", "x/prompt-001-sample-000.png"]),
        ("x.y/", 1, 1, ["x.y/prompt-000-sample-000.png"]),
        (".", 1, 1, ["prompt-000-sample-000.png"]),
    ],
)
def test_names_of_the_pictures(
    out: str, prompts: int, num: int, names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert [str(path) for path in sample.output_paths(out, prompts, num)] == names


def test_pictures_lie_where_the_command_says(
    tiny_run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    sample.run(tiny_run, prompts=OWLS, out="deep/x.png")
    printed = capsys.readouterr().out
    for name, prompt in zip(("deep/x-000.png", "deep/x-001.png"), OWLS, strict=True):
        assert f"{name}  {prompt}\n" in printed
        with Image.open(tmp_path / name) as picture:
            assert picture.format == "PNG"


def test_a_file_that_is_there_is_never_overwritten_and_nothing_is_loaded(tmp_path: Path) -> None:
    taken = tmp_path / "x-001.png"
    taken.write_bytes(b"mine")
    with pytest.raises(ConfigError, match=r"x-001\.png"):
        sample.run("there is no such run", prompts=OWLS, out=str(tmp_path / "x.png"))
    assert taken.read_bytes() == b"mine"
    assert [path.name for path in tmp_path.iterdir()] == ["x-001.png"]


@pytest.mark.parametrize(
    ("options", "match"), [({"out": "x.jpg"}, "PNG"), ({"prompts": []}, "nothing to draw"), ({"num": 0}, "draw")]
)
def test_what_cannot_be_drawn_is_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        sample.run("builtin:shapes", **{"prompts": ["a"], **options})


def test_weights_that_have_diverged_give_an_error_and_no_picture(tmp_path: Path, tiny_recipe: RecipeMaker) -> None:
    broken = build_run(tmp_path / "run", tiny_recipe(model={"lora": {"rank": 2}}), moved_by=float("nan"))
    with pytest.raises(RunFailed, match="not finite"):
        sample.run(str(broken), prompts=["a"], steps=2, out=str(tmp_path / "x.png"))
    assert not (tmp_path / "x.png").exists()
