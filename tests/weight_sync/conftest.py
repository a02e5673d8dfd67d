"""Two processes' worth of one model, ways to move and to compare weights, and receivers in real processes."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from digenrl.models.base import Guidance

LORA = {"rank": 4, "alpha": 8}
ANSWER_TIMEOUT_S = 40.0


class Side:
    """One process: its own copy of the model, and what it draws."""

    def __init__(self, rig: Any) -> None:
        self.rig = rig
        self.policy = rig.policy

    @cached_property
    def text(self) -> Any:
        return self.rig.conditioning().select(torch.tensor([0, 1, 1]))

    def move(self, seed: int, size: float = 1e-2, only: str = "") -> None:
        """Change the trained weights whose names contain ``only``, as an optimizer step of this learning rate may."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.policy.parameters.items():
                step = torch.randn(parameter.shape, generator=generator).to(parameter.device)
                if only in name:
                    parameter.add_(step, alpha=size)

    def predict(self) -> Tensor:
        latents = torch.randn(3, 4, 4, 4, generator=torch.Generator().manual_seed(0)).to(self.rig.adapter.device)
        with torch.no_grad():
            return self.rig.adapter.predict(latents, torch.tensor([900.0, 500.0, 20.0]), self.text, Guidance()).cpu()

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.policy.parameters.items()}

    def frozen(self) -> dict[str, Tensor]:
        everything = self.rig.adapter.transformer.state_dict()
        return {name: tensor.clone() for name, tensor in everything.items() if name not in self.policy.parameters}

    def is_unchanged_since(self, weights: dict[str, Tensor]) -> bool:
        return all(torch.equal(tensor, self.policy.parameters[name]) for name, tensor in weights.items())


@pytest.fixture
def make_side(make_rig: Callable[..., Any]) -> Callable[..., Side]:
    """A function that loads the tiny model once more, like another process. lora: None trains all of the transformer."""

    def make(lora: dict[str, Any] | None = LORA, dtype: str = "float32", device: str = "cpu") -> Side:
        return Side(make_rig(model={"lora": lora, "dtype": dtype}, run={"device": device, "seed": 11}))

    return make


class Peer:
    """A receiver in a process of its own; see peer.py."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("peer.py"))], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answers: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self._answers.put(line)

    def tell(self, do: str, **order: Any) -> None:
        self.process.stdin.write(json.dumps({"do": do, **order}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        return json.loads(self._answers.get(timeout=ANSWER_TIMEOUT_S))

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def end(self) -> None:
        self.process.kill()
        self.process.wait(timeout=10)
        self._reader.join(timeout=10)
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture(scope="module")
def pool() -> Iterator[list[Peer]]:
    """Receivers that are used again, since each takes seconds to start."""
    started: list[Peer] = []
    yield started
    for peer in started:
        peer.end()


@pytest.fixture
def peers(pool: list[Peer]) -> list[Peer]:
    """Two receivers, started and ready."""
    for peer in [peer for peer in pool if peer.process.poll() is not None]:
        pool.remove(peer)
        peer.end()
    fresh = [Peer() for _ in range(2 - len(pool))]
    pool.extend(fresh)
    assert all("ready" in peer.answer() for peer in fresh)
    return list(pool)
