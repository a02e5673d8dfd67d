"""What has to hold for every model family, on tiny folders in float32: see tests/families.py for which they are."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor, nn

from digenrl.cli import export, sample
from digenrl.cli.check import inspect
from digenrl.config.checks import check_recipe
from digenrl.config.families import FAMILIES as FACTS
from digenrl.config.registry import component_class
from digenrl.config.schema import Recipe
from digenrl.diffusion.dynamics import ODE
from digenrl.diffusion.noise import initial_latents
from digenrl.diffusion.sampler import StepPlan, denoise
from digenrl.errors import ConfigError
from digenrl.ids import SampleId
from digenrl.models.base import Guidance, ModelAdapter, concatenate
from digenrl.models.loading import own_memory
from digenrl.runtime.model_recipe import recipe_of_model
from digenrl.runtime.saved_run import OpenOptions, open_model
from digenrl.testing import check_model
from digenrl.testing.tiny_runs import build_run
from tests.families import FAMILIES, IMAGES, FamilyCase

RecipeMaker = Callable[..., Recipe]
RigMaker = Callable[..., Any]
Folders = Callable[[str], Path]
CPU = torch.device("cpu")
LORA = {"rank": 3, "alpha": 12}
PROMPTS = ["a red circle", "two blue squares"]
SIZES = ((32, 32), (64, 48))
full_and_slowly_lora = pytest.mark.parametrize("lora", [None, pytest.param(LORA, marks=pytest.mark.slow)], ids=["full", "lora"])
every_family = pytest.mark.parametrize("case", FAMILIES, ids=lambda case: case.name)
every_image_family = pytest.mark.parametrize("case", IMAGES, ids=lambda case: case.name)


@pytest.fixture
def recipe_of(tiny_recipe: RecipeMaker, tiny_folder: Folders) -> Callable[..., Recipe]:
    def make(case: FamilyCase, path: Path | None = None, **more: Any) -> Recipe:
        return tiny_recipe(**case.sections(str(path or tiny_folder(case.name)), **more))

    return make


@pytest.fixture
def rig_of(make_rig: RigMaker, tiny_folder: Folders) -> Callable[..., Any]:
    def make(case: FamilyCase, **more: Any) -> Any:
        return make_rig(**case.sections(str(tiny_folder(case.name)), **more))

    return make


def load(recipe: Recipe) -> ModelAdapter:
    adapter: ModelAdapter = component_class("model", recipe.model.type, where="model.type").load(recipe, CPU)
    return adapter


def guidance_of(recipe: Recipe) -> Guidance:
    return Guidance(recipe.rollout.true_cfg_scale, recipe.rollout.guidance_scale)


def no_noise(_step: int, _rows: Tensor) -> Tensor:
    raise AssertionError("the ODE draws no noise")


def drawn(adapter: ModelAdapter, recipe: Recipe, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """First and final latents of PROMPTS, one in a pass."""
    shape = adapter.latent_shape(*size, recipe.rollout.num_frames)
    initial = initial_latents([SampleId(0, i, 0) for i in range(2)], shape, seed=0, same_in_group=False)
    text = concatenate([adapter.encode_prompts([prompt], ["ugly"]) for prompt in PROMPTS])

    def predict(latents: Tensor, timesteps: Tensor, rows: Tensor) -> Tensor:
        return adapter.predict(latents, timesteps, text.select(rows), guidance_of(recipe))

    plan = StepPlan(noise_levels=torch.zeros(2, 4), trained=torch.empty(2, 0, dtype=torch.int64))
    schedule = adapter.noise_schedule(4, *size)
    return initial, denoise(predict, initial, schedule, plan, ODE(), no_noise, forward_batch_size=1).final_latents


def plain_pipeline(case: FamilyCase, folder: Path) -> Any:
    """As diffusers loads it, with weights where ours are: memory that is aligned in another way gives other last bits."""
    pipeline = getattr(diffusers, case.pipeline).from_pretrained(str(folder), dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    for component in pipeline.components.values():
        if isinstance(component, nn.Module):
            own_memory(component.requires_grad_(False))
    return pipeline


@every_image_family
@pytest.mark.parametrize("cfg", [1.0, 3.0])
def test_the_ode_loop_the_sigmas_and_the_decoder_are_the_pipelines_bit_for_bit(
    cfg: float, case: FamilyCase, recipe_of: Callable[..., Recipe], tiny_folder: Folders
) -> None:
    recipe = recipe_of(case, rollout={"true_cfg_scale": cfg})
    adapter, pipeline = load(recipe), plain_pipeline(case, tiny_folder(case.name))
    for height, width in SIZES:
        initial, ours = drawn(adapter, recipe, (height, width))
        for row, prompt in enumerate(PROMPTS):
            arguments: dict[str, Any] = {
                "prompt": [prompt],
                "negative_prompt": ["ugly"],
                "height": height,
                "width": width,
                "num_inference_steps": 4,
                case.cfg_argument: cfg,
                **case.model,
                **case.call,
            }
            start = case.to_pipeline(initial[row : row + 1])
            theirs = pipeline(**arguments, latents=start.clone(), output_type="latent").images
            assert torch.equal(ours[row], case.from_pipeline(initial, theirs)[0])
            pictures = pipeline(**arguments, latents=start.clone(), output_type="pt").images
            assert torch.equal(adapter.decode(ours[row : row + 1]), pictures)
            assert pictures.shape == (1, 3, height, width)
        assert torch.equal(adapter.noise_schedule(4, height, width).sigmas, pipeline.scheduler.sigmas)
        assert float((ours - initial).abs().mean()) > 0.1


@pytest.mark.parametrize(("name", "grows"), [("flux", True), ("flux_schnell", False), ("qwen_image", True)])
def test_the_sigmas_shift_with_the_image_where_the_folder_says_so_and_a_fixed_shift_replaces_it(
    name: str, grows: bool, recipe_of: Callable[..., Recipe]
) -> None:
    case = next(case for case in IMAGES if case.name == name)
    small, large = (load(recipe_of(case)).noise_schedule(4, size, size).sigmas for size in (256, 512))
    assert torch.equal(small, large) != grows
    fixed = load(recipe_of(case, model={"flow_shift": 3.0}))
    tables = [fixed.noise_schedule(4, size, size).sigmas for size in (256, 512)]
    assert torch.equal(*tables)
    if name != "qwen_image":  # whose table is stretched to its end, too
        t = torch.tensor([1.0, 0.75, 0.5, 0.25])
        torch.testing.assert_close(tables[0][:4], 3 * t / (1 + 2 * t))


@pytest.mark.parametrize(
    ("name", "pixels", "mu"),
    [("flux", 512, 0.63), ("flux", 1024, 1.15), ("qwen_image", 512, 0.5387), ("qwen_image", 1024, 0.6935)],
)
def test_the_shift_at_real_sizes_is_the_published_one(
    name: str, pixels: int, mu: float, recipe_of: Callable[..., Recipe]
) -> None:
    case = next(case for case in IMAGES if case.name == name)
    sigmas = load(recipe_of(case)).noise_schedule(10, pixels, pixels).sigmas[:10].double()
    t = torch.linspace(1.0, 0.1, 10, dtype=torch.float64)
    wanted = torch.exp(torch.tensor(mu)) / (torch.exp(torch.tensor(mu)) + 1 / t - 1)
    if name == "qwen_image":
        wanted = 1 - (1 - wanted) * (1 - 0.02) / (1 - wanted[-1])
    torch.testing.assert_close(sigmas, wanted, rtol=0, atol=1e-4)  # mu is given to four digits


@every_family
def test_the_contract_of_adapters_holds(case: FamilyCase, recipe_of: Callable[..., Recipe]) -> None:
    check_model(recipe_of(case, rollout={"true_cfg_scale": 2.0}))


@every_family
@full_and_slowly_lora
def test_before_the_first_update_the_trainers_log_prob_is_the_rollouts_bit_for_bit(
    lora: dict[str, Any] | None, case: FamilyCase, rig_of: RigMaker
) -> None:
    rig = rig_of(case, model={"lora": lora}, rollout={"true_cfg_scale": 2.0}, train={"steps": 1, "timestep_batch_size": 3})
    rig.trainer.accumulate(rig.trajectory(), rig.conditioning(), rig.advantages([0, 1, 3], [2, 5, 1]))
    metrics = rig.trainer.optimizer_step().metrics
    assert (metrics["ratio_mean"], metrics["ratio_std"], metrics["logprob_abs_diff"]) == (1.0, 0.0, 0.0)
    assert metrics["trained_pairs"] == 18


def gradient(rig: Any, trajectory: Any) -> dict[str, Tensor]:
    rig.trainer.accumulate(trajectory, rig.conditioning(), rig.advantages([0, 1, 3], [2, 5, 1]))
    found: dict[str, Tensor] = rig.gradient()
    return found


def relative(ours: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    flat = [torch.cat([tensors[name].flatten() for name in wanted]).double() for tensors in (ours, wanted)]
    return float((flat[0] - flat[1]).norm() / flat[1].norm())


@every_family
@full_and_slowly_lora
def test_mixed_timesteps_in_a_batch_give_the_gradient_of_one_by_one(
    lora: dict[str, Any] | None, case: FamilyCase, rig_of: RigMaker
) -> None:
    rigs = [
        rig_of(case, model={"lora": lora}, rollout={"true_cfg_scale": 2.0}, train={"steps": 1, "timestep_batch_size": size})
        for size in (1, "all")
    ]
    trajectory = rigs[0].trajectory()
    one_by_one, together = (gradient(rig, trajectory) for rig in rigs)
    assert relative(together, one_by_one) <= 1e-5


@every_family
def test_every_weight_has_a_finite_gradient_but_the_ones_that_reach_nothing(case: FamilyCase, rig_of: RigMaker) -> None:
    rig = rig_of(case, rollout={"true_cfg_scale": 2.0})
    found = gradient(rig, rig.trajectory())
    assert all(bool(torch.isfinite(each).all()) for each in found.values())
    largest = max(float(each.abs().max()) for each in found.values())
    without = {name for name, each in found.items() if float(each.abs().max()) < 1e-7 * largest}
    assert without <= {name for name in found if name.startswith(case.never_trained)} if case.never_trained else not without
    assert rig.trainer.optimizer_step().outcome == "applied"


@every_family
@pytest.mark.parametrize("checkpointing", [False, True])
def test_every_adapter_changes_in_one_step_and_its_base_does_not(checkpointing: bool, case: FamilyCase, rig_of: RigMaker) -> None:
    rig = rig_of(case, model={"lora": LORA, "gradient_checkpointing": checkpointing})
    everything = dict(rig.adapter.transformer.named_parameters())
    before = {name: parameter.detach().clone() for name, parameter in everything.items()}
    gradient(rig, rig.trajectory())
    rig.trainer.optimizer_step()
    changed = {name for name, parameter in everything.items() if not torch.equal(parameter, before[name])}
    lora_b = {name for name in everything if "lora_B" in name}
    stuck = {name for name in lora_b if case.never_trained and name.startswith(case.never_trained)}
    assert changed & lora_b == lora_b - stuck
    assert all("lora_" in name for name in changed)


@every_family
def test_checkpointing_changes_no_gradient(case: FamilyCase, rig_of: RigMaker) -> None:
    rigs = [rig_of(case, model={"lora": LORA, "gradient_checkpointing": on}) for on in (False, True)]
    trajectory = rigs[0].trajectory()
    without, with_it = (gradient(rig, trajectory) for rig in rigs)
    assert relative(with_it, without) <= 1e-6


@every_family
def test_any_text_is_encoded_the_same_in_every_company_and_what_is_cut_is_told(
    case: FamilyCase, recipe_of: Callable[..., Recipe]
) -> None:
    odd = ["", "a red circle", "李明 画 🦊", "{curly} % <|im_end|>", "a red circle", "very long " * 300]
    adapter = load(recipe_of(case))
    together = adapter.encode_prompts(odd, [""] * 6).tensors
    turned = adapter.encode_prompts(odd[::-1], [""] * 6).tensors
    for name, tensor in together.items():
        assert bool(torch.isfinite(tensor.float()).all())
        assert torch.equal(tensor, turned[name].flip(0))
        assert torch.equal(tensor[1], tensor[4])
        assert tensor.dtype == turned[name].dtype
    assert adapter.truncated_prompts == {odd[5]}


@every_family
@pytest.mark.parametrize("lora", [None, LORA])
def test_plain_diffusers_reproduces_an_exported_trainer_and_not_the_base(
    lora: dict[str, Any] | None, case: FamilyCase, recipe_of: Callable[..., Recipe], tmp_path: Path, tiny_folder: Folders
) -> None:
    run = build_run(tmp_path / "run", recipe_of(case, model={"lora": lora}))
    export.run(str(run), str(tmp_path / "out"))
    adapter = open_model(str(run), OpenOptions()).adapter
    base = tiny_folder(case.name)
    exported = plain_pipeline(case, base if lora else tmp_path / "out")
    if lora:
        exported.load_lora_weights(str(tmp_path / "out"))
    trained, loaded, untrained = (
        velocity(adapter, case, recipe_of(case), network)
        for network in (adapter.transformer, exported.transformer, plain_pipeline(case, base).transformer)
    )
    assert float((loaded - trained).abs().max()) <= 1e-6  # the issue's; alpha is four times the rank
    assert float((untrained - trained).abs().max()) > 1e-2


@every_image_family
def test_a_bare_model_is_drawn_from_without_a_recipe(case: FamilyCase, tiny_folder: Folders, tmp_path: Path) -> None:
    folder = str(tiny_folder(case.name))
    sample.run(folder, prompts=["a red circle"], out=str(tmp_path / "x.png"), steps=2, height=32, width=48, true_cfg_scale=2.0)
    assert (tmp_path / "x.png").is_file()
    assert recipe_of_model(folder, height=None, width=None).rollout.height == (64 if case.type == "sd3" else 1024)


@every_image_family
@pytest.mark.parametrize(("lora", "cfg"), [(None, 1.0), (LORA, 3.0)])
def test_the_code_on_the_card_of_an_export_draws_what_the_run_evaluates_with(
    cfg: float,
    lora: dict[str, Any] | None,
    case: FamilyCase,
    recipe_of: Callable[..., Recipe],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tiny_folder: Folders,
) -> None:
    guidance = case.rollout.get("guidance_scale")
    evaluation = {"prompts": "builtin:shapes/heldout.jsonl", "true_cfg_scale": cfg, "guidance_scale": guidance}
    recipe = recipe_of(case, model={"lora": lora}, eval={**evaluation, "num_inference_steps": 2})
    export.run(str(build_run(tmp_path / "run", recipe)), str(tmp_path / "out"))
    base = tiny_folder(case.name)
    code = (tmp_path / "out" / "README.md").read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
    code = code.replace(f"base = {base.name!r}  # the folder of the base model", f"base = {str(base)!r}")
    monkeypatch.chdir(tmp_path / "out")
    calls: list[dict[str, Any]] = []
    pipeline_class = getattr(diffusers, case.pipeline)
    original = pipeline_class.__call__

    def recorded(self: Any, *arguments: Any, **keys: Any) -> Any:
        calls.append(keys)
        return original(self, *arguments, **keys)

    monkeypatch.setattr(pipeline_class, "__call__", recorded)
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["image"].size == (32, 32)
    assert calls[0].get("guidance_scale") == (cfg if case.cfg_argument == "guidance_scale" else guidance)
    assert calls[0].get("true_cfg_scale", 1.0) == (1.0 if case.cfg_argument == "guidance_scale" else cfg)


@torch.no_grad()
def velocity(adapter: ModelAdapter, case: FamilyCase, recipe: Recipe, network: nn.Module) -> Tensor:
    """By the adapter, with this network in it; at times and a guidance that bfloat16 has, which it rounds by up to 4 of 1000."""
    text = adapter.encode_prompts(PROMPTS, ["", ""])
    latents = torch.randn(2, *adapter.latent_shape(32, 32, recipe.rollout.num_frames), generator=torch.Generator().manual_seed(0))
    kept, adapter.transformer = adapter.transformer, network
    try:
        return adapter.predict(latents, torch.tensor([500.0, 250.0]), text, Guidance(1.0, 2.0))
    finally:
        adapter.transformer = kept


@every_family
@pytest.mark.parametrize("option", ["offload", "vae_tiling", "vae_slicing"])
def test_options_that_save_memory_keep_the_numbers_of_images_that_fit(
    option: str, case: FamilyCase, recipe_of: Callable[..., Recipe]
) -> None:
    plain, saving = (load(recipe_of(case, model=model)) for model in ({}, {option: True}))
    ours, wanted = (adapter.encode_prompts(PROMPTS, ["", ""]).tensors for adapter in (saving, plain))
    assert all(torch.equal(ours[name], wanted[name]) for name in wanted)
    latents = torch.randn(2, *plain.latent_shape(32, 32), generator=torch.Generator().manual_seed(0))
    # Slices are batches of one, and the shape of a batch has its part in the last bits.
    torch.testing.assert_close(saving.decode(latents), plain.decode(latents), rtol=0, atol=1e-5 if option == "vae_slicing" else 0)


@every_family
def test_offloaded_parts_are_on_the_device_only_while_they_are_used(
    case: FamilyCase, recipe_of: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(case, model={"offload": True})
    adapter = load(recipe)
    moves: list[tuple[str, str]] = []

    def recorded(self: nn.Module, place: Any) -> nn.Module:
        moves.append((type(self).__name__, str(place)))
        return self

    monkeypatch.setattr(adapter, "device", torch.device("meta"))  # in the place of a GPU: nothing is computed there
    monkeypatch.setattr(nn.Module, "to", recorded)
    for use in (lambda: adapter.encode_prompts(PROMPTS, ["", ""]), lambda: adapter.decode(torch.zeros(1, 1))):
        moves.clear()
        with suppress(RuntimeError, NotImplementedError, ValueError, IndexError):
            use()
        there = [name for name, place in moves if place == "meta"]
        back = [name for name, place in moves if place == "cpu"]
        assert there == back != []


@every_image_family
@pytest.mark.parametrize(
    ("side", "pixels", "sizes"), [("height", 40, "32 or 48"), ("width", 8, "16"), ("height", 33, "32 or 48")]
)
def test_a_size_that_does_not_divide_into_patches_is_refused_with_those_that_do(
    side: str, pixels: int, sizes: str, case: FamilyCase, recipe_of: Callable[..., Recipe]
) -> None:
    with pytest.raises(ConfigError, match=rf"rollout\.{side} \({pixels}\) is not a multiple of 16") as caught:
        check_recipe(recipe_of(case, rollout={side: pixels}))
    assert f"rollout.{side}={sizes}" in caught.value.fix


@pytest.fixture
def damaged(tmp_path: Path, tiny_folder: Folders) -> Callable[..., Path]:
    """A function that copies a family's folder, changes keys of one of its JSON files, and returns the copy."""

    def change(case: FamilyCase, file: str, **changes: Any) -> Path:
        folder = Path(shutil.copytree(tiny_folder(case.name), tmp_path / case.name, dirs_exist_ok=True))
        content = json.loads((folder / file).read_text(encoding="utf-8"))
        (folder / file).write_text(json.dumps(content | changes), encoding="utf-8")
        return folder

    return change


