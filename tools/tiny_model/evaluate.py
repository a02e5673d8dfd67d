"""How much of what held-out captions ask for a pipeline draws: ``python tools/tiny_model/evaluate.py FOLDER``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from components import PIPELINE_T5_TOKENS, TEXT_TOKENS
from diffusers import DiffusionPipeline, StableDiffusion3Pipeline
from make_prompts import held_out_scenes
from numpy.typing import NDArray
from seeds import generator

from digenrl.rewards.shapes.render import to_uint8
from digenrl.rewards.shapes.scene import CATEGORIES, Scene, caption
from digenrl.rewards.shapes.verifier import verify


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Means over captions."""

    strict: float
    """Share that is drawn exactly."""
    soft: float
    """Mean soft score in [0, 1]."""
    by_category: dict[str, float]
    """Share that is drawn exactly, by category."""

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {share:.2f}" for name, share in self.by_category.items())
        return f"strict {self.strict:.3f}, soft {self.soft:.3f} ({parts})"


def main() -> None:
    parser = argparse.ArgumentParser(description="Accuracy of a shapes pipeline on held-out captions.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--captions", type=int, default=400, help="how many of the 400 held-out ones (default: all)")
    parser.add_argument("--steps", type=int, default=20, help="denoising steps")
    parser.add_argument("--guidance-scale", type=float, default=1.0)
    parser.add_argument("--max-sequence-length", type=int, default=TEXT_TOKENS)
    parser.add_argument("--seed", type=int, default=0, help="of the first noise")
    parser.add_argument("--whole", action="store_true", help=f"call with the default {PIPELINE_T5_TOKENS} tokens, too")
    arguments = parser.parse_args()
    pipeline = DiffusionPipeline.from_pretrained(arguments.folder)
    pipeline.set_progress_bar_config(disable=True)
    lengths = [arguments.max_sequence_length] + ([PIPELINE_T5_TOKENS] if arguments.whole else [])
    for length in lengths:
        scenes = held_out_scenes()[: arguments.captions]
        images = draw(
            pipeline,
            scenes,
            t5_tokens=length,
            seed=arguments.seed,
            steps=arguments.steps,
            guidance_scale=arguments.guidance_scale,
        )
        print(f"max_sequence_length {length}: {accuracy(images, scenes)}")


def draw(
    pipeline: StableDiffusion3Pipeline,
    scenes: Sequence[Scene],
    *,
    t5_tokens: int = TEXT_TOKENS,
    seed: int = 0,
    steps: int = 20,
    guidance_scale: float = 1.0,
) -> list[NDArray[np.uint8]]:
    """One picture [32, 32, 3] for each scene's caption, by the ODE sampler."""
    images = pipeline(
        [caption(scene) for scene in scenes],
        height=32,
        width=32,
        num_inference_steps=steps,
        guidance_scale=guidance_scale,
        max_sequence_length=t5_tokens,
        generator=generator(seed, "evaluation"),
        output_type="np",
    ).images
    return [to_uint8(image) for image in images]


def accuracy(images: Sequence[NDArray[np.uint8]], scenes: Sequence[Scene]) -> Accuracy:
    """Verify each picture against its scene."""
    verdicts = [verify(image, scene) for image, scene in zip(images, scenes, strict=True)]
    of_category = {
        name: [verdict.strict for verdict, scene in zip(verdicts, scenes, strict=True) if scene.category == name]
        for name in CATEGORIES
    }
    return Accuracy(
        strict=float(np.mean([verdict.strict for verdict in verdicts])),
        soft=float(np.mean([verdict.soft for verdict in verdicts])),
        by_category={name: float(np.mean(values)) for name, values in of_category.items() if values},
    )


if __name__ == "__main__":
    torch.set_num_threads(2)
    main()
