"""A process that holds some parts of a model: the same numbers, and not a weight of the others."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, DiffusionPipeline, StableDiffusion3Pipeline
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from digenrl.config.schema import Recipe
from digenrl.errors import ConfigError, ProtocolError
from digenrl.models.base import ALL_PARTS, Guidance, ModelAdapter, Part
from digenrl.models.loading import ConfigOnly, load_pipeline
from digenrl.models.sd3 import SD3Adapter

RecipeMaker = Callable[..., Recipe]
CPU = torch.device("cpu")
PROMPTS = ["a red circle", "two blue squares left of a green triangle"]
NEGATIVE = ["", "ugly"]
EVERY_CHOICE = [frozenset(parts) for size in range(4) for parts in combinations(sorted(ALL_PARTS), size)]
SINGLE: list[Part] = ["text_encoders", "transformer", "vae"]
FOLDERS = {
    "text_encoders": ["text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "text_encoder_3", "tokenizer_3"],
    "transformer": ["transformer"],
    "vae": ["vae"],
}


def only(part: Part) -> frozenset[Part]:
    return frozenset((part,))


def names(parts: frozenset[Part]) -> str:
    return "+".join(sorted(parts)) or "nothing"


def keep_configs_only(folder: Path, without: frozenset[Part]) -> None:
    """Delete all files of these parts but their configs."""
    for part in without:
        for path in (file for name in FOLDERS[part] for file in (folder / name).glob("*")):
            if path.name != "config.json":
                path.unlink()


def run_through(encoder: ModelAdapter, denoiser: ModelAdapter, decoder: ModelAdapter, cfg: float) -> dict[str, Tensor]:
    """Everything that is computed from two prompts, each step by its own adapter."""
    text = encoder.encode_prompts(PROMPTS, NEGATIVE)
    latents = torch.randn(2, *denoiser.latent_shape(32, 48), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        velocity = denoiser.predict(latents, torch.tensor([900.0, 150.0]), text, Guidance(cfg))
    return {**text.tensors, "velocity": velocity, "images": decoder.decode(latents - velocity)}


@pytest.mark.parametrize("cfg", [1.0, 4.5])
@pytest.mark.parametrize(("model", "max_sequence_length"), [("with_t5", 16), ("without_t5", 16), ("without_t5", 0)])
def test_processes_that_hold_one_part_each_compute_bitwise_what_one_with_all_parts_does(
    model: str, max_sequence_length: int, cfg: float, tiny_sd3: Path, tiny_sd3_without_t5: Path, tiny_recipe: RecipeMaker
) -> None:
    path = str(tiny_sd3 if model == "with_t5" else tiny_sd3_without_t5)
    recipe = tiny_recipe(model={"path": path, "max_sequence_length": max_sequence_length}, rollout={"true_cfg_scale": cfg})
    encoder, denoiser, decoder = (SD3Adapter.load(recipe, CPU, only(part)) for part in SINGLE)
    whole = SD3Adapter.load(recipe, CPU)
    apart, together = run_through(encoder, denoiser, decoder, cfg), run_through(whole, whole, whole, cfg)
    assert set(apart) == set(together)
    assert all(torch.equal(apart[name], together[name]) for name in together)
    assert len(together) == (6 if cfg > 1 else 4)
    assert encoder.truncated_prompts == whole.truncated_prompts


@pytest.mark.parametrize("parts", EVERY_CHOICE, ids=names)
@pytest.mark.parametrize("with_t5", [True, False])
@pytest.mark.parametrize("dynamic", [True, False])
def test_shapes_and_schedules_are_the_same_whatever_is_loaded(
    parts: frozenset[Part],
    with_t5: bool,
    dynamic: bool,
    edited_model: Callable[..., Path],
    tiny_recipe: RecipeMaker,
) -> None:
    edited_model("scheduler/scheduler_config.json", use_dynamic_shifting=dynamic)
    # A factor of 4 rather than the 8 that diffusers takes where it sees no VAE.
    folder = edited_model("vae/config.json", block_out_channels=[4, 4, 4], **shallow_vae_blocks())
    AutoencoderKL.from_config(AutoencoderKL.load_config(folder / "vae")).save_pretrained(folder / "vae")
    if not with_t5:
        edited_model("model_index.json", text_encoder_3=[None, None], tokenizer_3=[None, None])
    recipe = tiny_recipe(model={"path": str(folder)})
    whole, some = SD3Adapter.load(recipe, CPU), SD3Adapter.load(recipe, CPU, parts)
    assert some.latent_shape(64, 32) == whole.latent_shape(64, 32) == (4, 16, 8)
    for size in (32, 128):
        ours, wanted = some.noise_schedule(4, size, size), whole.noise_schedule(4, size, size)
        assert torch.equal(ours.sigmas, wanted.sigmas)
        assert torch.equal(ours.timesteps, wanted.timesteps)
    with pytest.raises(ConfigError, match=r"rollout\.width \(136\).*128"):
        SD3Adapter.load(tiny_recipe(model={"path": str(folder)}, rollout={"width": 136}), CPU, parts)


def shallow_vae_blocks() -> dict[str, Any]:
    return {"down_block_types": ["DownEncoderBlock2D"] * 3, "up_block_types": ["UpDecoderBlock2D"] * 3}


@pytest.mark.parametrize("parts", EVERY_CHOICE, ids=names)
def test_not_a_weight_of_an_absent_part_is_read(
    parts: frozenset[Part], copied_model: Path, tiny_sd3: Path, tiny_recipe: RecipeMaker
) -> None:
    keep_configs_only(copied_model, ALL_PARTS - parts)
    adapter = SD3Adapter.load(tiny_recipe(model={"path": str(copied_model)}), CPU, parts)
    whole = SD3Adapter.load(tiny_recipe(model={"path": str(tiny_sd3)}), CPU)
    if "transformer" in parts:
        ours, wanted = adapter.transformer.state_dict(), whole.transformer.state_dict()
        assert all(torch.equal(ours[name], wanted[name]) for name in wanted)
    assert adapter.latent_shape(32, 32) == whole.latent_shape(32, 32)
    keep_configs_only(copied_model, parts)
    for part in parts:
        with pytest.raises(ConfigError, match=r"model\.path"):
            SD3Adapter.load(tiny_recipe(model={"path": str(copied_model)}), CPU, only(part))


@pytest.mark.parametrize("parts", EVERY_CHOICE, ids=names)
def test_what_is_in_memory_are_the_components_of_the_parts(parts: frozenset[Part], tiny_sd3: Path) -> None:
    without = [name for part in ALL_PARTS - parts for name in FOLDERS[part]]
    pipeline = load_pipeline(StableDiffusion3Pipeline, str(tiny_sd3), absent=(), without=without)
    held = {name for name, part in pipeline.components.items() if part is not None and not isinstance(part, ConfigOnly)}
    assert held == {"scheduler"} | {name for part in parts for name in FOLDERS[part]}


@pytest.mark.parametrize("part", ["transformer", "vae"])
def test_a_config_without_its_weights_is_the_one_that_a_loaded_component_has(part: Part, tiny_sd3: Path) -> None:
    whole = load_pipeline(StableDiffusion3Pipeline, str(tiny_sd3), absent=())
    some = load_pipeline(StableDiffusion3Pipeline, str(tiny_sd3), absent=(), without=FOLDERS[part])
    ours, wanted = dict(getattr(some, part).config), dict(getattr(whole, part).config)
    assert isinstance(getattr(some, part), ConfigOnly)
    assert {key: ours.get(key) for key in wanted if not key.startswith("_")} == {
        key: value for key, value in wanted.items() if not key.startswith("_")
    }
    for name in ("vae_scale_factor", "tokenizer_max_length", "default_sample_size", "patch_size"):
        assert getattr(some, name) == getattr(whole, name)


def test_a_config_older_than_a_parameter_has_diffusers_default_of_it(copied_model: Path, tiny_recipe: RecipeMaker) -> None:
    file = copied_model / "transformer" / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    del config["patch_size"], config["pos_embed_max_size"]  # 2 and 96
    file.write_text(json.dumps(config), encoding="utf-8")
    recipe = tiny_recipe(model={"path": str(copied_model)}, rollout={"width": 96 * 2 * 8 + 8})
    with pytest.raises(ConfigError, match=r"rollout\.width \(1544\).*1536"):
        SD3Adapter.load(recipe, CPU, only("vae"))


def test_the_missing_weight_of_a_part_that_is_held_is_never_made_up(copied_model: Path, tiny_recipe: RecipeMaker) -> None:
    file = copied_model / "vae" / "diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    del weights["decoder.conv_out.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    recipe = tiny_recipe(model={"path": str(copied_model)})
    SD3Adapter.load(recipe, CPU, frozenset(("text_encoders", "transformer")))
    with pytest.raises(ConfigError, match="vae lacks 1"):
        SD3Adapter.load(recipe, CPU, only("vae"))


@pytest.mark.parametrize("absent", SINGLE)
def test_work_for_a_part_that_is_not_held_is_refused_by_its_name(absent: Part, tiny_recipe: RecipeMaker) -> None:
    adapter = SD3Adapter.load(tiny_recipe(), CPU, ALL_PARTS - {absent})
    whole = SD3Adapter.load(tiny_recipe(), CPU)
    text, latents = whole.encode_prompts(PROMPTS, NEGATIVE), torch.zeros(2, *whole.latent_shape(32, 32))
    calls: dict[Part, list[Callable[[], Any]]] = {
        "text_encoders": [lambda: adapter.encode_prompts(PROMPTS, NEGATIVE)],
        "transformer": [
            lambda: adapter.predict(latents, torch.tensor([900.0, 100.0]), text, Guidance()),
            lambda: adapter.transformer,
        ],
        "vae": [lambda: adapter.decode(latents)],
    }
    for part, uses in calls.items():
        for use in uses:
            if part != absent:
                use()
                continue
            with pytest.raises(ProtocolError, match=f"Part {absent!r}.* loaded without it") as caught:
                use()
            assert ", ".join(sorted(ALL_PARTS - {absent})) in caught.value.why
            assert absent in caught.value.fix


def test_a_held_transformer_can_be_exchanged_and_put_back(tiny_recipe: RecipeMaker) -> None:
    adapter = SD3Adapter.load(tiny_recipe(), CPU, only("transformer"))
    network, other = adapter.transformer, nn.Identity()
    adapter.transformer = other
    assert adapter.transformer is other
    adapter.transformer = network
    assert adapter.transformer is network


@pytest.mark.parametrize("parts", EVERY_CHOICE, ids=names)
def test_no_third_encoder_and_no_tokens_for_one_go_together_whatever_is_loaded(
    parts: frozenset[Part], tiny_sd3_without_t5: Path, tiny_recipe: RecipeMaker
) -> None:
    recipe = tiny_recipe(model={"path": str(tiny_sd3_without_t5), "max_sequence_length": 0})
    assert SD3Adapter.load(recipe, CPU, parts).latent_shape(32, 32) == (4, 4, 4)


def test_a_component_of_a_class_that_diffusers_lacks_is_refused_though_its_weights_are_not_wanted(
    edited_model: Callable[..., Path], tiny_recipe: RecipeMaker
) -> None:
    folder = edited_model("model_index.json", vae=["evil", "Evil"])
    with pytest.raises(ConfigError, match=r"model\.path.*Evil"):
        SD3Adapter.load(tiny_recipe(model={"path": str(folder)}), CPU, only("transformer"))


class PipelineWithAnOption(DiffusionPipeline):
    """As other families have them: a value in model_index.json that is no component."""

    def __init__(self, vae: Any, scheduler: Any, num_frames: int = 1) -> None:
        super().__init__()
        self.register_modules(vae=vae, scheduler=scheduler)
        self.register_to_config(num_frames=num_frames)


def test_a_pipelines_own_options_are_kept_where_a_component_is_not_wanted(tmp_path: Path, tiny_sd3: Path) -> None:
    whole = load_pipeline(StableDiffusion3Pipeline, str(tiny_sd3), absent=())
    PipelineWithAnOption(whole.vae, whole.scheduler, num_frames=5).save_pretrained(str(tmp_path))
    some = load_pipeline(PipelineWithAnOption, str(tmp_path), absent=(), without=["vae"])
    assert some.config.num_frames == 5
    assert some.vae.config.block_out_channels == whole.vae.config.block_out_channels
