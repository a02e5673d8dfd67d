"""``digenrl eval``."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from digenrl.cli.environment import calm_threads
from digenrl.config.text import expand_home
from digenrl.data.categories import categories_of
from digenrl.errors import ConfigError

if TYPE_CHECKING:
    from digenrl.data.prompts import Prompt
    from digenrl.rewards.compose import Rewards
    from digenrl.runtime.saved_run import SavedModel


def run(
    source: str,
    *,
    prompts: str | None = None,
    recipe: str | None = None,
    as_json: bool = False,
    out: str | None = None,
    weights: Literal["ema", "raw"] | None = None,
    device: str | None = None,
) -> None:
    """Score one picture or video of every prompt, print the means, and write scores.jsonl, summary.json and sheet.png.

    Of videos, those on the sheet are written too, as videos/prompt-N.mp4.
    """
    calm_threads()
    from digenrl.config.builtin import resolve
    from digenrl.config.loader import load_recipe
    from digenrl.config.reward_checks import held_out_samples
    from digenrl.data.prompts import load_prompts
    from digenrl.metrics.video import stills
    from digenrl.rewards.compose import WeightedRewards
    from digenrl.runtime.fresh_folder import check_is_free, fresh_folder
    from digenrl.runtime.saved_run import OpenOptions, find_model

    judge = load_recipe(recipe) if recipe is not None else None
    saved = find_model(source, OpenOptions(weights=weights, judge=judge, changes={"eval.prompts": prompts}, device=device))
    _check_can_score(saved, has_judge=judge is not None)
    target = expand_home(out, where="--out") if out is not None else default_out(saved)
    check_is_free(target)
    loaded = load_prompts(resolve(str(saved.held_out), where="eval.prompts")).prompts
    where = "rewards" if saved.section.rewards is None else "eval.rewards"
    rewards = WeightedRewards.from_recipe(saved.recipe.eval_rewards, where=where, samples=held_out_samples(saved.recipe))
    images, scored = _evaluate(saved, loaded, rewards)
    summary = summarise(saved, loaded, scored)
    with fresh_folder(target) as draft:
        _write(draft, loaded, scored, summary)
        _sheet(stills(images), loaded, scored, summary, saved.name).save(draft / "sheet.png")
        if images.ndim == 5:
            _videos(images, draft / "videos", saved.recipe.rollout.fps)
    for warning in saved.warnings:
        print(f"warning: passed over a newer checkpoint: {warning}", file=sys.stderr)
    if as_json:
        print(json.dumps({**summary, "out": str(target)}, indent=2))
        return
    for line in summary_lines(summary):
        print(line)
    print(f"scores and pictures: {target}")


def default_out(saved: SavedModel) -> Path:
    """RUN/eval-step-N, with -raw for raw weights; ./eval-NAME for a model."""
    if saved.run is None:
        return Path(f"eval-{saved.name}")
    return saved.run / f"eval-step-{saved.policy_version}{'-raw' if saved.weights == 'raw' else ''}"


def summarise(saved: SavedModel, prompts: Sequence[Prompt], scored: Rewards) -> dict[str, Any]:
    """Means over all prompts and by category, as JSON: invalid rewards are counted and left out of the means."""
    field, categories = categories_of(prompts)
    names = sorted({name for name in categories if name is not None})
    rows = {name: np.array([category == name for category in categories]) for name in names}
    section, rollout = saved.section, saved.recipe.rollout
    return {
        "source": saved.source,
        "weights": saved.weights,
        "policy_version": None if saved.run is None else saved.policy_version,
        "prompts": str(saved.held_out),
        "settings": {
            "num_inference_steps": section.num_inference_steps,
            "true_cfg_scale": section.true_cfg_scale,
            "guidance_scale": section.guidance_scale,
            "seed": section.seed,
            "height": rollout.height,
            "width": rollout.width,
            **({"num_frames": rollout.num_frames, "fps": rollout.fps} if rollout.num_frames > 1 else {}),
        },
        **_means(scored, np.ones(len(prompts), dtype=bool)),
        "category_field": field,
        "categories": {name: _means(scored, mask) for name, mask in rows.items()},
    }


def summary_lines(summary: Mapping[str, Any]) -> Iterator[str]:
    """The summary for people."""
    version = "" if summary["policy_version"] is None else f", version {summary['policy_version']}"
    settings = summary["settings"]
    yield (
        f"{summary['source']}{version}, {summary['weights']} weights: {summary['num_prompts']} prompts of {summary['prompts']}, "
        f"{settings['num_inference_steps']} ODE steps, guidance {settings['true_cfg_scale']:g}"
    )
    if summary["num_invalid"]:
        yield f"warning: {summary['num_invalid']} pictures have no valid reward and are left out of the means"
    parts = list(summary["parts"])
    titles, kinds = ["reward", *parts], ["all", *summary["categories"]]
    wide = [max(len(title), 7) for title in titles]
    first = max(len(kind) for kind in kinds)
    yield "  ".join([" " * first, "prompts", *(title.rjust(w) for title, w in zip(titles, wide, strict=True))])
    for kind, means in [("all", summary), *summary["categories"].items()]:
        values = [means["reward"], *(means["parts"].get(part) for part in parts)]
        cells = [("-" if value is None else f"{value:.4f}").rjust(w) for value, w in zip(values, wide, strict=True)]
        yield "  ".join([kind.ljust(first), str(means["num_prompts"]).rjust(7), *cells])


def _check_can_score(saved: SavedModel, *, has_judge: bool) -> None:
    if saved.run is None and not has_judge:
        raise ConfigError(
            f"{saved.source!r} is a model, and says nothing of rewards.",
            why="A run's recipe names the rewards and the prompts; a model has no recipe.",
            fix="Give one: --recipe quickstart.",
        )
    if saved.held_out is None:
        raise ConfigError(
            "There are no prompts to evaluate on.",
            why="The recipe has no eval section, and training prompts would flatter.",
            fix="Give a file: --prompts builtin:shapes/heldout.jsonl.",
        )


def _evaluate(saved: SavedModel, prompts: Sequence[Prompt], rewards: Any) -> tuple[NDArray[np.uint8], Rewards]:
    """Images [N, H, W, 3] or videos [N, F, H, W, 3], and rewards, by the very evaluator that runs during training."""
    from digenrl.runtime.saved_run import load_model
    from digenrl.workers.evaluator import Evaluator
    from digenrl.workers.scorer import ScoredBatch, Scorer

    kept: list[ScoredBatch] = []

    class KeepingScorer(Scorer):
        """Keeps every sample's rewards, of which an Evaluation has the means alone."""

        def score(self, *arguments: Any) -> ScoredBatch:
            kept.append(super().score(*arguments))
            return kept[-1]

    opened = load_model(saved)
    rollout = saved.recipe.rollout
    scorer = KeepingScorer(opened.adapter, rewards, forward_batch_size=rollout.forward_batch_size, fps=rollout.fps)
    # No average: the policy holds the weights that were asked for already.
    evaluation = Evaluator(opened.policy, None, scorer, saved.recipe, saved.section, prompts).evaluate()
    (batch,) = kept
    return evaluation.images, batch.rewards


