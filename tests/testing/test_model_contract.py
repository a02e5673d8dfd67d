"""The contract of adapters: the example passes it and trains, and every way to break it is told in words."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from digenrl.config.loader import load_recipe
from digenrl.config.schema import Recipe
from digenrl.metrics.log import read_metrics
from digenrl.models.base import Conditioning
from digenrl.runtime.train import train
from digenrl.testing import check_model
from digenrl.testing.tiny_pipelines import BUILDERS
from tests.families import FAMILIES

EXAMPLES = Path(__file__).parents[2] / "examples"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def painter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example's weights, made as its first lines say."""
    folder = tmp_path_factory.mktemp("painter")
    subprocess.run(
        [sys.executable, str(EXAMPLES / "custom_model.py"), "my_model"], cwd=folder, env=ENVIRONMENT, check=True, timeout=100
    )
    return folder / "my_model"


@pytest.fixture
def example(painter: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Recipe]:
    """A function that gives the example's recipe; the class is one of its module."""
    monkeypatch.syspath_prepend(EXAMPLES)

    def make(*overrides: str, adapter: str = "PixelPainter") -> Recipe:
        path = EXAMPLES / "custom_model.yaml"
        return load_recipe(path, [f"model.path={painter}", f"model.type=custom_model:{adapter}", "run.device=cpu", *overrides])

    return make


def test_the_example_passes_the_contract_with_and_without_guidance(example: Callable[..., Recipe]) -> None:
    for recipe in (example(), example("rollout.true_cfg_scale=1", "model.dtype=float32", "rollout.width=48")):
        check_model(recipe)


@pytest.mark.parametrize("change", ["model.lora=null", "model.gradient_checkpointing=true"])
def test_the_example_trains(change: str, example: Callable[..., Recipe], tmp_path: Path) -> None:
    train(example("train.steps=2", "log.tensorboard=false", f"run.output_dir={tmp_path / 'run'}", change))
    steps = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if row["kind"] == "train"]
    assert len(steps) == 2
    assert all(row["grad_norm"] > 0 for row in steps)


def by_length(self: Any, prompts: Any, negative: Any) -> Conditioning:
    longest = max(map(len, prompts))
    return Conditioning({"words": torch.zeros(len(prompts), longest) + torch.tensor([[len(text)] for text in prompts])})


def without_text(text: Conditioning) -> Conditioning:
    return Conditioning({name: torch.zeros_like(tensor) for name, tensor in text.tensors.items()})


def wrong(original: Callable[..., Tensor], change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda self, *arguments: change(original(self, *arguments))


def broken(module: Any, fault: str) -> dict[str, Any]:
    """Methods of an adapter with one fault."""
    good = module.PixelPainter
    predict, encode, decode, load = good.predict, good.encode_prompts, good.decode, good.load.__func__

    def of_one_time(self: Any, x: Tensor, timesteps: Tensor, *rest: Any) -> Tensor:
        result: Tensor = predict(self, x, timesteps[:1].expand(len(x)), *rest)
        return result

    def trainable(cls: Any, *arguments: Any) -> Any:
        adapter = load(cls, *arguments)
        if adapter._network is not None:
            adapter._network.requires_grad_(True)
        return adapter

    def in_training(cls: Any, *arguments: Any) -> Any:
        adapter = load(cls, *arguments)
        if adapter._network is not None:
            adapter._network.train()
        return adapter

    def greedy(cls: Any, recipe: Any, device: Any, parts: Any = None) -> Any:
        return load(cls, recipe, device)

    def same_text(self: Any, prompts: Any, negative: Any) -> Conditioning:
        return without_text(encode(self, prompts, negative))

    def random_text(self: Any, prompts: Any, negative: Any) -> Conditioning:
        words = encode(self, prompts, negative)
        return Conditioning({name: tensor + torch.rand(1) for name, tensor in words.tensors.items()})

    def drawing(self: Any, *arguments: Any) -> Tensor:
        torch.rand(1)
        result: Tensor = decode(self, *arguments)
        return result

    faults: dict[str, dict[str, Any]] = {
        "one timestep for all rows": {"predict": of_one_time},
        "no graph": {"predict": torch.no_grad()(predict)},
        "bfloat16 answer": {"predict": wrong(predict, lambda v: v.bfloat16())},
        "another shape": {"predict": wrong(predict, lambda v: v[:, :1])},
        "neighbours mixed": {"predict": wrong(predict, lambda v: v - v.mean(0, keepdim=True) * 1e-6)},
        "text unused": {"predict": lambda self, x, t, c, g: predict(self, x, t, without_text(c), g)},
        "infinite": {"predict": wrong(predict, lambda v: v / 0.0)},
        "guidance unused": {"predict": lambda self, x, t, c, g: predict(self, x, t, c, type(g)())},
        "weights that are trained": {"load": classmethod(trainable)},
        "training mode": {"load": classmethod(in_training)},
        "all parts always": {"load": classmethod(greedy)},
        "same text": {"encode_prompts": same_text},
        "text of a length": {"encode_prompts": by_length},
        "text at random": {"encode_prompts": random_text},
        "pixels out of range": {"decode": wrong(decode, lambda x: x * 255)},
        "channels last": {"decode": wrong(decode, lambda x: x.permute(0, 2, 3, 1))},
        "global random state": {"decode": drawing},
        "a target that is nowhere": {"default_lora_targets": ("to_q",)},
        "a block that is nowhere": {"sharded_blocks": ("Blocks",)},
        "no blocks": {"sharded_blocks": ()},
    }
    return faults[fault]


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("one timestep for all rows", "every row must be computed with its own timestep"),
        ("no graph", "cuts the graph"),
        ("bfloat16 answer", "must answer in float32"),
        ("another shape", "for latents of"),
        ("neighbours mixed", "NaN in one row's latents changes other rows"),
        ("text unused", "the prompt has no effect"),
        ("infinite", "not finite"),
        ("guidance unused", "true_cfg_scale has no effect"),
        ("weights that are trained", "load must freeze"),
        ("training mode", "eval mode"),
        ("all parts always", "raise part_not_loaded"),
        ("same text", "two different prompts"),
        ("text of a length", "cannot be joined"),
        ("text at random", "twice gives different numbers"),
        ("pixels out of range", r"pixels in \[0, 1\]"),
        ("channels last", r"\[B, 3, height, width\] is"),
        ("global random state", "global random state"),
        ("a target that is nowhere", "'to_q' is the end of no linear layer's name"),
        ("a block that is nowhere", r"no module of class \['Blocks'\]"),
        ("no blocks", "must name the repeated layers"),
    ],
)
def test_a_broken_adapter_is_told_what_is_wrong(
    fault: str, told: str, example: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("custom_model")
    kind = type("Broken", (module.PixelPainter,), broken(module, fault))
    monkeypatch.setattr(module, "Broken", kind, raising=False)
    with pytest.raises(AssertionError, match=told):
        check_model(example(adapter="Broken"))


def test_one_command_builds_every_tiny_folder_that_a_family_has(tmp_path: Path) -> None:
    assert set(BUILDERS) == {case.name for case in FAMILIES}
    done = subprocess.run(
        [sys.executable, "-m", "digenrl.testing", "all", str(tmp_path / "tiny")],
        env=ENVIRONMENT,
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    for case in FAMILIES:
        assert (tmp_path / "tiny" / case.name / "model_index.json").is_file()
        assert str(tmp_path / "tiny" / case.name) in done.stdout
