"""Moving average of the trained weights.

Invariant: the trained weights are never aliased, and come back bit for bit when ``swapped`` ends, also after an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from digenrl.config.schema import EmaSection
from digenrl.training.group import write_whole


class Ema:
    """average <- d average + (1 - d) weights, with d = min((1 + n) / (10 + n), decay) after n earlier steps (as flow_grpo)."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], settings: EmaSection, changed: Callable[[], None] = lambda: None
    ) -> None:
        """changed: called whenever other weights have been put into the parameters."""
        self._parameters = parameters
        self._settings = settings
        self._changed = changed
        self.steps = 0
        """Updates asked for so far."""
        self.in_place = False
        """Whether the averaged weights stand where the trained ones belong."""
        self.average: dict[str, Tensor] = {name: p.detach().clone() for name, p in parameters.items()}
        """Averaged weights by name."""

    @torch.no_grad()
    def update(self) -> None:
        """Call once after every applied optimizer step; acts at every ``update_interval``-th call."""
        steps = self.steps
        self.steps += 1
        if self.steps % self._settings.update_interval:
            return
        decay = min((1 + steps) / (10 + steps), self._settings.decay)
        for name, parameter in self._parameters.items():
            self.average[name].lerp_(parameter.to(self.average[name].dtype), 1 - decay)

    def load(self, average: Mapping[str, Tensor], steps: int) -> None:
        """Go on from a saved average."""
        self.steps = steps
        for name, tensor in self.average.items():
            write_whole(tensor, average[name])

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """The averaged weights in place of the trained ones."""
        kept = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        self.in_place = True
        try:
            self._put(self.average)
            yield
        finally:
            try:
                self._put(kept)
            except BaseException:
                # A signal that drops the evaluation may strike in the middle of this; it strikes once.
                self._put(kept)
                raise
            finally:
                self.in_place = False

    @torch.no_grad()
    def _put(self, values: Mapping[str, Tensor]) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(values[name])
        self._changed()
