"""Trajectories: one version each, and the same bits whoever asks for them and in which company."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from digenrl.data.prompts import Prompt
from digenrl.diffusion.trajectory import Trajectory
from digenrl.errors import ProtocolError
from digenrl.ids import SampleId

RigMaker = Callable[..., Any]
TENSORS = ("noise_levels", "denoising_steps", "latents", "next_latents", "log_probs", "final_latents")


@pytest.fixture(scope="module")
def rig(make_rig: RigMaker) -> Any:
    return make_rig(rollout={"num_generations": 5, "forward_batch_size": 4}, model={"lora": {"rank": 2, "alpha": 4}})


def same(one: Trajectory, row: int, other: Trajectory, other_row: int) -> bool:
    return all(torch.equal(getattr(one, name)[row], getattr(other, name)[other_row]) for name in TENSORS)


def test_a_version_that_is_not_held_is_refused(make_rig: RigMaker) -> None:
    rig = make_rig()
    text, samples = rig.conditioning(), rig.samples()
    rows = torch.tensor([s.prompt for s in samples])
    for version in (1, -1):
        with pytest.raises(ProtocolError, match=f"version {version} was asked for, and version 0 is held"):
            rig.generator.generate(samples, text, rows, version)
    assert rig.generator.generate(samples, text, rows, 0).policy_version == 0
    rig.trainer.optimizer_step()
    with pytest.raises(ProtocolError, match="version 0 was asked for, and version 1 is held"):
        rig.generator.generate(samples, text, rows, 0)
    assert rig.generator.generate(samples, text, rows, 1).policy_version == 1


@pytest.mark.parametrize("cut", [[10], [5, 5], [1] * 10, [3, 3, 4], [9, 1]])
def test_the_same_samples_in_other_micro_batches_are_the_same_bits(cut: list[int], rig: Any) -> None:
    samples = rig.samples()
    whole, start = rig.trajectory(), 0
    for size in cut:
        part = rig.trajectory(samples[start : start + size])
        assert part.samples == tuple(samples[start : start + size])
        assert all(same(part, row, whole, start + row) for row in range(size))
        start += size


def test_the_same_samples_in_another_order_are_the_same_bits(rig: Any) -> None:
    whole, samples = rig.trajectory(), rig.samples()
    order = torch.randperm(10, generator=torch.Generator().manual_seed(0)).tolist()
    shuffled = rig.trajectory([samples[i] for i in order])
    assert all(same(shuffled, row, whole, i) for row, i in enumerate(order))


def test_another_step_or_seed_makes_other_samples(rig: Any, make_rig: RigMaker) -> None:
    here, later = rig.trajectory(), rig.trajectory(step=1)
    assert not any(torch.equal(here.final_latents[row], later.final_latents[row]) for row in range(10))
    twin = make_rig(rig.recipe)
    assert all(same(here, row, twin.trajectory(), row) for row in range(10))
    recipe = rig.recipe.model_copy(update={"run": rig.recipe.run.model_copy(update={"seed": 12})})
    assert not torch.equal(make_rig(recipe).trajectory().final_latents, here.final_latents)


def test_init_same_noise_starts_a_group_from_one_noise_and_ends_in_different_samples(make_rig: RigMaker) -> None:
    same_start = make_rig(rollout={"init_same_noise": True}).trajectory()
    first = same_start.latents[:, 0]
    assert torch.equal(first[0], first[1])
    assert torch.equal(first[3], first[5])
    assert not torch.equal(first[0], first[3])
    assert len({row.numpy().tobytes() for row in same_start.final_latents}) == 6


def test_a_trajectory_holds_the_trained_steps_of_its_own_denoising(rig: Any) -> None:
    trajectory = rig.trajectory()
    assert trajectory.denoising_steps.tolist() == [[0, 1, 2]] * 10
    assert torch.equal(trajectory.sigmas, rig.schedule.sigmas)
    assert torch.equal(trajectory.noise_levels, torch.full((10, 3), 0.7))
    assert torch.equal(trajectory.latents[:, 1:], trajectory.next_latents[:, :-1]), "consecutive steps share a latent"
    assert torch.isfinite(trajectory.log_probs).all()


def test_trajectories_of_a_bfloat16_model_are_float32(make_rig: RigMaker) -> None:
    trajectory = make_rig(model={"dtype": "bfloat16", "lora": {"rank": 2, "alpha": 4}}).trajectory()
    assert {getattr(trajectory, name).dtype for name in TENSORS} == {torch.float32, torch.int64}


def test_a_prompt_is_encoded_the_same_alone_and_among_others_in_batches_of_one_size(rig: Any) -> None:
    prompts = [Prompt(text=f"prompt number {i}") for i in range(6)]
    sizes: list[int] = []
    encode = rig.adapter.encode_prompts

    def counted(texts: list[str], negatives: list[str]) -> Any:
        sizes.append(len(texts))
        return encode(texts, negatives)

    rig.adapter.encode_prompts = counted
    try:
        together = rig.generator.encode(prompts)
        assert len(together) == 6
        for row, prompt in enumerate(prompts):
            alone = rig.generator.encode([prompt])
            for name, tensor in alone.tensors.items():
                assert torch.equal(tensor[0], together.tensors[name][row])
    finally:
        del rig.adapter.encode_prompts
    assert set(sizes) == {2}, "the prompts of a step, which are fewer than the samples of a pass"


def test_a_sample_gets_the_text_of_its_own_prompt(rig: Any) -> None:
    text, samples = rig.conditioning(), rig.samples()
    rows = torch.tensor([s.prompt for s in samples])
    right = rig.generator.generate(samples, text, rows, 0)
    swapped = rig.generator.generate(samples, text.select(torch.tensor([1, 0])), 1 - rows, 0)
    assert torch.equal(right.final_latents, swapped.final_latents)
    wrong = rig.generator.generate(samples, text, 1 - rows, 0)
    assert not any(torch.equal(right.final_latents[row], wrong.final_latents[row]) for row in range(10))


def test_steps_of_other_numbers_do_not_depend_on_the_samples_of_this_one(rig: Any) -> None:
    alone = rig.trajectory([SampleId(7, 1, 4)])
    mixed = rig.trajectory([SampleId(3, 0, 0), SampleId(7, 1, 4), SampleId(9, 0, 2)])
    assert same(mixed, 1, alone, 0)
