"""The shipped recipes of videos, with tiny models in the place of the weights: checked, trained for two steps, drawn from."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from digenrl.cli import check, evaluate, sample
from digenrl.config.loader import load_recipe
from digenrl.config.schema import Recipe
from digenrl.errors import ConfigError
from digenrl.metrics.log import read_metrics
from digenrl.runtime.train import train

RECIPES = Path(__file__).parents[2] / "recipes"
FAMILY = {
    "wan21_1_3b_flow_grpo": "wan",
    "wan21_14b_flow_grpo": "wan",
    "hunyuanvideo_dance_grpo": "hunyuan_video",
}
SMALL = (
    "run.device=cpu",
    "cluster.placement=inline",
    "rollout.prompts_per_step=2",
    "rollout.num_generations=3",
    "rollout.num_inference_steps=5",
    "rollout.height=32",
    "rollout.width=48",
    "rollout.num_frames=5",
    "model.max_sequence_length=64",
    "schedule.groups_per_micro_batch=1",
    "train.steps=2",
    "log.tensorboard=false",
)


def small(name: str, folders: dict[str, Path], *changes: str) -> Recipe:
    few = ("algorithm.best_of_n=2",) if name == "hunyuanvideo_dance_grpo" else ()
    return load_recipe(RECIPES / f"{name}.yaml", [*SMALL, *few, f"model.path={folders[FAMILY[name]]}", *changes])


@pytest.mark.parametrize("name", FAMILY)
def test_a_recipe_passes_the_check_as_it_is_and_with_a_tiny_model(
    name: str, tiny_videos: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    check.run(str(RECIPES / f"{name}.yaml"), [], as_json=False)
    assert "warning" not in capsys.readouterr().out
    check.run(str(RECIPES / f"{name}.yaml"), [f"model.path={tiny_videos[FAMILY[name]]}"], as_json=False)
    assert capsys.readouterr().out.endswith("ok\n")


@pytest.mark.parametrize(
    ("name", "steps", "trained", "what"),
    [
        ("wan21_1_3b_flow_grpo", 20, 19, {"lr": 1e-4, "clip": 1e-3, "cfg": 4.5, "rank": 32, "noise": 0.7}),
        ("wan21_14b_flow_grpo", 10, 1, {"lr": 1e-4, "clip": 1e-4, "cfg": 5.0, "rank": 64, "noise": 0.9}),
        ("hunyuanvideo_dance_grpo", 16, 9, {"lr": 1e-5, "clip": 1e-4, "cfg": 1.0, "rank": None, "noise": 0.25}),
    ],
)
def test_a_recipe_has_the_published_hyperparameters(name: str, steps: int, trained: int, what: dict[str, float | None]) -> None:
    recipe = load_recipe(RECIPES / f"{name}.yaml")
    algorithm = recipe.algorithm.settings
    assert recipe.rollout.num_inference_steps == steps
    assert algorithm.num_trained_steps(steps) == trained
    found = {
        "lr": recipe.train.learning_rate,
        "clip": algorithm.effective_clip_range[0],
        "cfg": recipe.rollout.true_cfg_scale,
        "rank": recipe.model.lora.rank if recipe.model.lora else None,
        "noise": recipe.rollout.noise_level,
    }
    assert found == what


@pytest.fixture(scope="module")
def runs(tiny_videos: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two steps of each recipe; of the smallest, with an evaluation. Read only."""
    folder = tmp_path_factory.mktemp("runs")
    held_out = folder / "held_out.txt"
    held_out.write_text("a red circle\ntwo blue squares\n", encoding="utf-8")
    for name in FAMILY:
        with_eval = [f"eval.prompts={held_out}", "eval.num_inference_steps=3", "eval.freq=0"]
        changes = with_eval if name == "wan21_1_3b_flow_grpo" else ["eval=null"]
        train(small(name, tiny_videos, f"run.output_dir={folder / name}", *changes))
    return {name: folder / name for name in FAMILY}


def size_of(path: Path) -> tuple[int, int]:
    with Image.open(path) as picture:
        return picture.size


def frames_of(path: Path) -> tuple[np.ndarray, float]:
    with av.open(str(path)) as container:
        rate = float(container.streams.video[0].average_rate)
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]), rate


@pytest.mark.parametrize("name", FAMILY)
def test_two_steps_train_and_leave_videos_that_play_with_an_index_and_a_picture_beside_each(
    name: str, runs: dict[str, Path]
) -> None:
    run = runs[name]
    steps = [row for row in read_metrics(run / "metrics.jsonl") if row["kind"] == "train"]
    assert len(steps) == 2
    assert all(row["grad_norm"] > 0 and row["reward_std"] > 0 for row in steps)
    # bfloat16: passes of the rollout and of training have one shape in these recipes, but for the tail of a group.
    assert all(row["logprob_abs_diff"] < 1e-3 for row in steps)
    rows = [json.loads(line) for line in (run / "samples/index.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len([row for row in rows if not row.get("held_out")]) == 12
    for row in rows:
        path = run / row["file"]
        assert path.suffix == ".mp4"
        assert hashlib.sha256(path.read_bytes()).hexdigest() == row["sha256"]
        frames, rate = frames_of(path)
        assert frames.shape == (5, 32, 48, 3)
        assert rate == (24 if name.startswith("hunyuan") else 16)
        assert size_of(path.with_suffix(".png")) == (4 * 48, 32)


def test_a_run_of_videos_is_drawn_from_and_evaluated_as_videos(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(runs["wan21_1_3b_flow_grpo"])
    sample.run(run, prompts=["a red circle"], num=2, out=str(tmp_path / "videos") + "/", num_frames=9, fps=8, steps=2)
    files = sorted(path.name for path in (tmp_path / "videos").iterdir())
    assert files == ["prompt-000-sample-000.mp4", "prompt-000-sample-001.mp4"]
    frames, rate = frames_of(tmp_path / "videos" / files[0])
    assert (frames.shape, rate) == ((9, 32, 48, 3), 8.0)
    with pytest.raises(ConfigError, match="is not an mp4 file"):
        sample.run(run, prompts=["a red circle"], out=str(tmp_path / "x.png"))
    sample.run(run, prompts=["a red circle"], out=str(tmp_path / "x.png"), num_frames=1, steps=2)
    assert size_of(tmp_path / "x.png") == (48, 32)
    evaluate.run(run, out=str(tmp_path / "scores"), as_json=True)
    summary = json.loads(capsys.readouterr().out.rpartition("\n{")[2].join(["{", ""]))
    assert summary["settings"]["num_frames"] == 5
    assert sorted(path.name for path in (tmp_path / "scores/videos").iterdir()) == ["prompt-000.mp4", "prompt-001.mp4"]
    assert size_of(tmp_path / "scores/sheet.png")[0] >= 320
