"""The start gate, and several optimizer steps per rollout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from digenrl.errors import ProtocolError, RunFailed
from digenrl.ids import StepOutcome
from digenrl.training.optim import size_of_last_change
from digenrl.training.report import StepReport, Sums, merged_updates
from digenrl.training.start_gate import start_gate_of

RigMaker = Callable[..., Any]
REWARDS = ([0.0, 1.0, 3.0], [2.0, 5.0, 1.0])
TRAIN = {"steps": 4, "learning_rate": 1e-3}


def accumulate(rig: Any, *, shifted_by: float = 0.0, step: int = 0) -> None:
    trajectory = rig.trajectory(step=step)
    shifted = replace(trajectory, log_probs=trajectory.log_probs + shifted_by)
    rig.trainer.accumulate(shifted, rig.conditioning(), rig.advantages(*REWARDS))


def weights(rig: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in rig.policy.parameters.values()]).clone()


def test_a_run_whose_rollout_and_training_disagree_by_more_than_a_clip_is_refused_before_anything_changes(
    make_rig: RigMaker,
) -> None:
    rig = make_rig(train=TRAIN)
    before = weights(rig)
    accumulate(rig, shifted_by=1.1e-4)
    with pytest.raises(RunFailed, match=r"1\.1 times algorithm\.clip_range") as refused:
        rig.trainer.optimizer_step()
    assert "rollout.forward_batch_size" in str(refused.value) and "start_gate_refuse" in str(refused.value)
    assert torch.equal(weights(rig), before)
    assert rig.policy.version == 0


def test_the_limit_is_a_setting_and_later_steps_are_not_judged(make_rig: RigMaker) -> None:
    rig = make_rig(train=TRAIN, algorithm={"type": "flow_grpo", "start_gate_refuse": 2.0})
    accumulate(rig, shifted_by=1.1e-4)
    assert rig.trainer.optimizer_step().metrics["logprob_abs_diff"] == pytest.approx(1.1e-4, rel=0.2)
    accumulate(rig, shifted_by=1.0, step=1)
    assert rig.trainer.optimizer_step().outcome is StepOutcome.APPLIED


def test_in_float32_at_equal_shapes_a_deterministic_run_has_no_difference_at_all(make_rig: RigMaker) -> None:
    exact = {"train": {**TRAIN, "timestep_batch_size": 3, "deterministic": True}}
    rig = make_rig(**exact)
    assert start_gate_of(rig.recipe).exact
    accumulate(rig)
    metrics = rig.trainer.optimizer_step().metrics
    assert (metrics["logprob_abs_diff"], metrics["ratio_mean"], metrics["ratio_std"]) == (0.0, 1.0, 0.0)
    other = make_rig(**exact)
    accumulate(other, shifted_by=1e-6)
    with pytest.raises(RunFailed, match=r"train\.deterministic"):
        other.trainer.optimizer_step()


@pytest.mark.parametrize("train", [{"timestep_batch_size": 4, "deterministic": True}, {"timestep_batch_size": 3}])
def test_other_shapes_and_other_runs_may_differ_by_less_than_a_clip(train: dict[str, Any], make_rig: RigMaker) -> None:
    rig = make_rig(train={**TRAIN, **train})
    assert not start_gate_of(rig.recipe).exact
    accumulate(rig, shifted_by=1e-6)
    assert rig.trainer.optimizer_step().outcome is StepOutcome.APPLIED


def test_trajectories_of_the_version_before_are_not_judged_and_their_ratios_are_apart(make_rig: RigMaker) -> None:
    rig = make_rig(train=TRAIN)
    stale = rig.trajectory()
    rig.policy.version = 1
    shifted = replace(stale, log_probs=stale.log_probs + 0.5)
    rig.trainer.accumulate(shifted, rig.conditioning(), rig.advantages(*REWARDS))
    metrics = rig.trainer.optimizer_step().metrics
    assert metrics["stale/logprob_abs_diff"] == pytest.approx(0.5, rel=1e-2)
    assert "logprob_abs_diff" not in metrics


def test_the_version_grows_with_the_last_of_two_updates_and_nothing_is_generated_or_saved_between_them(
    make_rig: RigMaker,
) -> None:
    rig = make_rig(train=TRAIN, algorithm={"type": "flow_grpo", "updates_per_rollout": 2})
    first, second = rig.trajectory(), rig.trajectory()
    rig.trainer.accumulate(first, rig.conditioning(), rig.advantages(*REWARDS))
    one = rig.trainer.optimizer_step().metrics
    assert rig.policy.version == 0
    assert not rig.trainer.settled
    with pytest.raises(ProtocolError, match="between two updates"):
        rig.trajectory()
    rig.trainer.accumulate(second, rig.conditioning(), rig.advantages(*REWARDS))
    two = rig.trainer.optimizer_step().metrics
    rig.trainer.stepping = False
    assert rig.policy.version == 1
    assert rig.trainer.settled
    assert one["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert "ratio_mean" not in two, "the ratio before the first update is numerical noise; later ones are not"
    assert two["later_updates/logprob_abs_diff"] > 10 * one["logprob_abs_diff"]
    assert rig.trajectory(step=1).policy_version == 1


def test_the_updates_of_a_step_are_one_row_of_metrics() -> None:
    first = StepReport(
        outcome=StepOutcome.APPLIED,
        common={"trained_pairs": 4.0, "grad_norm": 1.0},
        sums={"ratio": Sums(total=4.0, squares=4.0, count=4), "nonfinite_pairs": Sums(total=1.0)},
    )
    second = StepReport(
        outcome=StepOutcome.VOIDED,
        common={"trained_pairs": 2.0, "grad_norm": 3.0},
        sums={"later_updates/ratio": Sums(total=3.0, squares=5.0, count=2), "nonfinite_pairs": Sums(total=1.0)},
    )
    outcome, metrics = merged_updates([[first], [second]])
    assert outcome is StepOutcome.APPLIED
    assert metrics == {
        "trained_pairs": 6.0,
        "grad_norm": 2.0,
        "ratio_mean": 1.0,
        "ratio_std": 0.0,
        "nonfinite_pairs": 2.0,
        "later_updates/ratio_mean": 1.5,
        "later_updates/ratio_std": 0.5,
    }


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_the_change_of_the_weights_is_known_without_a_copy_of_them(decay: float, make_rig: RigMaker) -> None:
    rig = make_rig(train={**TRAIN, "weight_decay": decay})
    for step in range(2):
        before = weights(rig)
        accumulate(rig, step=step)
        metrics = rig.trainer.optimizer_step().metrics
        # Differences of float32 weights of size 1e-1 against changes of 1e-3.
        assert metrics["update_norm"] == pytest.approx(float((weights(rig) - before).norm()), rel=1e-3)
    assert float(size_of_last_change(rig.trainer.optimizer)) == metrics["update_norm"]
