"""Z, clipping, and what a non-finite number may touch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from digenrl.algorithms.base import GroupAdvantages, LossInputs, LossOutputs
from digenrl.algorithms.flow_grpo import FlowGRPO
from digenrl.config.schema import Recipe
from digenrl.diffusion.trajectory import Trajectory
from digenrl.errors import ProtocolError, RunFailed
from digenrl.ids import StepOutcome
from digenrl.training.digest import digest

RigMaker = Callable[..., Any]
Plain = Callable[..., dict[str, Tensor]]
NAN, INF = float("nan"), float("inf")
LORA = {"rank": 4, "alpha": 8}
STEPS = 3  # trained denoising steps of each sample in the small recipe
REWARDS = ([0.0, 1.0, 3.0], [2.0, 5.0, 1.0])
TRAIN = {"steps": 4, "learning_rate": 1e-3, "ema": {"decay": 0.5}}


def accumulate(rig: Any, *rewards: list[float], trajectory: Trajectory | None = None) -> None:
    rig.trainer.accumulate(trajectory or rig.trajectory(), rig.conditioning(), rig.advantages(*rewards))


def state(rig: Any) -> dict[str, str]:
    """Digest of parameters, optimizer and average."""
    return {part: digest(tensors) for part, tensors in rig.trainer.weights().items()}


def warmed_up(rig: Any) -> Any:
    """After one good step: momentum and average exist, so that a step on nothing would show."""
    accumulate(rig, *REWARDS)
    assert rig.trainer.optimizer_step().outcome is StepOutcome.APPLIED
    return rig


def first_gradient(rig: Any) -> dict[str, Tensor]:
    """The gradient that the first AdamW step was given: its first moment is (1 - beta1) of it."""
    optimizer = rig.trainer.weights()["optimizer"]
    return {name: optimizer[f"exp_avg.{name}"] / 0.1 for name in rig.policy.parameters}


def norm(tensors: dict[str, Tensor]) -> float:
    return float(torch.cat([t.flatten() for t in tensors.values()]).norm())


@pytest.mark.parametrize(
    ("rewards", "skip", "pairs"),
    [
        (REWARDS, False, 6 * STEPS),
        (([1.0, NAN, 3.0], [2.0, 5.0, INF]), False, 4 * STEPS),  # invalid samples are out
        (([1.0, 1.0, 1.0], [2.0, 5.0, 1.0]), False, 6 * STEPS),  # zero advantages are in
        (([1.0, 2.0, 3.0], [2.0, 5.0, 1.0]), False, 6 * STEPS),  # also the one sample that is its group's mean
        (([1.0, 1.0, 1.0], [2.0, 5.0, 1.0]), True, 3 * STEPS),  # unless constant groups are skipped
        (([NAN, NAN, 1.0], [2.0, 5.0, 1.0]), False, 4 * STEPS),
        (([NAN, NAN, 1.0], [2.0, 5.0, 1.0]), True, 3 * STEPS),
    ],
)
def test_z_counts_the_pairs_of_valid_samples(
    rewards: tuple[list[float], ...], skip: bool, pairs: int, make_rig: RigMaker
) -> None:
    rig = make_rig(algorithm={"type": "flow_grpo", "skip_zero_variance": skip})
    accumulate(rig, *rewards)
    report = rig.trainer.optimizer_step()
    assert report.metrics["trained_pairs"] == pairs
    assert report.metrics["nonfinite_pairs"] == 0
    assert report.outcome is StepOutcome.APPLIED


@pytest.mark.parametrize("lora", [None, LORA])
def test_the_optimizer_gets_the_sum_over_all_micro_batches_divided_once_by_z(
    lora: dict[str, Any] | None, make_rig: RigMaker, plain: Plain, rel: Callable[..., float]
) -> None:
    rig = make_rig(model={"lora": lora}, train={**TRAIN, "max_grad_norm": None})
    trajectory, advantages = rig.trajectory(), rig.advantages([1.0, NAN, 3.0], [4.0, 4.0, 4.0])
    z = 5 * STEPS
    wanted = {n: g / z for n, g in plain(rig, trajectory, [a.values.tolist() for a in advantages]).items()}
    text = rig.conditioning()
    for group in (0, 1):  # two micro-batches
        part = slice(3 * group, 3 * group + 3)
        tensors = ("noise_levels", "denoising_steps", "latents", "next_latents", "log_probs", "final_latents")
        piece = replace(trajectory, samples=trajectory.samples[part], **{n: getattr(trajectory, n)[part] for n in tensors})
        rig.trainer.accumulate(piece, text.select(torch.tensor([group])), advantages[group : group + 1])
    report = rig.trainer.optimizer_step()
    assert report.metrics["trained_pairs"] == z
    assert report.metrics["grad_norm"] == pytest.approx(norm(wanted), rel=1e-5)
    assert rel(first_gradient(rig), wanted) <= 1e-5


def test_the_gradient_is_clipped_after_the_division(make_rig: RigMaker, rel: Callable[..., float]) -> None:
    rig = make_rig(train={**TRAIN, "max_grad_norm": None})
    accumulate(rig, *REWARDS)
    unclipped = rig.trainer.optimizer_step().metrics["grad_norm"]
    whole = first_gradient(rig)
    limit = unclipped / 4
    clipped = make_rig(train={**TRAIN, "max_grad_norm": limit})
    accumulate(clipped, *REWARDS)
    assert clipped.trainer.optimizer_step().metrics["grad_norm"] == unclipped, "the metric is the norm before clipping"
    assert norm(first_gradient(clipped)) == pytest.approx(limit, rel=1e-4)
    assert rel(first_gradient(clipped), {name: g / 4 for name, g in whole.items()}) <= 1e-4
    loose = make_rig(train={**TRAIN, "max_grad_norm": unclipped * 1.1})  # the sum's norm would be 18 times larger
    accumulate(loose, *REWARDS)
    loose.trainer.optimizer_step()
    assert state(loose) == state(rig)


@pytest.mark.parametrize("rewards", [([NAN, NAN, NAN], [NAN, INF, NAN]), None])
def test_a_step_without_a_valid_pair_changes_nothing_but_the_version(
    rewards: tuple[list[float], ...] | None, make_rig: RigMaker
) -> None:
    rig = warmed_up(make_rig(train=TRAIN))
    before = state(rig)
    if rewards:
        accumulate(rig, *rewards)
    report = rig.trainer.optimizer_step()
    assert report.outcome is StepOutcome.EMPTY
    assert "grad_norm" not in report.metrics
    assert state(rig) == before
    assert rig.policy.version == 2


def test_a_step_of_constant_groups_is_empty_where_they_are_skipped(make_rig: RigMaker) -> None:
    rig = warmed_up(make_rig(train=TRAIN, algorithm={"type": "flow_grpo", "skip_zero_variance": True}))
    before = state(rig)
    accumulate(rig, [1.0, 1.0, 1.0], [2.0, 2.0, 2.0])
    assert rig.trainer.optimizer_step().outcome is StepOutcome.EMPTY
    assert state(rig) == before


def test_nothing_of_one_step_is_left_for_the_next(make_rig: RigMaker) -> None:
    one, two = make_rig(train=TRAIN), make_rig(train=TRAIN)
    accumulate(one, [NAN, NAN, NAN], [NAN, NAN, NAN])
    one.trainer.optimizer_step()
    one.policy.version = 0
    for rig in (one, two):
        accumulate(rig, *REWARDS)
    assert one.trainer.optimizer_step().metrics == two.trainer.optimizer_step().metrics
    assert state(one) == state(two)


def poisoned(trajectory: Trajectory, name: str, row: int, slot: int, value: float) -> Trajectory:
    tensor = getattr(trajectory, name).clone()
    tensor[row, slot] = value
    return replace(trajectory, **{name: tensor})


@pytest.mark.parametrize(("lora", "reduction"), [(None, "mean"), (LORA, "mean"), (None, "sum")])
@pytest.mark.parametrize(("row", "slot"), [(0, 0), (2, 2)])  # the last is the one that padding repeats
@pytest.mark.parametrize(("name", "value"), [("latents", NAN), ("next_latents", INF), ("log_probs", NAN), ("log_probs", -INF)])
def test_a_non_finite_pair_is_left_out_of_the_gradient_and_stays_in_z(
    name: str,
    value: float,
    row: int,
    slot: int,
    reduction: str,
    lora: dict[str, Any] | None,
    make_rig: RigMaker,
    plain: Plain,
    rel: Callable[..., float],
) -> None:
    # 9 pairs a group in batches of 5: the second batch is four pairs, and padding that repeats the last of them.
    rig = make_rig(
        model={"lora": lora},
        algorithm={"type": "flow_grpo", "log_prob_reduction": reduction, "clip_range": 1e-4},
        train={**TRAIN, "timestep_batch_size": 5},
    )
    good, advantages = rig.trajectory(), rig.advantages(*REWARDS)
    rig.trainer.accumulate(poisoned(good, name, row, slot, value), rig.conditioning(), advantages)
    if reduction == "mean":
        wanted = plain(rig, good, [a.values.tolist() for a in advantages], left_out=frozenset({(row, slot)}))
        assert rel(rig.gradient(), wanted) <= 1e-5
    report = rig.trainer.optimizer_step()
    assert report.outcome is StepOutcome.APPLIED
    assert (report.metrics["nonfinite_pairs"], report.metrics["trained_pairs"]) == (1, 6 * STEPS)
    assert all(np.isfinite(v) for v in report.metrics.values())
    assert all(bool(torch.isfinite(p).all()) for p in rig.policy.parameters.values())


def test_a_non_finite_pair_is_left_out_of_the_kl_too(make_rig: RigMaker, plain: Plain, rel: Callable[..., float]) -> None:
    rig = make_rig(algorithm={"type": "flow_grpo", "kl_beta": 0.04}, train={**TRAIN, "timestep_batch_size": 5})
    with torch.no_grad():
        for p in rig.policy.parameters.values():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)), alpha=0.05)
    good, advantages = rig.trajectory(), rig.advantages(*REWARDS)
    wanted = plain(rig, good, [a.values.tolist() for a in advantages], beta=0.04, left_out=frozenset({(2, 2)}))
    rig.trainer.accumulate(poisoned(good, "latents", 2, 2, NAN), rig.conditioning(), advantages)
    assert rel(rig.gradient(), wanted) <= 1e-5


@pytest.mark.parametrize("value", [NAN, INF])
def test_a_non_finite_advantage_never_reaches_a_parameter(value: float, make_rig: RigMaker) -> None:
    rig = warmed_up(make_rig(train=TRAIN))
    first, second = rig.advantages(*REWARDS)
    bad = GroupAdvantages(values=np.array([value, 0.5, -1.0]), kept=first.kept, zero_variance=False)
    rig.trainer.accumulate(rig.trajectory(), rig.conditioning(), [bad, second])
    report = rig.trainer.optimizer_step()
    assert report.outcome is StepOutcome.APPLIED
    assert report.metrics["nonfinite_pairs"] == STEPS
    assert all(bool(torch.isfinite(p).all()) for p in rig.policy.parameters.values())


class Poisoned(FlowGRPO):
    """Flow-GRPO whose loss goes wrong as ``fault`` says, once it is set."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe.algorithm.settings, recipe)  # type: ignore[arg-type]
        self.fault = "none"

    def loss(self, pairs: LossInputs) -> LossOutputs:
        out = super().loss(pairs)
        loss = out.loss
        if self.fault == "likeliest is nan":
            loss = torch.where(pairs.log_prob == pairs.log_prob.max(), NAN, loss)
        elif self.fault == "all nan":
            loss = loss * NAN
        elif self.fault == "gradient":
            loss = loss + (pairs.log_prob - pairs.log_prob.detach()).abs().sqrt()  # value 0, slope infinite
        elif self.fault == "mean":
            loss = loss.mean()
        return LossOutputs(loss=loss, metrics=out.metrics)