@every_family
def test_a_transformer_that_takes_other_channels_than_the_vae_makes_is_refused(
    case: FamilyCase, damaged: Callable[..., Path], recipe_of: Callable[..., Recipe]
) -> None:
    folder = damaged(case, "transformer/config.json", in_channels=12)
    with pytest.raises(ConfigError, match="the transformer takes 12 channels, and the VAE makes 4"):
        check_recipe(recipe_of(case, folder))


@every_family
def test_a_transformer_that_takes_text_of_another_width_than_the_encoders_make_is_refused(
    case: FamilyCase, damaged: Callable[..., Path], recipe_of: Callable[..., Recipe]
) -> None:
    for key in FACTS[case.type].text_widths:
        folder = damaged(case, "transformer/config.json", **{key: 24})
        with pytest.raises(ConfigError, match=rf"takes text of width 24 \({key}\)"):
            check_recipe(recipe_of(case, folder))
        shutil.rmtree(folder)
    assert FACTS[case.type].text_widths


@every_family
def test_a_folder_of_another_family_is_refused_by_both_names(
    case: FamilyCase, recipe_of: Callable[..., Recipe], tiny_folder: Folders
) -> None:
    other = next(each for each in FAMILIES if each.pipeline != case.pipeline)
    with pytest.raises(ConfigError, match=f"holds a {other.pipeline}, and model.type needs a {case.pipeline}"):
        check_recipe(recipe_of(case, tiny_folder(other.name)))


