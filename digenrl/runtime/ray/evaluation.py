"""Evaluation on a cluster: one command of the trainer, for which three kinds of workers work in turn.

The held-out prompts are encoded once where the text encoders are, the trainer draws the latents with its averaged weights, and
whoever scores turns them into images and rewards. Invariant: a helper that is lost fails the evaluation, which is tried again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from ray import ObjectRef

from digenrl.data.prompts import Prompt
from digenrl.ids import SampleId
from digenrl.rewards.compose import join_rewards
from digenrl.runtime.journal import Journal
from digenrl.runtime.ray.answers import Pieces
from digenrl.runtime.ray.in_flight import GOES_ON, Call
from digenrl.runtime.ray.pool import Process, WorkerPool
from digenrl.scheduling.commands import Evaluate
from digenrl.workers.evaluator import evaluation_samples, summarise


class Runs(Protocol):
    """How a command goes on with other calls; InFlight.run with the present time."""

    def __call__(self, command: Evaluate, calls: Sequence[Call], finish: Callable[[list[Any]], Any]) -> None:
        """See InFlight.run."""
        ...


class RemoteEvaluation:
    """Evaluates versions of one run."""

    def __init__(
        self,
        pool: WorkerPool,
        prompts: Sequence[Prompt],
        num_pictures: int,
        journal: Journal,
        run: Runs,
        score_here: Callable[[Sequence[SampleId], Sequence[Prompt], Sequence[int], ObjectRef[Any]], Call] | None,
    ) -> None:
        """num_pictures: how many come back to be saved. score_here: scoring in this process, where the recipe asks for it."""
        self._pool = pool
        self._prompts = tuple(prompts)
        self._rows = range(min(num_pictures, len(self._prompts)))
        self._journal = journal
        self._run = run
        self._score_here = score_here
        self._conditioning: ObjectRef[Any] | None = None
        self._waiting: list[Callable[[], None]] = []

    def start(self, command: Evaluate, trainer: Sequence[Process]) -> None:
        """Begin to evaluate the version that the trainer is at."""
        if self._conditioning is None:
            encoder = self._helper("encode", lambda: self.start(command, trainer), command)
            if encoder is None:
                return
            _, self._conditioning = self._pool.call(encoder, "encode", self._prompts, num_returns=2)
        calls: list[Call] = []
        parts: list[tuple[range, ObjectRef[Any]]] = []
        count, ranks = len(self._prompts), len(trainer)
        shares = [range(rank * count // ranks, (rank + 1) * count // ranks) for rank in range(ranks)]
        for process, share in zip(trainer, shares, strict=True):
            # As many for every rank: a sharded network makes its passes together.
            numbers = [*share, *[0] * (max(map(len, shares)) - len(share))]
            arguments = (numbers, len(share), self._conditioning)
            first, latents = self._pool.call(process, "evaluate", *arguments, num_returns=2)
            calls.append((process, first))
            if share:
                parts.append((share, latents))

        def drawn(_: list[Any]) -> Any:
            self._score(command, parts)
            return GOES_ON

        self._run(command, calls, drawn)

    def forget_conditioning(self) -> None:
        """The encoded prompts are gone, or never came to be; the next evaluation encodes them anew."""
        self._conditioning = None

    def worker_is_back(self) -> None:
        """Somebody whom an evaluation may have waited for is up again."""
        waiting, self._waiting = self._waiting, []
        for goes_on in waiting:
            goes_on()

    def _score(self, command: Evaluate, parts: Sequence[tuple[range, ObjectRef[Any]]]) -> None:
        samples = evaluation_samples(command.policy_version, len(self._prompts))

        def scored(answers: list[Any]) -> None:
            pieces: list[Pieces] = answers
            pictures = np.concatenate([each.pictures for each in pieces])
            rewards = join_rewards([each.rewards for each in pieces])
            self._journal.evaluated(command.policy_version, summarise(pictures, rewards), self._prompts)

        scorer = None
        if self._score_here is None:
            scorer = self._helper("score", lambda: self._score(command, parts), command)
            if scorer is None:
                return
        calls: list[Call] = []
        for share, latents in parts:
            rows = [row - share.start for row in self._rows if row in share]
            arguments = ([samples[i] for i in share], [self._prompts[i] for i in share], rows, latents)
            if scorer is not None:
                calls.append((scorer, self._pool.call(scorer, "score_held_out", *arguments)[0]))
            elif self._score_here is not None:
                calls.append(self._score_here(*arguments))
        self._run(command, calls, scored)

    def _helper(self, role: str, goes_on: Callable[[], None], command: Evaluate) -> Process | None:
        """A process that is up and has a role; None when the evaluation has to wait for one."""
        found = next((process for process in self._pool.all() if process.up and role in process.rank.roles), None)
        if found is None:
            self._waiting.append(goes_on)
            self._run(command, [], _nothing)
        return found


def _nothing(_: list[Any]) -> None:
    return None