def test_a_loss_that_is_nan_for_some_pairs_leaves_out_those_pairs(make_rig: RigMaker) -> None:
    rig = make_rig(make_algorithm=Poisoned, train={**TRAIN, "timestep_batch_size": "all"})
    rig.algorithm.fault = "likeliest is nan"
    # The likeliest of those that are left is poisoned again, and so on: in the end nothing is left, and nothing hangs.
    accumulate(rig, *REWARDS)
    assert not any(bool(g.any()) for g in rig.gradient().values())
    report = rig.trainer.optimizer_step()
    assert report.metrics["nonfinite_pairs"] == 6 * STEPS
    assert report.outcome is StepOutcome.VOIDED


@pytest.mark.parametrize("lora", [None, LORA])
@pytest.mark.parametrize("fault", ["gradient", "all nan"])
def test_a_gradient_that_is_not_finite_or_not_there_voids_the_step_and_only_this_step(
    fault: str, lora: dict[str, Any] | None, make_rig: RigMaker
) -> None:
    rig = warmed_up(make_rig(make_algorithm=Poisoned, model={"lora": lora}, train=TRAIN))
    before = state(rig)
    rig.algorithm.fault = fault
    accumulate(rig, *REWARDS)
    report = rig.trainer.optimizer_step()
    assert report.outcome is StepOutcome.VOIDED
    assert state(rig) == before
    assert rig.policy.version == 2
    assert not any(bool(g.any()) for g in rig.gradient().values())
    rig.algorithm.fault = "none"
    accumulate(rig, *REWARDS)
    assert rig.trainer.optimizer_step().outcome is StepOutcome.APPLIED
    after = state(rig)
    assert all(after[part] != before[part] for part in after)
    assert all(bool(torch.isfinite(p).all()) for p in rig.policy.parameters.values())