@every_family
@pytest.mark.parametrize("component", ["transformer", "vae", "scheduler", "text_encoder", "tokenizer"])
def test_a_missing_component_is_named(
    component: str, case: FamilyCase, damaged: Callable[..., Path], recipe_of: Callable[..., Recipe]
) -> None:
    folder = damaged(case, "model_index.json")
    shutil.rmtree(folder / component)
    with pytest.raises(ConfigError, match=f"has no component '{component}'"):
        check_recipe(recipe_of(case, folder))


@every_family
def test_one_denoising_step_is_refused_or_draws_something_finite(case: FamilyCase, recipe_of: Callable[..., Recipe]) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.num_inference_steps"):
        check_recipe(recipe_of(case, rollout={"num_inference_steps": 1}))
    adapter = load(recipe_of(case))
    if case.type == "qwen_image":
        with pytest.raises(ConfigError, match="1 denoising step is not defined"):
            adapter.noise_schedule(1, 32, 32)
    else:
        assert torch.equal(adapter.noise_schedule(1, 32, 32).sigmas, torch.tensor([1.0, 0.0]))


def test_an_evaluation_in_one_step_is_refused_where_the_schedule_has_none(recipe_of: Callable[..., Recipe]) -> None:
    qwen, sd3 = (next(case for case in IMAGES if case.name == name) for name in ("qwen_image", "sd3"))
    evaluation = {"prompts": "builtin:shapes/heldout.jsonl", "num_inference_steps": 1}
    check_recipe(recipe_of(sd3, eval=evaluation))
    with pytest.raises(ConfigError, match=r"eval\.num_inference_steps.*1 step is not defined"):
        check_recipe(recipe_of(qwen, eval=evaluation))


