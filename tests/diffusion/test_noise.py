"""Keyed noise: a function of (seed, purpose, ids) and of nothing else."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor

from digenrl.diffusion.noise import Purpose, initial_latents, key, normal, sde_noise
from digenrl.ids import SampleId

SHAPE = (4, 4, 4)


def group(step: int = 0, prompt: int = 0, size: int = 24) -> list[SampleId]:
    return [SampleId(step, prompt, sample) for sample in range(size)]


def first_noise(samples: list[SampleId], seed: int = 0, same: bool = False) -> Tensor:
    return initial_latents(samples, SHAPE, seed=seed, same_in_group=same)


def distinct(rows: Tensor) -> int:
    return len({row.numpy().tobytes() for row in rows})


def test_all_samples_of_all_prompts_and_steps_start_from_different_noise() -> None:
    samples = [s for step in range(3) for prompt in range(4) for s in group(step, prompt)]
    assert distinct(first_noise(samples)) == len(samples)


def test_the_same_sample_gets_the_same_noise_again() -> None:
    assert torch.equal(first_noise(group()), first_noise(group()))


def test_noise_of_a_sample_does_not_depend_on_who_is_drawn_beside_it_or_in_which_order() -> None:
    samples = group(size=7)
    together = first_noise(samples)
    assert torch.equal(first_noise(samples[::-1]), together.flip(0))
    assert torch.equal(first_noise([samples[4]])[0], together[4])


def test_every_seed_draws_other_noise() -> None:
    rows = torch.cat([first_noise(group(size=1), seed=seed) for seed in (0, 1, 2, 2**32, 2**32 + 1, 2**63 - 1)])
    assert distinct(rows) == 6


def test_init_same_noise_gives_a_group_one_noise_and_other_groups_another() -> None:
    rows = first_noise([*group(prompt=0, size=4), *group(prompt=1, size=4), *group(step=1, size=4)], same=True)
    assert distinct(rows) == 3
    assert torch.equal(rows[0].expand(4, *SHAPE), rows[:4])
    assert torch.equal(rows[0], first_noise(group(size=1), same=False)[0])


def test_sde_noise_differs_between_denoising_steps_samples_and_from_the_first_noise() -> None:
    samples = group(size=5)
    rows = torch.cat([first_noise(samples), *(sde_noise(samples, SHAPE, step, seed=0) for step in range(6))])
    assert distinct(rows) == len(rows)
    assert torch.equal(sde_noise(samples, SHAPE, 3, seed=0), sde_noise(samples, SHAPE, 3, seed=0))


def test_samples_of_a_group_keep_their_own_sde_noise_when_they_start_from_the_same() -> None:
    assert distinct(sde_noise(group(), SHAPE, 0, seed=0)) == 24


def test_keys_cannot_be_confused_by_where_one_number_ends_and_the_next_begins() -> None:
    keys = {
        key(1, Purpose.SDE_NOISE, 23, 4),
        key(1, Purpose.SDE_NOISE, 2, 34),
        key(12, Purpose.SDE_NOISE, 3, 4),
        key(1, Purpose.SDE_NOISE, 2, 3, 4),
        key(1, Purpose.SDE_NOISE, 234),
        key(1, Purpose.EVALUATION, 23, 4),
    }
    assert len(keys) == 6
    assert all(0 <= k < 2**63 for k in keys)


def test_streams_stay_distinct_in_the_32_bits_that_torch_keeps_of_a_key() -> None:
    # torch's CPU generator drops the upper half of a seed: the lower half alone has to tell near keys apart.
    lower = {
        key(0, Purpose.SDE_NOISE, step, prompt, s, i) % 2**32
        for step in range(2)
        for prompt in range(8)
        for s in range(24)
        for i in range(10)
    }
    assert len(lower) == 2 * 8 * 24 * 10


def test_drawing_noise_neither_reads_nor_changes_global_random_state() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    one = first_noise(group())
    sde_noise(group(), SHAPE, 0, seed=0)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.array_equal(np.random.get_state()[1], before[2])
    torch.manual_seed(2)
    assert torch.equal(first_noise(group()), one)


def test_noise_is_standard_normal_float32() -> None:
    noise = normal((100_000,), 3, Purpose.SDE_NOISE, 1)
    assert noise.dtype == torch.float32
    # Four standard errors of mean and variance of 100,000 draws.
    assert abs(float(noise.mean())) < 4 / 100_000**0.5
    assert abs(float(noise.var()) - 1) < 4 * (2 / 100_000) ** 0.5