def test_weights_that_overflow_in_the_network_void_the_step(make_rig: RigMaker) -> None:
    rig = make_rig(train=TRAIN)
    trajectory = rig.trajectory()
    with torch.no_grad():
        rig.adapter.transformer.proj_out.weight.fill_(1e38)
    before = state(rig)
    rig.trainer.accumulate(trajectory, rig.conditioning(), rig.advantages(*REWARDS))
    report = rig.trainer.optimizer_step()
    assert report.outcome is StepOutcome.VOIDED
    assert state(rig) == before


def test_a_loss_that_is_averaged_already_is_refused(make_rig: RigMaker) -> None:
    rig = make_rig(make_algorithm=Poisoned)
    rig.algorithm.fault = "mean"
    with pytest.raises(RunFailed, match="shape"):
        accumulate(rig, *REWARDS)


def test_a_trajectory_of_another_sigma_table_is_refused(make_rig: RigMaker) -> None:
    rig = make_rig()
    trajectory = rig.trajectory()
    sigmas = trajectory.sigmas.clone()
    sigmas[2] += 0.01
    with pytest.raises(ProtocolError, match="sigmas"):
        accumulate(rig, *REWARDS, trajectory=replace(trajectory, sigmas=sigmas))
    other = make_rig(rollout={"num_inference_steps": 5})
    with pytest.raises(ProtocolError, match="sigmas"):
        accumulate(other, *REWARDS, trajectory=trajectory)