def _means(scored: Rewards, rows: NDArray[np.bool_]) -> dict[str, Any]:
    totals = scored.totals[rows]
    valid = np.isfinite(totals)
    return {
        "num_prompts": len(totals),
        "num_invalid": int((~valid).sum()),
        "reward": _mean(totals),
        "parts": {name: _mean(values[rows]) for name, values in scored.parts.items()},
    }


def _mean(values: NDArray[np.float64]) -> float | None:
    valid = values[np.isfinite(values)]
    return float(valid.mean()) if valid.size else None


def _write(folder: Path, prompts: Sequence[Prompt], scored: Rewards, summary: Mapping[str, Any]) -> None:
    field, categories = categories_of(prompts)
    with (folder / "scores.jsonl").open("w", encoding="utf-8") as file:
        for index, prompt in enumerate(prompts):
            row: dict[str, Any] = {"index": index, "prompt": prompt.text}
            if field is not None:
                row[field] = categories[index]
            row["reward"] = _plain(scored.totals[index])
            row["rewards"] = {name: _plain(values[index]) for name, values in scored.parts.items()}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def _sheet(images: NDArray[np.uint8], prompts: Sequence[Prompt], scored: Rewards, summary: Mapping[str, Any], name: str) -> Any:
    from digenrl.metrics.sheet import contact_sheet

    scores = [f"{total:.3f}" if math.isfinite(total) else "invalid" for total in scored.totals]
    mean = "-" if summary["reward"] is None else f"{summary['reward']:.3f}"
    title = f"reward {mean} on {len(prompts)} prompts: {name}"
    return contact_sheet(images, [prompt.text for prompt in prompts], scores, title=title)


def _videos(videos: NDArray[np.uint8], folder: Path, fps: float) -> None:
    from digenrl.metrics.sheet import chosen_rows
    from digenrl.metrics.video import save_video

    folder.mkdir()
    for index in chosen_rows(len(videos)):
        save_video(folder / f"prompt-{index:03d}.mp4", videos[index], fps)


def _plain(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
