"""Keyed randomness: every random number is a function of (run seed, purpose, ids), drawn on the CPU.

Invariants: who draws a number, when, and beside which others changes nothing; no global random state is read or
changed; keys that differ in anything give unrelated streams (see ``key``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import StrEnum

import torch
from torch import Tensor

from digenrl.ids import SampleId


class Purpose(StrEnum):
    """What a random number is for; part of its key."""

    INITIAL_LATENTS = "initial_latents"
    SDE_NOISE = "sde_noise"
    SDE_WINDOW = "sde_window"
    TIMESTEP_CHOICE = "timestep_choice"
    EVALUATION = "evaluation"
    LORA_INIT = "lora_init"


def key(seed: int, purpose: Purpose, *ids: int) -> int:
    """A 63-bit seed from a run seed, a purpose and any number of ids (BLAKE2b, so near keys give unrelated streams).

    torch's CPU generator keeps 32 bits of it: among n streams two are the same with probability n^2 / 2^33, which is one
    pair in 50 RL steps of 1152 samples x 10 denoising steps, and once in 15 million groups of 24 first noises.
    """
    text = "/".join((str(seed), purpose.value, *map(str, ids)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(seed: int, purpose: Purpose, *ids: int) -> torch.Generator:
    """A fresh CPU generator for one key."""
    return torch.Generator().manual_seed(key(seed, purpose, *ids))


def normal(shape: Sequence[int], seed: int, purpose: Purpose, *ids: int) -> Tensor:
    """Standard normal float32 numbers of one key. Returns [*shape] on the CPU."""
    return torch.randn(tuple(shape), generator=generator(seed, purpose, *ids))


def initial_latents(samples: Sequence[SampleId], shape: Sequence[int], *, seed: int, same_in_group: bool) -> Tensor:
    """First noise x at sigma = 1 of each sample. Returns [B, *shape] float32; equal rows in a group if ``same_in_group``."""
    return torch.stack(
        [normal(shape, seed, Purpose.INITIAL_LATENTS, s.step, s.prompt, 0 if same_in_group else s.sample) for s in samples]
    )


def sde_noise(samples: Sequence[SampleId], shape: Sequence[int], denoising_step: int, *, seed: int) -> Tensor:
    """Noise z of one SDE step of each sample. Returns [B, *shape] float32."""
    return torch.stack([normal(shape, seed, Purpose.SDE_NOISE, s.step, s.prompt, s.sample, denoising_step) for s in samples])