def test_groups_text_and_advantages_that_do_not_fit_are_refused_before_anything_is_added(make_rig: RigMaker) -> None:
    rig = make_rig()
    trajectory, text, advantages = rig.trajectory(), rig.conditioning(), rig.advantages(*REWARDS)
    order = torch.tensor([0, 3, 1, 4, 2, 5])
    tensors = ("noise_levels", "denoising_steps", "latents", "next_latents", "log_probs", "final_latents")
    shuffled = replace(
        trajectory,
        samples=tuple(trajectory.samples[i] for i in order),
        **{name: getattr(trajectory, name)[order] for name in tensors},
    )
    for wrong in (
        (shuffled, text, advantages),
        (trajectory, text.select(torch.tensor([0])), advantages),
        (trajectory, text, advantages[:1]),
        (trajectory, text, [*advantages, advantages[0]]),
    ):
        with pytest.raises(ProtocolError, match="groups of advantages"):
            rig.trainer.accumulate(*wrong)
    assert not any(bool(g.any()) for g in rig.gradient().values())


def test_weights_change_in_the_optimizer_step_alone(make_rig: RigMaker) -> None:
    rig = make_rig(train=TRAIN)
    before = state(rig)
    accumulate(rig, *REWARDS)
    assert state(rig) == before
    rig.trainer.optimizer_step()
    assert state(rig)["parameters"] != before["parameters"]


def test_the_learning_rate_of_a_step_is_the_schedules(make_rig: RigMaker) -> None:
    rig = make_rig(train={**TRAIN, "lr_schedule": "linear", "lr_warmup_steps": 2})
    rates = []
    for _ in range(4):
        accumulate(rig, *REWARDS)
        rates.append(rig.trainer.optimizer_step().metrics["learning_rate"])
        assert rig.trainer.optimizer.param_groups[0]["lr"] == rates[-1]
    assert rates == pytest.approx([5e-4, 1e-3, 1e-3, 0.0])


def test_weights_are_named_by_parameter_in_all_parts(make_rig: RigMaker) -> None:
    rig = make_rig(model={"lora": LORA}, train=TRAIN)
    names = set(rig.policy.parameters)
    assert rig.trainer.weights()["optimizer"] == {}
    warmed_up(rig)
    weights = rig.trainer.weights()
    assert set(weights) == {"parameters", "optimizer", "ema"}
    assert set(weights["parameters"]) == set(weights["ema"]) == names
    assert set(weights["optimizer"]) == {f"{key}.{name}" for name in names for key in ("exp_avg", "exp_avg_sq", "step")}
    assert not any(t.requires_grad for part in weights.values() for t in part.values())
    assert make_rig().trainer.weights()["ema"] == {}


def test_metrics_are_averaged_over_real_pairs_and_not_over_padding(make_rig: RigMaker) -> None:
    class Counting(FlowGRPO):
        def __init__(self, recipe: Recipe) -> None:
            super().__init__(recipe.algorithm.settings, recipe)  # type: ignore[arg-type]
            self.seen = 0

        def loss(self, pairs: LossInputs) -> LossOutputs:
            out = super().loss(pairs)
            self.seen += len(pairs.log_prob)
            return LossOutputs(loss=out.loss, metrics={"old": pairs.old_log_prob, "advantage": pairs.advantages})

    rig = make_rig(make_algorithm=Counting, train={**TRAIN, "timestep_batch_size": 4})
    trajectory, advantages = rig.trajectory(), rig.advantages(*REWARDS)
    rig.trainer.accumulate(trajectory, rig.conditioning(), advantages)
    metrics = rig.trainer.optimizer_step().metrics
    assert rig.algorithm.seen == 6 * STEPS
    assert metrics["old"] == pytest.approx(float(trajectory.log_probs.mean()), rel=1e-5)
    assert metrics["advantage"] == pytest.approx(0.0, abs=1e-6)
