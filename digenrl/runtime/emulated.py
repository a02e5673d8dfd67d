"""Emulated workers: they take a command's time and answer with stand-ins, so that schedule, driver and cluster are seen alone.

No picture is made and nothing is learned. Imports neither torch nor Ray, so that 64 such workers start within a minute on two
cores, and take 0.1 GB each. Invariants: a command takes its whole duration in the worker, whatever its way there took; a reward
is a function of its sample's id; what a real worker refuses (another version, the wrong mode), an emulated one refuses, too.
"""

from __future__ import annotations

import hashlib
import math
import os
import random
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from digenrl.config.schema import Recipe
from digenrl.data.prompts import Prompt
from digenrl.errors import ProtocolError
from digenrl.ids import SampleId, StepOutcome, WorkerId
from digenrl.rewards.compose import Rewards
from digenrl.runtime.ray.answers import Hello, Pieces
from digenrl.scheduling.step_model import StepCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """Seconds that one worker takes for its commands; of a full micro-batch where they are about one."""

    encode: float = 0.0
    generate: float = 0.0
    score: float = 0.0
    update: float = 0.0
    switch_in: float = 0.0
    switch_out: float = 0.0
    optimizer: float = 0.0
    sync: float = 0.0
    """To publish or to load a version."""
    save: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scatter:
    """How durations vary, as in a simulation; drawn by worker and command, so that a worker's draws are its own."""

    jitter: float = 0.0
    """Coefficient of variation of every duration (log-normal)."""
    straggler_share: float = 0.0
    """Share of commands that are stragglers."""
    straggler_factor: float = 5.0
    """How many times longer a straggler takes."""
    seed: int = 0

    def factor(self, *key: object) -> float:
        """What the nominal duration of one command is multiplied with."""
        if not (self.jitter or self.straggler_share):
            return 1.0
        draw = random.Random(_hash(self.seed, *key))
        factor = 1.0
        if self.jitter:
            sigma = math.sqrt(math.log1p(self.jitter**2))
            factor = draw.lognormvariate(-sigma * sigma / 2, sigma)
        return factor * (self.straggler_factor if draw.random() < self.straggler_share else 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """A worker's process ends by itself, once."""

    worker: WorkerId
    at_command: int
    """In the middle of which of its commands, from 1. The first one of a generator is to load the starting weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedCosts:
    """What emulated workers take, and what goes wrong with them."""

    durations: Mapping[WorkerId, Durations]
    samples_per_micro_batch: int
    """Of a full one; a smaller one takes its share."""
    time_scale: float = 1.0
    """Real seconds per second of the durations."""
    scatter: Scatter = field(default_factory=Scatter)
    deaths: tuple[Death, ...] = ()
    weight_bytes: int = 0
    """Published with every version, and fetched by whoever loads it."""

    def plan(self, worker: WorkerId, incarnation: int) -> WorkerPlan:
        """What one process has to know. Only the first one of a worker dies by itself."""
        dies = [death.at_command for death in self.deaths if death.worker == worker and not incarnation]
        nominal = self.durations[worker]
        return WorkerPlan(
            worker=worker,
            incarnation=incarnation,
            durations=Durations(**{each.name: self.time_scale * getattr(nominal, each.name) for each in fields(nominal)}),
            samples_per_micro_batch=self.samples_per_micro_batch,
            scatter=self.scatter,
            dies_at=min(dies, default=None),
            weight_bytes=self.weight_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """An emulated process. ``durations`` are real seconds."""

    worker: WorkerId
    incarnation: int = 0
    durations: Durations
    samples_per_micro_batch: int
    scatter: Scatter = field(default_factory=Scatter)
    dies_at: int | None = None
    weight_bytes: int = 0
    updates_per_rollout: int = 1
    takes_turns: bool = False
    """Whether it is a trainer of its own, which is told when to generate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulation:
    """A run whose workers are emulated."""

    preset: str
    """Where the durations come from, as it is shown beside every result."""
    costs: EmulatedCosts
    known: StepCosts | None = None
    """What the searches plan with, in real microseconds; estimates made as the run goes if None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StandIn:
    """In place of a trajectory."""

    num_samples: int
    policy_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StandInManifest:
    """In place of a Publication."""

    version: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StandInReport:
    """In place of a StepReport: what is read of one."""

    outcome: StepOutcome = StepOutcome.APPLIED
    common: Mapping[str, float] = field(default_factory=dict)
    sums: Mapping[str, Any] = field(default_factory=dict)


def without_pictures(recipe: Recipe) -> Recipe:
    """The recipe without what looks at pictures: there are none, so none are saved and no version is evaluated."""
    return recipe.model_copy(update={"eval": None, "log": recipe.log.model_copy(update={"sample_freq": 0})})


class EmulatedHost:
    """Answers what a WorkerHost answers, after as long as it would take."""

    def __init__(
        self,
        plan: WorkerPlan,
        *,
        sleep: Callable[[float], None] = time.sleep,
        die: Callable[[], None] = lambda: os.kill(os.getpid(), signal.SIGKILL),
    ) -> None:
        self._plan = plan
        self._takes = plan.durations
        self._sleep = sleep
        self._die = die
        self._commands = 0
        self._version = 0
        self._update = 0
        self._generating = False

    def hello(self) -> Hello:
        """See WorkerHost, as for the methods below."""
        return Hello(pid=os.getpid(), device="emulated", num_parameters=0, num_buckets=1 if self._plan.weight_bytes else 0)

    def check_folder(self, path: str, token: str) -> None:
        """Nothing is written."""

    def encode(self, prompts: Sequence[Prompt]) -> tuple[set[str], dict[str, Any]]:
        """No prompt is cut off."""
        self._spend(self._takes.encode)
        return set(), {}

    def generate(
        self, samples: Sequence[SampleId], policy_version: int, conditioning: Mapping[str, Any], real: int | None = None
    ) -> tuple[float, StandIn, None]:
        """Seconds, and a stand-in without latents."""
        self._check_mode(generating=True)
        if policy_version != self._version:
            raise ProtocolError(
                f"{self._plan.worker} holds version {self._version} of the weights, and version {policy_version} is asked for.",
                why="A trajectory is made under one known version.",
                fix="This is a bug in the executor or scheduler; please report it with the run's trace.jsonl.",
            )
        count = len(samples) if real is None else real
        seconds = self._spend(self._takes.generate, samples=len(samples))
        return seconds, StandIn(num_samples=count, policy_version=policy_version), None

    def score(
        self, samples: Sequence[SampleId], prompts: Sequence[Prompt], picture_rows: Sequence[int], *latents: None
    ) -> Pieces:
        """A reward from 0 to 1 for each sample, drawn from its id."""
        assert not picture_rows, "an emulated run saves no pictures"
        self._spend(self._takes.score, samples=len(samples))
        totals = np.array([reward_of(sample) for sample in samples])
        pictures: NDArray[np.uint8] = np.zeros((0, 8, 8, 3), dtype=np.uint8)
        return Pieces(rewards=Rewards(totals=totals, parts={"emulated": totals}), pictures=pictures)

    def score_held_out(self, *arguments: Any) -> Pieces:
        """Never asked."""
        raise AssertionError("an emulated run evaluates nothing")

    def accumulate(
        self,
        prompts: Sequence[int],
        advantages: Sequence[Any],
        more_to_come: bool,
        conditioning: Mapping[str, Any],
        *parts: StandIn,
    ) -> float:
        """Returns seconds."""
        self._check_mode(generating=False)
        versions = {part.policy_version for part in parts}
        if len(versions) != 1 or not self._version - 1 <= min(versions) <= self._version:
            raise ProtocolError(
                f"The trainer is at version {self._version} and was given a trajectory of version {sorted(versions)}.",
                why="A trajectory has one version, which is the trainer's or the one before.",
                fix="This is a bug in the executor or scheduler; please report it with the run's trace.jsonl.",
            )
        return self._spend(self._takes.update, samples=sum(part.num_samples for part in parts))

    def optimizer_step(self) -> StandInReport:
        """A step that has done nothing but count."""
        self._check_mode(generating=False)
        self._spend(self._takes.optimizer)
        self._update = (self._update + 1) % self._plan.updates_per_rollout
        self._version += not self._update
        return StandInReport()

    def switch(self, generating: bool) -> float:
        """Returns seconds."""
        seconds = self._spend(self._takes.switch_in if generating else self._takes.switch_out)
        self._generating = generating
        return seconds

    def stage(self) -> StandInManifest | tuple[StandInManifest, NDArray[np.uint8]]:
        """The present version's manifest and bytes, if any, at once: they are loaded while ``publish`` takes its time."""
        manifest, size = StandInManifest(version=self._version, digest=digest_of(self._version)), self._plan.weight_bytes
        return (manifest, np.zeros(size, dtype=np.uint8)) if size else manifest

    def publish(self) -> StandInManifest:
        """As long as it takes."""
        self._spend(self._takes.sync)
        return StandInManifest(version=self._version, digest=digest_of(self._version))

    def load(self, manifest: StandInManifest, *buckets: NDArray[np.uint8]) -> str:
        """Returns the digest of the version that is then held."""
        self._spend(self._takes.sync)
        self._version = manifest.version
        return digest_of(self._version)

    def weights_digest(self) -> tuple[int, str]:
        """Where a pool does everything in turn, this stands for its turning over, and takes as long."""
        self._spend(self._takes.sync)
        return self._version, digest_of(self._version)

    def save(self, folder: str, state: Mapping[str, Any], keep_last: int) -> None:
        """Nothing is written: there are no weights to go on with."""
        self._spend(self._takes.save)

    def digests(self) -> dict[str, str]:
        """There are no weights."""
        return {}

    def _spend(self, seconds: float, *, samples: int | None = None) -> float:
        """Take the time of one command. Returns seconds."""
        plan = self._plan
        self._commands += 1
        share = 1.0 if samples is None else samples / plan.samples_per_micro_batch
        seconds *= share * plan.scatter.factor(plan.worker, plan.incarnation, self._commands)
        if self._commands == plan.dies_at:
            self._sleep(seconds / 2)
            self._die()
        if seconds:
            self._sleep(seconds)
        return seconds

    def _check_mode(self, *, generating: bool) -> None:
        if self._plan.takes_turns and self._generating != generating:
            modes = ("training", "generating")
            raise ProtocolError(
                f"The trainer is in {modes[self._generating]} mode, and this needs {modes[generating]} mode.",
                why="Generation and training share its memory and must not mix.",
                fix="This is a bug in the executor or scheduler; please report it with the run's trace.jsonl.",
            )


def reward_of(sample: SampleId) -> float:
    """From 0 to 1, the same in every run."""
    return _hash(sample.step, sample.prompt, sample.sample) / 2**64


def digest_of(version: int) -> str:
    """Stands for the digest of the weights of a version."""
    return f"emulated-{version}"


def _hash(*key: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big")
