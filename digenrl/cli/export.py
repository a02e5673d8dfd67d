"""``digenrl export``."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from digenrl.cli.environment import calm_threads
from digenrl.config.text import expand_home
from digenrl.errors import ConfigError

if TYPE_CHECKING:
    from digenrl.models.model_card import CardFacts
    from digenrl.runtime.saved_run import OpenedModel, SavedModel


def run(run_folder: str, out: str, *, weights: Literal["ema", "raw"] | None = None) -> None:
    """Write a run's newest weights for diffusers into ``out``, with a model card, completely or not at all."""
    calm_threads()
    from digenrl.runtime.fresh_folder import check_is_free, fresh_folder
    from digenrl.runtime.saved_run import OpenOptions, find_model, is_run, load_model

    target = expand_home(out, where="OUT")
    check_is_free(target)
    if not is_run(run_folder):
        raise ConfigError(f"{run_folder!r} is a model, and export takes a run.", fix="Name the folder of a run.")
    saved = find_model(run_folder, OpenOptions(weights=weights, device="cpu"))
    opened = load_model(saved)
    with fresh_folder(target) as draft:
        _write(opened, draft)
    for warning in saved.warnings:
        print(f"warning: passed over a newer checkpoint: {warning}", file=sys.stderr)
    print(f"{saved.description} -> {target}")
    for path in sorted(target.rglob("*")):
        if path.is_file():
            print(f"  {path.relative_to(target)}  {path.stat().st_size:,} bytes")
    print("README.md says how to load it")


def _write(opened: OpenedModel, folder: Path) -> None:
    import diffusers

    from digenrl.models.export import export_lora, export_pipeline
    from digenrl.models.model_card import base_name, model_card
    from digenrl.runtime.model_recipe import pipeline_config

    recipe = opened.recipe
    index = pipeline_config(recipe.model.path)
    pipeline_class: Any = getattr(diffusers, index["_class_name"])
    absent = tuple(sorted(name for name, entry in index.items() if isinstance(entry, list | tuple) and entry[0] is None))
    if recipe.model.lora is not None:
        export_lora(opened.adapter.transformer, pipeline_class, folder, base=base_name(recipe.model.path))
    else:
        export_pipeline(opened.adapter.transformer, pipeline_class, folder, recipe=recipe, absent=absent)
    assert opened.saved.run is not None, "export takes a run"
    plot = opened.saved.run / "reward.png"
    if plot.is_file():
        shutil.copyfile(plot, folder / "reward.png")
    card = model_card(_facts(opened.saved, index["_class_name"], absent, has_plot=plot.is_file()))
    (folder / "README.md").write_text(card, encoding="utf-8")


def _facts(saved: SavedModel, pipeline: str, absent: tuple[str, ...], *, has_plot: bool) -> CardFacts:
    from digenrl.config.loader import load_recipe
    from digenrl.metrics.log import read_metrics
    from digenrl.models.model_card import CardFacts

    assert saved.run is not None, "export takes a run"
    metrics = saved.run / "metrics.jsonl"
    rows = read_metrics(metrics) if metrics.is_file() else []
    return CardFacts(
        title=saved.name,
        recipe=load_recipe(saved.run / "recipe.yaml"),  # as written: saved.recipe always has an eval section
        section=saved.section,
        pipeline=pipeline,
        absent=absent,
        weights=saved.weights,
        policy_version=saved.policy_version,
        evaluations=sorted((row for row in rows if row["kind"] == "eval"), key=lambda row: int(row["step"])),
        has_plot=has_plot,
        prompt=_example_prompt(saved),
    )


def _example_prompt(saved: SavedModel) -> str:
    """One of the run's own prompts; any where its file is not here any more."""
    from digenrl.config.builtin import resolve
    from digenrl.data.prompts import load_prompts

    try:
        return load_prompts(resolve(saved.section.prompts, where="eval.prompts")).prompts[0].text
    except ConfigError:
        return "a red circle"
