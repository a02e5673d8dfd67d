"""All that a schedule depends on. Written into the head of every trace, so that a run can be replayed from its record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from digenrl.ids import WorkerId
from digenrl.scheduling.costs import MeasuredTask
from digenrl.scheduling.step_model import StepCosts

TagPolicy = Literal["never", "static", "greedy", "bts", "bts_plus"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """One run's schedule. Raises ValueError on what no schedule can carry out."""

    steps: int
    """RL steps of the run."""
    micro_batches: int
    """Micro-batches B of one step."""
    generators: tuple[WorkerId, ...]
    """Generator replicas, in order of index."""
    trainer: WorkerId
    """Worker that accumulates and steps; may be one of the generators (one pool that works in turn)."""
    scoring: Literal["generator", "pool", "inline"] = "generator"
    """Who scores: generators (before new generation), workers of their own, or generation itself."""
    scorers: tuple[WorkerId, ...] = ()
    """Workers of ``scoring: pool``."""
    encoders: tuple[WorkerId, ...] = ()
    """Generators that hold the text encoders; all of them when empty."""
    update_order: Literal["arrival", "index"] = "arrival"
    update_after: Literal["group", "step"] = "group"
    updates_per_rollout: int = 1
    """Optimizer steps per RL step, over contiguous ranges of micro-batches."""
    tag: TagPolicy = "never"
    """When an idle trainer generates (TAG)."""
    tag_static: int = 0
    """Micro-batches that the trainer generates in every step with ``tag: static``."""
    replan: Literal["bubble", "step"] = "bubble"
    """How often ``bts_plus`` plans: at every bubble, or at the first one of a step."""
    max_stale_fraction: float = 0.0
    """Share of the next step's micro-batches that may be generated with the present weights (TCSS)."""
    max_attempts: int = 3
    """Failures of one micro-batch that stop the run."""
    max_skipped_steps: int = 3
    """Voided steps in a row that stop the run."""
    evaluate_at: tuple[int, ...] = ()
    """Policy versions to evaluate, ascending."""
    save_at: tuple[int, ...] = ()
    """Policy versions to write a checkpoint of, ascending."""
    first_version: int = 0
    """Version that the run starts from: completed RL steps of the run that it continues."""
    stale_claims: tuple[int, ...] = ()
    """Micro-batches of step ``first_version`` that the run which this one continues had claimed under version
    ``first_version`` - 1, ascending; they are generated under that version again."""
    skipped_before: int = 0
    """Voided steps in a row just before ``first_version``."""
    measured: tuple[MeasuredTask, ...] = ()
    """Durations measured before ``first_version``."""
    costs: StepCosts | None = None
    """Known durations in microseconds; measured as the run goes when None."""
    partial_last: bool = False
    """Whether the last micro-batch is smaller than the others, so that its durations say nothing about theirs."""
    groups_per_micro_batch: int = 1
    """Only to name prompts in messages."""

    def __post_init__(self) -> None:
        self._check_counts()
        self._check_workers()
        self._check_stale_claims()
        for name in ("evaluate_at", "save_at"):
            versions = getattr(self, name)
            if list(versions) != sorted(set(versions)) or any(not self.first_version <= v <= self.steps for v in versions):
                raise ValueError(f"{name} {versions} must be ascending versions from {self.first_version} to {self.steps}")

    def _check_counts(self) -> None:
        if self.steps < 0 or min(self.micro_batches, self.max_skipped_steps, self.max_attempts) < 1:
            raise ValueError(
                f"steps ({self.steps}) must be at least 0; micro_batches ({self.micro_batches}), max_skipped_steps "
                f"({self.max_skipped_steps}) and max_attempts ({self.max_attempts}) at least 1"
            )
        if not 0 <= self.first_version <= self.steps:
            raise ValueError(f"first_version ({self.first_version}) must be from 0 to the {self.steps} steps")
        if not 0 <= self.tag_static <= self.micro_batches:
            raise ValueError(f"tag_static ({self.tag_static}) must be from 0 to the {self.micro_batches} micro-batches of a step")
        if not 0 <= self.max_stale_fraction <= 1:
            raise ValueError(f"max_stale_fraction ({self.max_stale_fraction}) must be from 0 to 1")
        if not 1 <= self.updates_per_rollout <= self.micro_batches:
            raise ValueError(f"updates_per_rollout ({self.updates_per_rollout}) must be from 1 to {self.micro_batches}")

    def _check_workers(self) -> None:
        if not self.generators or len(set(self.generators)) < len(self.generators):
            raise ValueError(f"generators {self.generators} must be distinct, and at least one")
        if (self.scoring == "pool") != bool(self.scorers) or set(self.scorers) & {*self.generators, self.trainer}:
            raise ValueError(f"scorers {self.scorers} must be workers of their own, and are for scoring: pool alone")
        if not set(self.encoders) <= set(self.generators):
            raise ValueError(f"encoders {self.encoders} must be generators")
        if self.one_pool and (self.tag != "never" or self.max_stale_fraction):
            raise ValueError("tag and max_stale_fraction need a trainer that is not one of the generators")
        if self.costs is not None and len(self.costs.generate) != len(self.generators):
            raise ValueError(f"costs are given for {len(self.costs.generate)} generators, and there are {len(self.generators)}")

    def _check_stale_claims(self) -> None:
        claims = self.stale_claims
        if not claims:
            return
        if list(claims) != sorted(set(claims)) or not 0 <= claims[0] <= claims[-1] < self.micro_batches:
            raise ValueError(f"stale_claims {claims} must be ascending indices of a step's {self.micro_batches} micro-batches")
        if not 1 <= self.first_version < self.steps:
            raise ValueError(
                f"stale_claims {claims} need a version before first_version ({self.first_version}) and a step after it "
                f"(steps: {self.steps})"
            )
        if len(claims) > self.stale_quota:  # which is 0 in one pool
            raise ValueError(
                f"stale_claims {claims} are {len(claims)}, and max_stale_fraction ({self.max_stale_fraction}) allows "
                f"{self.stale_quota} of the {self.micro_batches} micro-batches of a step to be stale"
            )

    @property
    def one_pool(self) -> bool:
        """Whether the trainer is one of the generators and everything happens in turn."""
        return self.trainer in self.generators

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        """All workers: generators, scorers, trainer; the order in which they are given work."""
        return (*self.generators, *self.scorers, *(() if self.one_pool else (self.trainer,)))

    @property
    def stale_quota(self) -> int:
        """Micro-batches of a step that may be stale."""
        return stale_quota(self.max_stale_fraction, self.micro_batches)

    def update_range(self, update: int) -> tuple[int, int]:
        """Micro-batch indices [low, high) of one of the step's updates."""
        return (
            update * self.micro_batches // self.updates_per_rollout,
            (update + 1) * self.micro_batches // self.updates_per_rollout,
        )


def stale_quota(max_stale_fraction: float, micro_batches: int) -> int:
    """Of a step's micro-batches B, those that may be stale: floor(max_stale_fraction B)."""
    # The epsilon keeps 0.29 * 100 = 28.999999999999996 and its kind from losing one to rounding.
    return int(max_stale_fraction * micro_batches + 1e-9)
