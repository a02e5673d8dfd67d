"""The tables of memory on the pages of models say what the estimate says."""

from __future__ import annotations

from pathlib import Path

import pytest

from digenrl.config.loader import load_recipe
from digenrl.simulation.memory import holders, memory_of
from digenrl.simulation.model_sizes import sizes_of

ROOT = Path(__file__).parents[2]
IMAGES = {"sd3": "sd35_medium_flow_grpo", "flux": "flux1_dev_flow_grpo", "qwen_image": "qwen_image_flow_grpo"}
SIZES = [
    ("wan", "wan21_1_3b_flow_grpo", (240, 416, 33)),
    ("wan", "wan21_1_3b_flow_grpo", (480, 832, 81)),
    ("wan", "wan21_14b_flow_grpo", (256, 256, 5)),
    ("wan", "wan21_14b_flow_grpo", (480, 480, 53)),
    ("wan", "wan21_14b_flow_grpo", (480, 832, 81)),
    ("hunyuan_video", "hunyuanvideo_dance_grpo", (480, 480, 53)),
    ("hunyuan_video", "hunyuanvideo_dance_grpo", (720, 1280, 129)),
    *((page, name, (side, side, 1)) for page, name in IMAGES.items() for side in (512, 1024)),
]


def gib(name: str, size: tuple[int, int, int], lora: str, checkpointing: str) -> list[float]:
    """Of the generator and of the trainer."""
    changes = [f"rollout.{key}={value}" for key, value in zip(("height", "width", "num_frames"), size, strict=True)]
    changes += ["rollout.forward_batch_size=1", "train.timestep_batch_size=1", "model.vae_tiling=true", f"model.lora={lora}"]
    recipe = load_recipe(ROOT / "recipes" / f"{name}.yaml", [*changes, f"model.gradient_checkpointing={checkpointing}"])
    sizes = sizes_of(recipe)
    assert sizes is not None
    return [memory_of(recipe, sizes, holder).gib for holder in holders(recipe)]


def row(name: str, size: tuple[int, int, int]) -> str:
    adapters = "{rank: 32, alpha: 64}"
    ways = [gib(name, size, lora, checkpointing) for lora in (adapters, "null") for checkpointing in ("true", "false")]
    shown = size if size[2] > 1 else size[:2]
    cells = [" x ".join(map(str, shown)), *(f"{value:.0f}" for value in (ways[0][0], *(way[1] for way in ways)))]
    return f"| {' | '.join(cells)} |"


@pytest.mark.parametrize(("page", "name", "size"), SIZES)
def test_a_row_of_a_page_is_what_the_estimate_says(page: str, name: str, size: tuple[int, int, int]) -> None:
    assert row(name, size) in (ROOT / "docs/models" / f"{page}.md").read_text(encoding="utf-8")
