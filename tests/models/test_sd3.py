"""The SD3 adapter against diffusers' own pipeline: same latents, same pictures, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from torch import Tensor

from digenrl.config.builtin import resolve
from digenrl.config.schema import Recipe
from digenrl.diffusion.dynamics import ODE
from digenrl.diffusion.noise import initial_latents
from digenrl.diffusion.sampler import StepPlan, denoise
from digenrl.errors import ConfigError
from digenrl.ids import SampleId
from digenrl.models.base import Conditioning, Guidance, concatenate
from digenrl.models.sd3 import SD3Adapter

RecipeMaker = Callable[..., Recipe]
CPU = torch.device("cpu")
PROMPTS = ["a red circle", "two blue squares left of a green triangle"]
NEGATIVE = ["", "ugly"]


def no_noise(_step: int, _rows: Tensor) -> Tensor:
    raise AssertionError("the ODE draws no noise")


def our_latents(adapter: SD3Adapter, height: int, width: int, steps: int, cfg: float) -> tuple[Tensor, Tensor]:
    """Initial and final latents of two prompts."""
    shape = adapter.latent_shape(height, width)
    initial = initial_latents([SampleId(0, i, 0) for i in range(2)], shape, seed=0, same_in_group=False)
    text = adapter.encode_prompts(PROMPTS, NEGATIVE)

    def predict(latents: Tensor, timesteps: Tensor, rows: Tensor) -> Tensor:
        return adapter.predict(latents, timesteps, text.select(rows), Guidance(cfg))

    plan = StepPlan(noise_levels=torch.zeros(2, steps), trained=torch.empty(2, 0, dtype=torch.int64))
    schedule = adapter.noise_schedule(steps, height, width)
    result = denoise(predict, initial, schedule, plan, ODE(), no_noise, forward_batch_size=2)
    return initial, result.final_latents


@pytest.mark.parametrize("cfg", [1.0, 4.5])
@pytest.mark.parametrize(
    ("model", "max_sequence_length", "sizes"),
    [
        ("with_t5", 16, [(32, 32), (64, 48)]),
        ("without_t5", 16, [(32, 32), (64, 48)]),
        ("without_t5", 0, [(32, 32)]),
        ("shapes", 10, [(32, 32), (48, 32)]),
    ],
)
def test_the_ode_loop_and_the_decoder_are_the_pipelines_bit_for_bit(
    model: str,
    max_sequence_length: int,
    sizes: list[tuple[int, int]],
    cfg: float,
    tiny_sd3: Path,
    tiny_sd3_without_t5: Path,
    tiny_recipe: RecipeMaker,
) -> None:
    folder = {"with_t5": tiny_sd3, "without_t5": tiny_sd3_without_t5, "shapes": resolve("builtin:shapes", where="")}[model]
    recipe = tiny_recipe(model={"path": str(folder), "max_sequence_length": max_sequence_length}, rollout={"true_cfg_scale": cfg})
    adapter = SD3Adapter.load(recipe, CPU)
    absent = {} if model != "without_t5" else {"text_encoder_3": None, "tokenizer_3": None}
    pipeline = StableDiffusion3Pipeline.from_pretrained(folder, dtype=torch.float32, **absent)
    pipeline.set_progress_bar_config(disable=True)
    # torch.matmul folds a strided input (the VAE's attention) or not by whether the weight wants a gradient: other last bits.
    pipeline.vae.requires_grad_(False)
    for height, width in sizes:
        initial, ours = our_latents(adapter, height, width, 4, cfg)
        arguments: dict[str, Any] = {
            "prompt": PROMPTS,
            "negative_prompt": NEGATIVE,
            "height": height,
            "width": width,
            "num_inference_steps": 4,
            "guidance_scale": cfg,
            "max_sequence_length": max_sequence_length,
        }
        theirs = pipeline(**arguments, latents=initial.clone(), output_type="latent").images
        assert torch.equal(ours, theirs)
        assert float((ours - initial).abs().mean()) > 0.1
        pictures = pipeline(**arguments, latents=initial.clone(), output_type="pt").images
        assert torch.equal(adapter.decode(ours), pictures)
        assert pictures.shape == (2, 3, height, width)


@pytest.fixture(scope="module")
def adapter(tiny_recipe: RecipeMaker) -> SD3Adapter:
    return SD3Adapter.load(tiny_recipe(rollout={"true_cfg_scale": 2.0}), CPU)


@pytest.mark.parametrize("cfg", [1.0, 2.0])
def test_a_batch_of_mixed_timesteps_is_the_same_as_one_by_one(adapter: SD3Adapter, cfg: float) -> None:
    latents = torch.randn(5, 4, 4, 4, generator=torch.Generator().manual_seed(0))
    timesteps = torch.tensor([1000.0, 913.3, 500.0, 8.9, 500.0])
    text = adapter.encode_prompts(PROMPTS, NEGATIVE).select(torch.tensor([0, 1, 1, 0, 1]))
    with torch.no_grad():
        together = adapter.predict(latents, timesteps, text, Guidance(cfg))
        for row in range(5):
            one = torch.tensor([row])
            alone = adapter.predict(latents[one], timesteps[one], text.select(one), Guidance(cfg))
            # The batch's shape changes the last bits of matrix products.
            torch.testing.assert_close(together[row], alone[0], rtol=1e-5, atol=2e-5)
    assert together.dtype == torch.float32


def test_a_rows_prediction_depends_on_neither_its_place_nor_its_neighbours(adapter: SD3Adapter) -> None:
    latents = torch.randn(6, 4, 4, 4, generator=torch.Generator().manual_seed(0))
    timesteps = torch.tensor([1000.0, 913.3, 500.0, 8.9, 500.0, 700.0])
    text = adapter.encode_prompts(PROMPTS, NEGATIVE).select(torch.tensor([0, 1, 1, 0, 1, 0]))
    with torch.no_grad():
        before = adapter.predict(latents, timesteps, text, Guidance())
        for order in ([5, 4, 3, 2, 1, 0], [2, 2, 2, 2, 2, 2], [3, 0, 1, 5, 5, 0]):
            rows = torch.tensor(order)
            after = adapter.predict(latents[rows], timesteps[rows], text.select(rows), Guidance())
            assert torch.equal(after, before[rows])
        poisoned = latents.clone()
        poisoned[1] = float("nan")
        after = adapter.predict(poisoned, timesteps, text, Guidance())
        keep = torch.tensor([0, 2, 3, 4, 5])
        assert torch.equal(after[keep], before[keep])


def test_text_guidance_and_time_all_change_the_prediction(adapter: SD3Adapter) -> None:
    latents = torch.randn(2, 4, 4, 4, generator=torch.Generator().manual_seed(0))
    timesteps = torch.tensor([900.0, 900.0])
    text = adapter.encode_prompts(PROMPTS, NEGATIVE)
    with torch.no_grad():
        plain = adapter.predict(latents, timesteps, text, Guidance())
        for other in (
            adapter.predict(latents, timesteps, text.select(torch.tensor([1, 0])), Guidance()),
            adapter.predict(latents, timesteps - 300, text, Guidance()),
            adapter.predict(latents, timesteps, text, Guidance(3.0)),
        ):
            assert float((other - plain).abs().mean()) > 0.05


def test_without_guidance_no_unconditional_text_is_encoded(tiny_recipe: RecipeMaker) -> None:
    plain = SD3Adapter.load(tiny_recipe(), CPU).encode_prompts(PROMPTS, NEGATIVE)
    assert set(plain.tensors) == {"prompt_embeds", "pooled_prompt_embeds"}
    for_evaluation = tiny_recipe(eval={"prompts": "builtin:shapes/heldout.jsonl", "true_cfg_scale": 2.0})
    assert "negative_prompt_embeds" in SD3Adapter.load(for_evaluation, CPU).encode_prompts(PROMPTS, NEGATIVE).tensors


def test_encoded_prompts_are_selected_and_joined_by_row(adapter: SD3Adapter) -> None:
    both = adapter.encode_prompts(PROMPTS, NEGATIVE)
    assert len(both) == 2
    rows = both.select(torch.tensor([1, 1, 0]))
    joined = concatenate([rows.select(torch.tensor([0])), Conditioning(rows.select(torch.tensor([2])).tensors)])
    for name, tensor in joined.tensors.items():
        assert torch.equal(tensor, both.tensors[name][[1, 0]])


def random_states() -> list[bytes]:
    return [
        torch.get_rng_state().numpy().tobytes(),
        repr(random.getstate()).encode(),
        np.random.get_state()[1].tobytes(),
    ]


def test_loading_adapters_and_generating_leave_all_global_random_state_alone(make_rig: Callable[..., Any]) -> None:
    torch.manual_seed(1234)  # a state that no earlier test can have left behind
    before = random_states()
    rig = make_rig(model={"lora": {"rank": 2, "alpha": 4}}, algorithm={"type": "flow_grpo", "timestep_selection": "random"})
    assert random_states() == before
    trajectory = rig.trajectory()
    rig.adapter.decode(trajectory.final_latents)
    assert random_states() == before


def test_two_loads_are_the_same_whatever_the_global_random_state(make_rig: Callable[..., Any]) -> None:
    torch.manual_seed(1)
    one = make_rig(model={"lora": {"rank": 2, "alpha": 4}})
    torch.manual_seed(2)
    two = make_rig(model={"lora": {"rank": 2, "alpha": 4}})
    for name, parameter in one.adapter.transformer.named_parameters():
        assert torch.equal(parameter, dict(two.adapter.transformer.named_parameters())[name])
    other_seed = make_rig(run={"device": "cpu", "seed": 12}, model={"lora": {"rank": 2, "alpha": 4}})
    a = next(name for name in one.policy.parameters if "lora_A" in name)
    assert not torch.equal(one.policy.parameters[a], other_seed.policy.parameters[a])


@pytest.mark.parametrize("shift", [1.0, 5.0])
def test_flow_shift_replaces_the_folders_own_schedule(shift: float, tiny_recipe: RecipeMaker) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler

    ours = SD3Adapter.load(tiny_recipe(model={"flow_shift": shift}), CPU).noise_schedule(10, 32, 32)
    theirs = FlowMatchEulerDiscreteScheduler(shift=shift)
    theirs.set_timesteps(10)
    assert torch.equal(ours.sigmas, theirs.sigmas)


def test_a_schedule_that_shifts_with_the_image_size_is_followed_or_replaced(
    tmp_path: Path, tiny_sd3: Path, tiny_recipe: RecipeMaker, edited_model: Callable[..., Path]
) -> None:
    folder = edited_model("scheduler/scheduler_config.json", use_dynamic_shifting=True)
    pipeline = StableDiffusion3Pipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    adapter = SD3Adapter.load(tiny_recipe(model={"path": str(folder)}), CPU)
    tables = []
    for size in (32, 128):
        pipeline(["a"], height=size, width=size, num_inference_steps=4, guidance_scale=1.0, output_type="latent")
        tables.append(adapter.noise_schedule(4, size, size).sigmas)
        assert torch.equal(tables[-1], pipeline.scheduler.sigmas)
    assert not torch.equal(*tables)
    fixed = SD3Adapter.load(tiny_recipe(model={"path": str(folder), "flow_shift": 5.0}), CPU)
    plain = SD3Adapter.load(tiny_recipe(model={"flow_shift": 5.0}), CPU)
    assert torch.equal(fixed.noise_schedule(4, 32, 32).sigmas, plain.noise_schedule(4, 32, 32).sigmas)


def test_prompts_that_no_encoder_reads_to_the_end_are_counted_once(tiny_recipe: RecipeMaker) -> None:
    adapter = SD3Adapter.load(tiny_recipe(model={"max_sequence_length": 100}), CPU)
    for_clip, for_all = "x" * 80, "y" * 120  # one token a letter; CLIP reads 77, the third encoder 100 here
    for _ in range(3):
        adapter.encode_prompts(["short", for_clip, for_all, for_all], [""] * 4)
    assert adapter.truncated_prompts == {for_all}


def test_prompts_longer_than_clip_count_where_there_is_no_third_encoder(
    tiny_sd3_without_t5: Path, tiny_recipe: RecipeMaker
) -> None:
    adapter = SD3Adapter.load(tiny_recipe(model={"path": str(tiny_sd3_without_t5), "max_sequence_length": 100}), CPU)
    adapter.encode_prompts(["short", "x" * 80], ["", ""])
    assert adapter.truncated_prompts == {"x" * 80}
    adapter.encode_prompts(["x" * 75, "x" * 76], ["", ""])  # 77 with start and end, and one more
    assert adapter.truncated_prompts == {"x" * 80, "x" * 76}


def test_an_image_larger_than_the_model_has_positions_for_is_refused_at_loading(tiny_recipe: RecipeMaker) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.width \(272\).*256"):
        SD3Adapter.load(tiny_recipe(rollout={"width": 272}), CPU)
    SD3Adapter.load(tiny_recipe(rollout={"width": 256}), CPU)


def test_bfloat16_computes_in_bfloat16_and_answers_in_float32(make_rig: Callable[..., Any]) -> None:
    for lora in (None, {"rank": 2, "alpha": 4}):
        exact, half = (make_rig(model={"dtype": dtype, "lora": lora}) for dtype in ("float32", "bfloat16"))
        assert all(parameter.dtype == torch.float32 for parameter in half.policy.parameters.values())
        latents = torch.randn(2, 4, 4, 4, generator=torch.Generator().manual_seed(0))
        timesteps = torch.tensor([900.0, 300.0])
        with torch.no_grad():
            ours = half.adapter.predict(latents, timesteps, half.conditioning(), Guidance())
            wanted = exact.adapter.predict(latents, timesteps, exact.conditioning(), Guidance())
        assert ours.dtype == torch.float32
        error = float((ours - wanted).norm() / wanted.norm())
        assert 1e-4 < error < 0.1  # 8 bits of mantissa, a few layers deep
