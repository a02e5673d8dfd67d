"""``digenrl sample``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from digenrl.cli.environment import calm_threads
from digenrl.config.text import expand_home
from digenrl.errors import ConfigError


def run(
    source: str,
    *,
    prompts: Sequence[str],
    seed: int | None = None,
    num: int = 1,
    out: str | None = None,
    steps: int | None = None,
    weights: Literal["ema", "raw"] | None = None,
    height: int | None = None,
    width: int | None = None,
    num_frames: int | None = None,
    fps: float | None = None,
    true_cfg_scale: float | None = None,
    guidance_scale: float | None = None,
    device: str | None = None,
) -> None:
    """Draw ``num`` pictures or videos of each prompt and save them as PNG or mp4; what is None is as the run evaluates."""
    if not prompts or num < 1:
        raise ConfigError("There is nothing to draw.", fix='Give a prompt, --prompt "two red circles", and --num of at least 1.')
    if out is not None:
        output_paths(out, len(prompts), num)  # at once, for a file that is there already
    calm_threads()
    from digenrl.data.prompts import Prompt
    from digenrl.runtime.draw import draw
    from digenrl.runtime.saved_run import OpenOptions, find_model, load_model

    changes = {
        "eval.seed": seed,
        "eval.num_inference_steps": steps,
        "eval.true_cfg_scale": true_cfg_scale,
        "eval.guidance_scale": guidance_scale,
        "rollout.height": height,
        "rollout.width": width,
        "rollout.num_frames": num_frames,
        "rollout.fps": fps,
    }
    saved = find_model(source, OpenOptions(weights=weights, changes=changes, device=device))
    rollout = saved.recipe.rollout
    suffix = ".mp4" if rollout.num_frames > 1 else ".png"
    paths = output_paths(out or f"sample{suffix}", len(prompts), num, suffix=suffix)
    opened = load_model(saved)
    for warning in opened.saved.warnings:
        print(f"warning: passed over a newer checkpoint: {warning}", file=sys.stderr)
    images = draw(opened, [Prompt(text=text) for text in prompts], num=num)
    section = opened.saved.section
    print(f"{opened.saved.description}: {section.num_inference_steps} ODE steps, seed {section.seed}")
    for index, (path, image) in enumerate(zip(paths, images, strict=True)):
        _save(image, path, rollout.fps)
        print(f"{path}  {prompts[index // num]}")


def output_paths(out: str, prompts: int, num: int, *, suffix: str | None = None) -> list[Path]:
    """Where the pictures go, prompt by prompt: ``x.png`` for one, ``x-000.png`` and so on for several, or into a folder.

    suffix: .png for images, .mp4 for videos; as ``out`` has it where that is not known yet.
    Raises ConfigError when one of them is there already.
    """
    count = prompts * num
    path = expand_home(out, where="--out")
    is_folder = path.is_dir() or out.endswith(("/", os.sep)) or not path.suffix
    wanted = (".png", ".mp4") if suffix is None else (suffix,)
    if not is_folder and path.suffix.lower() not in wanted:
        is_video = wanted == (".mp4",)
        raise ConfigError(
            f"--out {out!r} is not {'an mp4' if is_video else 'a PNG'} file.",
            why="Videos are saved as mp4." if is_video else "Pictures are saved without loss, as the rewards see them.",
            fix=f"Use --out {path.with_suffix(wanted[0])}, or a folder.",
        )
    if is_folder:
        end = suffix or wanted[0]
        paths = [path / f"prompt-{p:03d}-sample-{s:03d}{end}" for p in range(prompts) for s in range(num)]
    elif count == 1:
        paths = [path]
    else:
        paths = [path.with_name(f"{path.stem}-{index:03d}{path.suffix}") for index in range(count)]
    for each in paths:
        if os.path.lexists(each):
            raise _taken(each)
    return paths


def _save(image: NDArray[np.uint8], path: Path, fps: float) -> None:
    """image: [H, W, 3], or [F, H, W, 3] of a video."""
    from PIL import Image

    from digenrl.metrics.video import save_video

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if image.ndim == 4:
            save_video(path, image, fps)
            return
        with path.open("xb") as file:  # x: a file that has come since is not overwritten either
            Image.fromarray(image).save(file, format="PNG")
    except FileExistsError as error:
        raise _taken(path) from error
    except OSError as error:
        raise ConfigError(f"Cannot write {str(path)!r}: {error.strerror or error}.", fix="Choose another --out.") from error


def _taken(path: Path) -> ConfigError:
    return ConfigError(
        f"{str(path)!r} is there already.", why="Nothing is ever overwritten.", fix="Choose another --out, or delete it yourself."
    )
