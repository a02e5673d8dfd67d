"""The shipped model is what its card says: small, loaded by plain diffusers, and right about as often as it is told."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline

from digenrl.config.builtin import resolve
from digenrl.data.prompts import load_prompts
from digenrl.rewards.shapes.scene import CATEGORIES, Scene
from digenrl.rewards.shapes.verifier import verify

FOLDER = resolve("builtin:shapes", where="test")
CARD = (FOLDER / "MODEL_CARD.md").read_text(encoding="utf-8")
DRAWN = 50
"""Held-out captions, ten of each category. The share that is drawn exactly has a standard error of 0.07."""


@pytest.fixture(scope="module")
def pipeline() -> Any:
    loaded = DiffusionPipeline.from_pretrained(FOLDER)
    loaded.set_progress_bar_config(disable=True)
    return loaded


def test_it_is_at_most_six_megabytes() -> None:
    assert sum(path.stat().st_size for path in Path(FOLDER).rglob("*") if path.is_file()) <= 6_000_000


def test_its_weights_are_stored_in_half_precision_and_load_in_single(pipeline: Any) -> None:
    modules = [part for part in pipeline.components.values() if isinstance(part, torch.nn.Module)]
    assert len(modules) == 5
    assert {parameter.dtype for part in modules for parameter in part.parameters()} == {torch.float32}
    assert all(torch.equal(value, value.half().float()) for part in modules for value in part.parameters())


def test_the_call_in_the_card_works() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", CARD, re.DOTALL)
    names: dict[str, Any] = {"folder": FOLDER}
    exec(code, names)
    assert names["image"].size == (32, 32)


@pytest.mark.parametrize("max_sequence_length", [10, 256])
def test_it_draws_held_out_captions_as_often_as_the_card_says(pipeline: Any, max_sequence_length: int) -> None:
    prompts = load_prompts(resolve("builtin:shapes/heldout.jsonl", where="test")).prompts[:DRAWN]
    images = pipeline(
        [prompt.text for prompt in prompts],
        height=32,
        width=32,
        num_inference_steps=20,
        guidance_scale=1.0,
        max_sequence_length=max_sequence_length,
        generator=torch.Generator().manual_seed(0),
        output_type="np",
    ).images
    pictures = np.rint(images * 255).astype(np.uint8)
    right = [
        verify(picture, Scene.from_metadata(prompt.metadata)).strict for picture, prompt in zip(pictures, prompts, strict=True)
    ]
    told = float(re.search(r"\| all \| \d+ \| ([\d.]+)", CARD)[1])
    assert abs(np.mean(right) - told) < 0.2


def test_the_card_has_each_category() -> None:
    assert all(re.search(rf"\| {name} \| \d+ \| 0\.\d\d", CARD) for name in CATEGORIES)
