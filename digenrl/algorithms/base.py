"""What an algorithm has to provide. It sees log-probabilities and means, never a network or latents' meaning.

Invariant: the loss is a sum over pairs; whoever steps the optimizer divides by Z once, so the gradient does not depend on
how pairs were packed into batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from digenrl.ids import SampleId

if TYPE_CHECKING:  # advantages go to workers that know no torch, too
    from torch import Tensor

    from digenrl.diffusion.dynamics import Dynamics
    from digenrl.diffusion.sampler import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardTable:
    """Rewards of P complete groups of G samples."""

    total: NDArray[np.float64]
    """[P, G], the weighted sum of all rewards; NaN or infinite where a sample is invalid."""
    by_reward: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    """Each reward of the recipe by name, unweighted: [P, G]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAdvantages:
    """Advantages of the G samples of one prompt."""

    values: NDArray[np.float64]
    """[G], or [G, K] where the loss looks at K rewards apart; 0 for invalid samples."""
    kept: NDArray[np.bool_]
    """[G]; samples that count in the loss and in Z."""
    zero_variance: bool
    """Whether all valid rewards were equal: nothing to learn from this group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """N (sample, denoising step) pairs."""

    log_prob: Tensor
    """[N], under the weights in training; carries the gradient."""
    old_log_prob: Tensor
    """[N], under the version that generated the step."""
    advantages: Tensor
    """[N] float32, or [N, K] where GroupAdvantages has K of them; not yet clamped."""
    mean: Tensor
    """[N, *latent], mean of the step; carries the gradient."""
    transition_std: Tensor
    """[N], the Gaussian's own standard deviation."""
    dt: Tensor
    """[N], sigma_next - sigma < 0."""
    velocity: Tensor
    """[N, *latent], what the network predicts; carries the gradient."""
    reference_mean: Tensor | None
    """[N, *latent] of the starting model, or None where the algorithm needs none."""
    reference_velocity: Tensor | None
    """As ``reference_mean``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutputs:
    """Loss and metrics of N pairs."""

    loss: Tensor
    """[N], to be summed."""
    metrics: dict[str, Tensor]
    """Name -> [N] values without gradient, averaged over all pairs of the step for the logs."""


class Algorithm(Protocol):
    """One algorithm. ``__init__(self, settings, recipe)``; a class of your own also has an inner ``Settings``."""

    dynamics: Dynamics
    """How a step is drawn and what its log-probability is, in rollout and training alike."""
    log_prob_reduction: Literal["mean", "sum"]
    needs_reference: bool
    """Whether the loss looks at the starting model."""

    def plan_steps(self, samples: Sequence[SampleId], num_inference_steps: int) -> StepPlan:
        """Which steps are noisy and which are trained; a pure function of the ids and the run seed."""
        ...

    def advantages(self, rewards: RewardTable) -> list[GroupAdvantages]:
        """Advantages of complete groups: all groups of the step where batch statistics are used (``schedule.update_after:
        step``), else those of one micro-batch.
        """
        ...

    def loss(self, pairs: LossInputs) -> LossOutputs:
        """The loss of each pair, from that pair alone: the pairs that are given together are an accident of packing.

        Where ``needs_reference`` is false, a pair of advantage 0 must add nothing to the gradient: it counts in Z, and its
        forward pass is saved.
        """
        ...
