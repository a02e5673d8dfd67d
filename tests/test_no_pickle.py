"""A pickle with a side effect, offered to every loader of the product, never runs."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from digenrl.cli.evaluate import run as evaluate
from digenrl.cli.export import run as export
from digenrl.cli.train import run as train
from digenrl.config.loader import load_recipe, load_reward
from digenrl.data.importers import import_prompts
from digenrl.data.prompts import load_prompts
from digenrl.errors import DigenError
from digenrl.rewards.compose import WeightedRewards
from digenrl.rewards.neural import read_tensors
from digenrl.simulation.source import load_source
from digenrl.trace.record import read_trace

ROOT = Path(__file__).parents[1]
QUICKSTART = str(ROOT / "recipes" / "quickstart.yaml")
MODEL = ROOT / "digenrl" / "assets" / "shapes" / "model"


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (os.environ["DIGENRL_TEST_MARKER"],))


def as_file(folder: Path, name: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(Bomb(), protocol=2))
    return path


def model_folder(folder: Path) -> None:
    """A model whose weights are a pickle, as old files on the hub have them."""
    shutil.copytree(MODEL, folder / "model")
    (folder / "model" / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    as_file(folder, "model/transformer/diffusion_pytorch_model.bin")
    train(
        QUICKSTART,
        ["cluster.placement=inline", f"model.path={folder / 'model'}", f"run.output_dir={folder / 'run'}"],
        resume=None,
    )


def weights_of_a_clip(folder: Path) -> None:
    as_file(folder, "clip/pytorch_model.bin")
    shutil.copytree(MODEL / "tokenizer", folder / "clip", dirs_exist_ok=True)
    (folder / "clip" / "config.json").write_text('{"model_type": "clip"}')
    (folder / "clip" / "preprocessor_config.json").write_text('{"size": 8, "crop_size": 8, "image_mean": [], "image_std": []}')
    WeightedRewards.from_recipe([load_reward("clip_score", [f"path={folder / 'clip'}", "device=cpu"])])


LOADERS: dict[str, Callable[[Path], object]] = {
    "recipe": lambda folder: load_recipe(as_file(folder, "recipe.yaml")),
    "prompts as txt": lambda folder: load_prompts(as_file(folder, "prompts.txt")),
    "prompts as jsonl": lambda folder: load_prompts(as_file(folder, "prompts.jsonl")),
    "trace": lambda folder: read_trace(as_file(folder, "trace.jsonl")),
    "costs": lambda folder: load_source(str(as_file(folder, "costs.yaml"))),
    "resume": lambda folder: train(None, [], resume=str(as_file(folder, "run/recipe.yaml").parent)),
    "export": lambda folder: export(str(as_file(folder, "run/recipe.yaml").parent), str(folder / "out"), weights=None),
    "eval": lambda folder: evaluate(
        str(as_file(folder, "run/recipe.yaml").parent),
        prompts=None,
        recipe=None,
        as_json=False,
        out=None,
        weights=None,
        device=None,
    ),
    "model folder": model_folder,
    "data of verl": lambda folder: import_prompts("verl", as_file(folder, "train.parquet")),
    "data of DanceGRPO": lambda folder: import_prompts("dance_grpo", as_file(folder, "videos2caption.json")),
    "weights of a CLIP": weights_of_a_clip,
    "weights of an aesthetic predictor": lambda folder: read_tensors(str(as_file(folder, "head.pth")), ()),
}


@pytest.mark.parametrize("loader", LOADERS)
def test_a_pickle_is_refused_and_never_runs(loader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = tmp_path / "ran"
    monkeypatch.setenv("DIGENRL_TEST_MARKER", str(marker))
    with pytest.raises((DigenError, pickle.UnpicklingError)):
        LOADERS[loader](tmp_path)
    assert not marker.exists()


def test_the_bomb_would_go_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = tmp_path / "ran"
    monkeypatch.setenv("DIGENRL_TEST_MARKER", str(marker))
    pickle.loads(as_file(tmp_path, "bomb").read_bytes())
    assert marker.exists()