@pytest.mark.parametrize(("name", "takes_it"), [("sd3", False), ("flux", True), ("flux_schnell", False), ("qwen_image", False)])
@pytest.mark.parametrize("section", ["rollout", "eval"])
def test_embedded_guidance_is_taken_by_distilled_models_and_refused_by_others_with_the_key_that_is_meant(
    section: str, name: str, takes_it: bool, recipe_of: Callable[..., Recipe]
) -> None:
    case = next(case for case in IMAGES if case.name == name)
    keys: dict[str, Any] = {"eval": {"prompts": "builtin:shapes/heldout.jsonl"}, "rollout": {}}
    keys[section] = {**keys[section], "guidance_scale": 3.5}
    recipe = recipe_of(case, **keys)
    if takes_it:
        check_recipe(recipe)
        return
    with pytest.raises(ConfigError, match=rf"{section}\.guidance_scale") as caught:
        check_recipe(recipe)
    assert caught.value.fix == f"Use {section}.true_cfg_scale=3.5 instead."


def test_embedded_guidance_changes_what_a_distilled_model_draws_and_is_diffusers_default_when_not_given(
    recipe_of: Callable[..., Recipe],
) -> None:
    case = next(case for case in IMAGES if case.name == "flux")
    adapter = load(recipe_of(case))
    text = adapter.encode_prompts(PROMPTS, ["", ""])
    latents = torch.randn(2, *adapter.latent_shape(32, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        default, given, other = (
            adapter.predict(latents, torch.tensor([900.0, 150.0]), text, Guidance(1.0, scale)) for scale in (None, 3.5, 7.0)
        )
    assert torch.equal(default, given)
    assert float((other - given).abs().mean()) > 1e-3


def test_qwen_image_distilled_for_guidance_is_refused(damaged: Callable[..., Path], recipe_of: Callable[..., Recipe]) -> None:
    case = next(case for case in IMAGES if case.name == "qwen_image")
    with pytest.raises(ConfigError, match="distilled for embedded guidance"):
        load(recipe_of(case, damaged(case, "transformer/config.json", guidance_embeds=True)))


def test_prompts_of_different_lengths_share_a_pass_of_qwen_image_up_to_rounding(recipe_of: Callable[..., Recipe]) -> None:
    recipe = recipe_of(next(case for case in IMAGES if case.name == "qwen_image"))
    adapter = load(recipe)
    text = adapter.encode_prompts(["short", "a prompt of more words"], ["", ""])
    assert text.tensors["prompt_embeds_mask"].sum(1).tolist() == [10, 24]  # five tokens of the template are in it
    latents = torch.randn(2, *adapter.latent_shape(32, 32), generator=torch.Generator().manual_seed(0))
    timesteps = torch.tensor([900.0, 150.0])
    with torch.no_grad():
        together = adapter.predict(latents, timesteps, text, Guidance())
        for row in range(2):
            one = torch.tensor([row])
            alone = adapter.predict(latents[one], timesteps[one], text.select(one), Guidance())
            torch.testing.assert_close(together[one], alone, rtol=1e-5, atol=2e-5)


def test_micro_batches_that_mix_prompts_of_qwen_image_are_warned_of_and_not_deterministic(
    recipe_of: Callable[..., Recipe],
) -> None:
    qwen, sd3 = (next(case for case in IMAGES if case.name == name) for name in ("qwen_image", "sd3"))
    mixed = {"groups_per_micro_batch": 2}
    assert any("different lengths" in warning for warning in inspect(recipe_of(qwen, schedule=mixed)).warnings)
    for quiet in (recipe_of(qwen), recipe_of(sd3, schedule=mixed)):
        assert not any("different lengths" in warning for warning in inspect(quiet).warnings)
    check_recipe(recipe_of(qwen, train={"deterministic": True}))
    check_recipe(recipe_of(sd3, schedule=mixed, train={"deterministic": True}))
    with pytest.raises(ConfigError, match=r"train\.deterministic") as caught:
        check_recipe(recipe_of(qwen, schedule=mixed, train={"deterministic": True}))
    assert "schedule.groups_per_micro_batch=1" in caught.value.fix


@every_family
@full_and_slowly_lora
def test_bfloat16_is_near_float32_and_answers_in_float32(lora: dict[str, Any] | None, case: FamilyCase, rig_of: RigMaker) -> None:
    exact, half = (rig_of(case, model={"dtype": dtype, "lora": lora}) for dtype in ("float32", "bfloat16"))
    assert all(parameter.dtype == torch.float32 for parameter in half.policy.parameters.values())
    ours, wanted = (velocity(rig.adapter, case, rig.recipe, rig.adapter.transformer) for rig in (half, exact))
    assert ours.dtype == torch.float32
    assert 1e-4 < float((ours - wanted).norm() / wanted.norm()) < 0.1  # 8 bits of mantissa, a few layers deep
