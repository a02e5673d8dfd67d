"""Randomness by key: what is drawn depends on the seed and on what it is drawn for, never on what was drawn before.

So a run that was interrupted goes on exactly, without any generator's state being stored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def generator(seed: int, purpose: str, step: int = 0) -> torch.Generator:
    """A generator for one purpose in one step."""
    return torch.Generator().manual_seed(_key(seed, purpose, step))


@contextmanager
def weights_of(seed: int, purpose: str) -> Iterator[None]:
    """Inside, modules get initial weights that depend on the key alone; torch's own generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_key(seed, purpose, 0))
        yield


def _key(seed: int, purpose: str, step: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{purpose}/{step}".encode()).digest()[:7], "big")
