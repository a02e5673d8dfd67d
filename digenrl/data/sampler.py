"""Which prompts a step trains on: a pure function of (seed, step), so resuming and re-running need no stored state.

Invariants: a step never holds a prompt twice unless there are too few (then they cycle, with a warning at start); with
``stratify_by`` every value has P / V of the P prompts of a step, rounded down or up, and exactly equal shares over time;
every prompt is drawn sooner or later, and without ``shuffle`` equally often.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from digenrl.data.prompts import Prompt
from digenrl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stratum:
    """Prompts that share one value of ``stratify_by``, drawn pass after pass, in a new seeded order in each."""

    name: str
    indices: tuple[int, ...]
    chunk: int
    """The most prompts that a step draws here. Each of its turns has a chunk of the pass to itself: a pass that ended
    within a step could give it a prompt twice."""
    seed: int
    shuffle: bool

    def draw(self, step: int, before: int, count: int) -> list[int]:
        """``count`` indices into the file for a step, after the ``before`` that earlier steps have drawn here."""
        size = len(self.indices)
        if not self.shuffle:
            return [self.indices[(before + i) % size] for i in range(count)]
        turn = min(step, before)  # of the steps before this one, those that drew here at all
        chunks = max(1, size // self.chunk)
        order = _order(size, self.seed, self.name, turn // chunks)
        start = (turn % chunks) * self.chunk
        return [self.indices[order[(start + i) % size]] for i in range(count)]


class PromptSampler:
    """Draws the P prompts of any step. ``warnings`` says what a user should know before the run."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        prompts_per_step: int,
        seed: int,
        shuffle: bool = True,
        stratify_by: str | None = None,
    ) -> None:
        self._prompts = tuple(prompts)
        self._count = prompts_per_step
        if not self._prompts:
            raise ConfigError("There are no prompts to draw from.", fix="Write at least one into the file of data.prompts.")
        groups = _group(self._prompts, stratify_by)
        chunk = -(-prompts_per_step // len(groups))
        self._strata = tuple(
            _Stratum(name=name, indices=indices, chunk=chunk, seed=seed, shuffle=shuffle) for name, indices in groups.items()
        )
        self.warnings: tuple[str, ...] = tuple(
            f"{len(s.indices)} prompts{f' with {stratify_by} = {s.name}' if stratify_by else ''} are fewer than the "
            f"{chunk} that a step needs: they cycle, so a step holds some of them more than once"
            for s in self._strata
            if len(s.indices) < chunk
        )

    def indices_of_step(self, step: int) -> tuple[int, ...]:
        """Indices into the file of the P prompts of RL step ``step``, in group order."""
        # Slot i of the endless row of slots belongs to stratum i mod V: the ones that get one more take turns.
        strata, first = len(self._strata), step * self._count
        slots = [(first + i) % strata for i in range(self._count)]
        drawn = {}
        for number in set(slots):
            before = (first + strata - 1 - number) // strata
            drawn[number] = iter(self._strata[number].draw(step, before, slots.count(number)))
        return tuple(next(drawn[slot]) for slot in slots)

    def prompts_of_step(self, step: int) -> tuple[Prompt, ...]:
        """The P prompts of RL step ``step``, in group order."""
        return tuple(self._prompts[i] for i in self.indices_of_step(step))


def _group(prompts: tuple[Prompt, ...], stratify_by: str | None) -> dict[str, tuple[int, ...]]:
    if stratify_by is None:
        return {"": tuple(range(len(prompts)))}
    groups: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        if stratify_by not in prompt.metadata:
            raise ConfigError(
                f"data.stratify_by: prompt {prompt.text!r} has no field {stratify_by!r}.",
                why="Stratified drawing needs the field in every line of data.prompts.",
                fix=f"Add it, or leave data.stratify_by out. This line has: {', '.join(prompt.metadata) or 'no fields'}.",
            )
        groups.setdefault(str(prompt.metadata[stratify_by]), []).append(index)
    return {name: tuple(groups[name]) for name in sorted(groups)}


@lru_cache(maxsize=256)
def _order(size: int, seed: int, name: str, epoch: int) -> tuple[int, ...]:
    digest = hashlib.blake2b(f"prompt-order/{seed}/{name}/{epoch}".encode(errors="surrogatepass"), digest_size=16).digest()
    order = list(range(size))
    random.Random(int.from_bytes(digest, "big")).shuffle(order)
    return tuple(order)
