"""Wan and HunyuanVideo against diffusers' own pipelines, and what training needs of them. float32, CPU, one thread."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from digenrl.cli import export
from digenrl.config.checks import check_recipe
from digenrl.config.registry import component_class, media_of
from digenrl.config.schema import Recipe
from digenrl.diffusion.dynamics import ODE
from digenrl.diffusion.noise import initial_latents
from digenrl.diffusion.sampler import StepPlan, denoise
from digenrl.errors import ConfigError
from digenrl.ids import SampleId
from digenrl.models.base import Guidance, ModelAdapter, Part
from digenrl.models.loading import own_memory
from digenrl.testing.model_contract import check_model
from digenrl.testing.tiny_runs import build_run
from digenrl.testing.tiny_videos import build_hunyuan_video, build_wan

RecipeMaker = Callable[..., Recipe]
CPU = torch.device("cpu")
FAMILIES = ("wan", "hunyuan_video")
PIPELINES = {"wan": "WanPipeline", "hunyuan_video": "HunyuanVideoPipeline"}
PROMPT, NEGATIVE = "a red cat 猫 <jumps>", "blurred"


def load(recipe: Recipe, parts: frozenset[Part] | None = None) -> ModelAdapter:
    adapter_class = component_class("model", recipe.model.type, where="test")
    adapter: ModelAdapter = adapter_class.load(recipe, CPU) if parts is None else adapter_class.load(recipe, CPU, parts)
    return adapter


def guidance_of(family: str, cfg: float) -> Guidance:
    return Guidance(cfg, 6.018 if family == "hunyuan_video" else None)


def ode(adapter: ModelAdapter, recipe: Recipe, guidance: Guidance) -> tuple[Tensor, Tensor]:
    """Initial and final latents of one prompt, one sample in a pass."""
    rollout = recipe.rollout
    shape = adapter.latent_shape(rollout.height, rollout.width, rollout.num_frames)
    initial = initial_latents([SampleId(0, 0, 0)], shape, seed=0, same_in_group=False)
    text = adapter.encode_prompts([PROMPT], [NEGATIVE])

    def predict(latents: Tensor, timesteps: Tensor, rows: Tensor) -> Tensor:
        return adapter.predict(latents, timesteps, text.select(rows), guidance)

    plan = StepPlan(noise_levels=torch.zeros(1, 4), trained=torch.empty(1, 0, dtype=torch.int64))
    schedule = adapter.noise_schedule(4, rollout.height, rollout.width)

    def no_noise(_step: int, _rows: Tensor) -> Tensor:
        raise AssertionError("the ODE draws no noise")

    return initial, denoise(predict, initial, schedule, plan, ODE(), no_noise, forward_batch_size=1).final_latents


def plain_pipeline(family: str, folder: Path) -> Any:
    """Loaded by diffusers alone; for Wan on the grid that is sampled on here."""
    pipeline = getattr(diffusers, PIPELINES[family]).from_pretrained(str(folder), dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    if family == "wan":
        pipeline.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=pipeline.scheduler.config.flow_shift)
    for component in pipeline.components.values():
        if isinstance(component, nn.Module):
            own_memory(component.requires_grad_(False))  # memory-mapped weights lie at odd addresses: other last bits
    return pipeline


@pytest.mark.parametrize("cfg", [1.0, 4.5])
@pytest.mark.parametrize(("height", "width", "num_frames"), [(32, 32, 9), (48, 32, 5), (32, 64, 1)])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_ode_loop_and_the_decoder_are_the_pipelines_bit_for_bit(
    family: str, height: int, width: int, num_frames: int, cfg: float, video_recipe: RecipeMaker
) -> None:
    size = {"height": height, "width": width, "num_frames": num_frames}
    recipe = video_recipe(family, rollout={**size, "true_cfg_scale": cfg})
    adapter = load(recipe)
    initial, ours = ode(adapter, recipe, guidance_of(family, cfg))
    pipeline = plain_pipeline(family, Path(recipe.model.path))
    embedded = {"true_cfg_scale": cfg, "guidance_scale": 6.018} if family == "hunyuan_video" else {"guidance_scale": cfg}
    call = {**size, **embedded, "prompt": PROMPT, "negative_prompt": NEGATIVE, "num_inference_steps": 4}
    call["max_sequence_length"] = 32
    theirs = pipeline(**call, latents=initial.clone(), output_type="latent").frames
    assert torch.equal(ours, theirs)
    assert float((ours - initial).abs().mean()) > 0.1
    frames = pipeline(**call, latents=initial.clone(), output_type="pt").frames
    decoded = adapter.decode(ours)
    assert decoded.shape == ((1, num_frames, 3, height, width) if num_frames > 1 else (1, 3, height, width))
    assert torch.equal(decoded if num_frames > 1 else decoded[:, None], frames)
    assert float(frames.std()) > 0.02


@pytest.mark.parametrize("shift", [None, 5.0])
@pytest.mark.parametrize("family", FAMILIES)
def test_sigmas_are_those_of_the_flow_match_scheduler_with_the_folders_shift_or_the_recipes(
    family: str, shift: float | None, video_recipe: RecipeMaker
) -> None:
    adapter = load(video_recipe(family, model={"flow_shift": shift}), frozenset())
    schedule = adapter.noise_schedule(16, 480, 832)
    wanted = shift or {"wan": 3.0, "hunyuan_video": 7.0}[family]
    theirs = diffusers.FlowMatchEulerDiscreteScheduler(shift=wanted)
    if family == "wan":
        theirs.set_timesteps(16)
    else:
        theirs.set_timesteps(sigmas=np.linspace(1.0, 0.0, 17)[:-1])
    assert torch.equal(schedule.sigmas, theirs.sigmas)
    assert torch.equal(schedule.timesteps, theirs.timesteps)
    assert float(schedule.sigmas[0]) == 1.0, "the guard at sigma 1 is taken"


def test_a_wan_folder_with_the_euler_scheduler_has_the_grid_of_the_published_one(
    tmp_path: Path, video_recipe: RecipeMaker
) -> None:
    folder = build_wan(tmp_path / "euler", noise_scheduler="euler")
    ours, published = (load(video_recipe("wan", model=m), frozenset()) for m in ({"path": str(folder)}, {}))
    assert torch.equal(ours.noise_schedule(5, 32, 32).sigmas, published.noise_schedule(5, 32, 32).sigmas)


@pytest.mark.parametrize("cfg", [1.0, 2.0])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_of_mixed_timesteps_has_the_gradient_of_one_by_one(family: str, cfg: float, video_recipe: RecipeMaker) -> None:
    recipe = video_recipe(family, rollout={"true_cfg_scale": cfg})
    adapter, guidance = load(recipe), guidance_of(family, cfg)
    network = adapter.transformer.requires_grad_(True)
    latents = torch.randn(4, *adapter.latent_shape(32, 32, 5), generator=torch.Generator().manual_seed(0))
    goal = torch.randn(latents.shape, generator=torch.Generator().manual_seed(1))
    timesteps = torch.tensor([1000.0, 913.3, 500.0, 8.9])
    text = adapter.encode_prompts([PROMPT, ""], [NEGATIVE, ""]).select(torch.tensor([0, 1, 1, 0]))

    def gradient(batches: list[list[int]]) -> dict[str, Tensor]:
        network.zero_grad()
        for batch in batches:
            rows = torch.tensor(batch)
            velocity = adapter.predict(latents[rows], timesteps[rows], text.select(rows), guidance)
            (velocity - goal[rows]).square().mean((1, 2, 3, 4)).sum().backward()
        return {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}

    together, alone = gradient([[0, 1, 2, 3]]), gradient([[0], [1], [2], [3]])
    norm = sum(float(g.square().sum()) for g in alone.values()) ** 0.5
    distance = sum(float((together[name] - g).square().sum()) for name, g in alone.items()) ** 0.5
    assert distance / norm <= 1e-5
    assert set(together) == set(alone) == {name for name, _ in network.named_parameters()}


def test_wan_reads_prompts_with_blanks_put_in_order_and_does_not_call_them_cut(video_recipe: RecipeMaker) -> None:
    adapter = load(video_recipe("wan"))
    text = adapter.encode_prompts(["a   cat &amp;  a dog" + " " * 60, "a cat & a dog"], ["", ""]).tensors["prompt_embeds"]
    assert torch.equal(text[0], text[1])
    assert not adapter.truncated_prompts


def test_wan_keeps_its_small_layers_in_float32_when_the_frozen_ones_are_bfloat16(video_recipe: RecipeMaker) -> None:
    recipe = video_recipe("wan", model={"dtype": "bfloat16", "lora": {"rank": 2, "alpha": 4}})
    adapter, whole = load(recipe), load(video_recipe("wan"))
    ours, theirs = dict(adapter.transformer.named_parameters()), dict(whole.transformer.named_parameters())
    kept = {name for name, parameter in ours.items() if parameter.dtype == torch.float32}
    assert {"scale_shift_table", "blocks.0.norm2.weight"} <= kept
    assert "blocks.0.attn1.to_q.weight" not in kept
    assert all(torch.equal(ours[name], theirs[name]) for name in kept)
    latents = torch.randn(1, *adapter.latent_shape(32, 32, 5), generator=torch.Generator().manual_seed(0))
    text = adapter.encode_prompts([PROMPT], [""])
    with torch.no_grad():
        low = adapter.predict(latents, torch.tensor([500.0]), text, Guidance())
        high = whole.predict(latents, torch.tensor([500.0]), whole.encode_prompts([PROMPT], [""]), Guidance())
    assert low.dtype == torch.float32
    assert float((low - high).abs().mean() / high.abs().mean()) < 0.05


@pytest.mark.parametrize("family", FAMILIES)
def test_an_exported_pipeline_keeps_the_solver_that_the_folder_names_with_the_shift_that_was_trained(
    family: str, video_recipe: RecipeMaker, tmp_path: Path
) -> None:
    build_run(tmp_path / "run", video_recipe(family, model={"flow_shift": 5.0}))
    export.run(str(tmp_path / "run"), str(tmp_path / "out"))
    scheduler = getattr(diffusers, PIPELINES[family]).from_pretrained(str(tmp_path / "out")).scheduler
    assert type(scheduler).__name__ == {"wan": "UniPCMultistepScheduler"}.get(family, "FlowMatchEulerDiscreteScheduler")
    assert scheduler.config["flow_shift" if family == "wan" else "shift"] == 5.0


@pytest.mark.parametrize("num_frames", [1, 5])
@pytest.mark.parametrize(("family", "lora"), [("wan", None), ("wan", {"rank": 2, "alpha": 8}), ("hunyuan_video", None)])
def test_the_code_on_the_card_draws_on_the_grid_that_was_trained(
    family: str,
    lora: dict[str, Any] | None,
    num_frames: int,
    video_recipe: RecipeMaker,
    tiny_videos: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    evaluation = {"prompts": "builtin:shapes/heldout.jsonl", "num_inference_steps": 2}
    model = {"lora": lora, "flow_shift": 5.0 if lora else None, "max_sequence_length": 64}
    build_run(tmp_path / "run", video_recipe(family, model=model, rollout={"num_frames": num_frames}, eval=evaluation))
    export.run(str(tmp_path / "run"), str(tmp_path / "out"))
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert f"pipeline_tag: text-to-{'video' if num_frames > 1 else 'image'}" in card
    code = card.partition("```python\n")[2].partition("```")[0]
    base = tiny_videos[family]
    code = code.replace(f"base = {base.name!r}  # the folder of the base model", f"base = {str(base)!r}")
    monkeypatch.chdir(tmp_path / "out")
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    assert np.asarray(names["video"][0]).shape[:2] == (32, 32)
    assert len(names["video"]) == num_frames
    scheduler = names["pipeline"].scheduler
    assert type(scheduler).__name__ == "FlowMatchEulerDiscreteScheduler"
    assert scheduler.config.shift == (5.0 if lora else {"wan": 3.0, "hunyuan_video": 7.0}[family])


@pytest.mark.parametrize("family", FAMILIES)
def test_videos_pass_the_contract_with_guidance_by_a_second_pass(family: str, video_recipe: RecipeMaker) -> None:
    check_model(video_recipe(family, rollout={"num_frames": 5, "true_cfg_scale": 2.0}))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"height": 40}, "rollout.height (40) is not a multiple of 16"),
        ({"num_frames": 8}, "rollout.num_frames (8) is not 1 more than a multiple of 4"),
        ({"num_frames": 8}, "Use rollout.num_frames=9"),
        ({"num_frames": 6}, "Use rollout.num_frames=5"),
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_that_the_model_cannot_make_are_refused_with_the_nearest_that_it_can(
    family: str, changes: dict[str, Any], says: str, video_recipe: RecipeMaker
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_recipe(video_recipe(family, rollout=changes))
    assert says in str(caught.value)


def test_guidance_of_the_wrong_kind_is_refused_where_the_network_takes_none(tmp_path: Path, video_recipe: RecipeMaker) -> None:
    with pytest.raises(ConfigError, match=r"true_cfg_scale=4\.5"):
        check_recipe(video_recipe("wan", rollout={"guidance_scale": 4.5}))
    check_recipe(video_recipe("hunyuan_video", rollout={"guidance_scale": 6.0}))
    undistilled = build_hunyuan_video(tmp_path / "undistilled", guidance_embeds=False)
    with pytest.raises(ConfigError, match="true_cfg_scale=6"):
        check_recipe(video_recipe("hunyuan_video", model={"path": str(undistilled)}, rollout={"guidance_scale": 6.0}))


def edited(folder: Path, target: Path, file: str, **changes: Any) -> str:
    copy = Path(shutil.copytree(folder, target))
    content = json.loads((copy / file).read_text(encoding="utf-8"))
    (copy / file).write_text(json.dumps(content | changes), encoding="utf-8")
    return str(copy)


def test_wan22_and_too_many_positions_are_refused(
    tmp_path: Path, tiny_videos: dict[str, Path], video_recipe: RecipeMaker
) -> None:
    newer = edited(tiny_videos["wan"], tmp_path / "newer", "model_index.json", expand_timesteps=True)
    with pytest.raises(ConfigError, match=r"Wan2\.2"):
        load(video_recipe("wan", model={"path": newer}), frozenset())
    with pytest.raises(ConfigError, match=r"rollout\.height \(512\) is more than this model has positions for"):
        load(video_recipe("wan", rollout={"height": 512}), frozenset())
    with pytest.raises(ConfigError, match=r"rollout\.num_frames \(81\) is more"):
        load(video_recipe("wan", rollout={"num_frames": 81}), frozenset())


def test_a_template_that_would_hide_the_prompt_is_refused(video_recipe: RecipeMaker) -> None:
    template = {"template": "Describe: {}<|eot_id|>", "crop_start": 95}
    with pytest.raises(ConfigError, match="its instructions are 11 tokens, and 95 are cut off"):
        load(video_recipe("hunyuan_video", model={"prompt_template": template}))
    adapter = load(video_recipe("hunyuan_video", model={"prompt_template": {**template, "crop_start": 11}}))
    text = adapter.encode_prompts(["a cat", "a dog"], ["", ""]).tensors
    assert text["prompt_attention_mask"].sum(1).tolist() == [6.0, 6.0]
    assert not torch.equal(text["prompt_embeds"][0, :5], text["prompt_embeds"][1, :5])
    with pytest.raises(ConfigError, match=r"exactly one \{\}"):
        video_recipe("hunyuan_video", model={"prompt_template": {"template": "no place", "crop_start": 0}})


@pytest.mark.parametrize("kind", ["model", "reward"])
def test_the_registry_says_of_each_component_what_its_class_says_it_handles(kind: str) -> None:
    from digenrl.config.registry import KINDS

    for name in KINDS[kind]:
        own = getattr(component_class(kind, name, where="test"), "media", ("image",))
        assert media_of(kind, name, where="test") == own
