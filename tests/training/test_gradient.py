"""The gradient: equal to the plain one, however pairs are packed, cut and ordered; and exactly on policy at the start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from digenrl.algorithms.base import LossInputs, LossOutputs
from digenrl.algorithms.flow_grpo import FlowGRPO
from digenrl.config.schema import Recipe
from digenrl.diffusion.trajectory import Trajectory
from digenrl.ids import SampleId
from digenrl.training.digest import digest
from digenrl.training.timestep_parallel import pack_pairs, pairs_per_batch

RigMaker = Callable[..., Any]
Plain = Callable[..., dict[str, Tensor]]
LORA = {"rank": 4, "alpha": 8}
REWARDS = [[0.0, 1.0, 3.0, 2.0, 2.5], [2.0, 5.0, 1.0, 7.0, 2.0]]


def off_policy(trajectory: Trajectory) -> Trajectory:
    """The same, as if made by another policy: ratios inside and outside of the clip of 1e-4, none on its edge."""
    shifts = torch.tensor([3e-5, -2e-4, 2e-4, -3e-5, 5e-5, -3e-4, 0.0])
    count = trajectory.log_probs.numel()
    return replace(trajectory, log_probs=trajectory.log_probs + shifts.repeat(count)[:count].view_as(trajectory.log_probs))


def disturb(rig: Any) -> None:
    with torch.no_grad():
        for parameter in rig.policy.parameters.values():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.05)


@pytest.mark.parametrize("lora", [None, LORA])
@pytest.mark.parametrize("size", [1, 2, 4, 5, 7, "all"])
def test_the_gradient_is_the_plain_one_for_every_timestep_batch_size(
    size: int | str, lora: dict[str, Any] | None, make_rig: RigMaker, plain: Plain, rel: Callable[..., float]
) -> None:
    # 5 samples x 3 trained steps = 15 pairs a group: 2, 4 and 7 do not divide them.
    rig = make_rig(
        model={"lora": lora},
        algorithm={"type": "flow_grpo", "start_gate_refuse": 1e6},
        rollout={"num_generations": 5, "forward_batch_size": 5},
        train={"steps": 2, "timestep_batch_size": size},
    )
    trajectory, advantages = off_policy(rig.trajectory()), rig.advantages(*REWARDS)
    wanted = plain(rig, trajectory, [g.values.tolist() for g in advantages])
    rig.trainer.accumulate(trajectory, rig.conditioning(), advantages)
    assert rel(rig.gradient(), wanted) <= 1e-5
    assert rig.trainer.optimizer_step().metrics["trained_pairs"] == 30


@pytest.mark.parametrize("lora", [None, LORA])
@pytest.mark.parametrize("size", [4, "all"])
def test_the_kl_to_the_starting_model_adds_its_gradient(
    size: int | str, lora: dict[str, Any] | None, make_rig: RigMaker, plain: Plain, rel: Callable[..., float]
) -> None:
    rig = make_rig(
        model={"lora": lora},
        algorithm={"type": "flow_grpo", "kl_beta": 0.04},
        rollout={"num_generations": 5, "forward_batch_size": 5},
        train={"steps": 2, "timestep_batch_size": size},
    )
    disturb(rig)
    trajectory, advantages = rig.trajectory(), rig.advantages(*REWARDS)
    values = [g.values.tolist() for g in advantages]
    with_kl, without = plain(rig, trajectory, values, beta=0.04), plain(rig, trajectory, values)
    assert rel(without, with_kl) > 0.01, "the KL must matter for this test to mean something"
    rig.trainer.accumulate(trajectory, rig.conditioning(), advantages)
    assert rel(rig.gradient(), with_kl) <= 1e-5


@pytest.mark.parametrize("lora", [None, LORA])
def test_the_kl_alone_trains_pairs_of_advantage_zero(lora: dict[str, Any] | None, make_rig: RigMaker) -> None:
    rig = make_rig(model={"lora": lora}, algorithm={"type": "flow_grpo", "kl_beta": 0.04})
    disturb(rig)
    rig.trainer.accumulate(rig.trajectory(), rig.conditioning(), rig.advantages([1, 1, 1], [2, 2, 2]))
    assert any(bool(g.any()) for g in rig.gradient().values())
    metrics = rig.trainer.optimizer_step().metrics
    assert metrics["kl_reference"] > 0


def test_guidance_is_trained_through_both_of_its_passes(make_rig: RigMaker, rel: Callable[..., float]) -> None:
    rig = make_rig(rollout={"true_cfg_scale": 3.0})
    trajectory, advantages = rig.trajectory(), rig.advantages([0, 1, 3], [2, 5, 1])
    rig.trainer.accumulate(trajectory, rig.conditioning(), advantages)
    ours = rig.gradient()
    text, weights = rig.conditioning(), rig.policy.parameters
    for sign in (1, -1):  # a finite difference along the gradient, in the direction that the loss falls
        norm = float(torch.cat([g.flatten() for g in ours.values()]).norm())
        step = 1e-3 / norm
        with torch.no_grad():
            for name, p in weights.items():
                p.add_(ours[name], alpha=sign * step)
        moved = surrogate(rig, trajectory, text, advantages)
        with torch.no_grad():
            for name, p in weights.items():
                p.sub_(ours[name], alpha=sign * step)
        change = moved - surrogate(rig, trajectory, text, advantages)
        assert change == pytest.approx(sign * step * norm**2, rel=0.05)


def surrogate(rig: Any, trajectory: Trajectory, text: Any, advantages: list[Any]) -> float:
    """Sum over pairs of -A log p, whose gradient is the policy gradient on policy."""
    from digenrl.diffusion.dynamics import gaussian_log_prob
    from digenrl.models.base import Guidance

    total = 0.0
    with torch.no_grad():
        for row, sample in enumerate(trajectory.samples):
            for slot, step in enumerate(trajectory.denoising_steps[row].tolist()):
                sigma, sigma_next = trajectory.sigmas[step : step + 1], trajectory.sigmas[step + 1 : step + 2]
                x = trajectory.latents[row, slot][None]
                v = rig.adapter.predict(x, sigma * 1000, text.select(torch.tensor([sample.prompt])), Guidance(3.0))
                d = rig.algorithm.dynamics.step(x, v, sigma, sigma_next, trajectory.sigmas[1], torch.tensor([0.7]))
                log_prob = gaussian_log_prob(
                    trajectory.next_latents[row, slot][None].double(), d.mean.double(), d.transition_std.double()
                )
                total -= float(advantages[sample.prompt].values[sample.sample]) * float(log_prob)
    return total


class Recorder(FlowGRPO):
    """Flow-GRPO that remembers the largest difference of log-probabilities."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe.algorithm.settings, recipe)  # type: ignore[arg-type]
        self.largest, self.ratios, self.pairs = 0.0, set[float](), 0

    def loss(self, pairs: LossInputs) -> LossOutputs:
        difference = (pairs.log_prob - pairs.old_log_prob).detach()
        self.largest = max(self.largest, float(difference.abs().max()))
        self.ratios |= set(difference.exp().tolist())
        self.pairs += len(difference)
        return super().loss(pairs)


def on_policy(make_rig: RigMaker, **overrides: Any) -> tuple[Recorder, dict[str, float]]:
    rig = make_rig(make_algorithm=Recorder, **overrides)
    squares = [float(i * i) for i in range(rig.recipe.rollout.num_generations)]  # none is their mean: no advantage is 0
    rig.trainer.accumulate(rig.trajectory(), rig.conditioning(), rig.advantages(squares, squares[::-1]))
    return rig.algorithm, rig.trainer.optimizer_step().metrics


@pytest.mark.parametrize("lora", [None, LORA])
@pytest.mark.parametrize(
    ("checkpointing", "reduction", "generations", "batch"),
    [(False, "mean", 4, 2), (False, "sum", 5, 5), (True, "mean", 5, 3), (True, "sum", 4, 12), (False, "mean", 2, 1)],
)
def test_before_the_first_update_the_ratio_is_exactly_one_where_forward_shapes_are_equal(
    lora: dict[str, Any] | None, checkpointing: bool, reduction: str, generations: int, batch: int, make_rig: RigMaker
) -> None:
    recorder, metrics = on_policy(
        make_rig,
        model={"lora": lora, "gradient_checkpointing": checkpointing},
        algorithm={"type": "flow_grpo", "log_prob_reduction": reduction},
        rollout={"num_generations": generations, "forward_batch_size": batch},
        train={"steps": 1, "timestep_batch_size": batch},
    )
    assert recorder.ratios == {1.0}
    assert recorder.pairs == metrics["trained_pairs"]
    assert (metrics["ratio_mean"], metrics["ratio_std"], metrics["logprob_abs_diff"]) == (1.0, 0.0, 0.0)
    assert metrics["clip_fraction"] == metrics["approx_kl"] == 0.0


@pytest.mark.parametrize(
    "settings", [{"timestep_selection": "random", "timestep_fraction": 0.5}, {"timestep_selection": "window"}]
)
@pytest.mark.parametrize("cfg", [1.0, 4.0])
def test_the_ratio_is_exactly_one_for_every_selection_of_steps_and_with_guidance(
    settings: dict[str, Any], cfg: float, make_rig: RigMaker
) -> None:
    recorder, _ = on_policy(
        make_rig,
        algorithm={"type": "flow_grpo", **settings},
        rollout={"num_inference_steps": 5, "true_cfg_scale": cfg, "forward_batch_size": 3},
        train={"steps": 1, "timestep_batch_size": 3},
    )
    assert recorder.ratios == {1.0}


@pytest.mark.parametrize("lora", [None, LORA])
def test_the_ratio_is_exactly_one_in_bfloat16_too(lora: dict[str, Any] | None, make_rig: RigMaker) -> None:
    # With other shapes it is not, by 1e-3: ten times flow_grpo's clip range.
    recorder, _ = on_policy(make_rig, model={"dtype": "bfloat16", "lora": lora}, train={"steps": 1, "timestep_batch_size": 3})
    assert recorder.ratios == {1.0}


def test_the_ratio_is_exactly_one_on_the_shipped_model(make_rig: RigMaker) -> None:
    recorder, _ = on_policy(
        make_rig,
        model={"path": "builtin:shapes", "max_sequence_length": 10},
        rollout={"num_generations": 4, "forward_batch_size": 6},
        train={"steps": 1, "timestep_batch_size": 6},
    )
    assert recorder.ratios == {1.0}


@pytest.mark.parametrize(("forward", "training"), [(1, "all"), (8, 1), (3, 5), (2, 7)])
@pytest.mark.parametrize("path", ["tiny", "builtin:shapes"])
def test_other_forward_shapes_move_a_log_probability_by_a_millionth_at_most(
    forward: int, training: int | str, path: str, make_rig: RigMaker
) -> None:
    model = {} if path == "tiny" else {"path": path, "max_sequence_length": 10}
    recorder, _ = on_policy(
        make_rig,
        model=model,
        rollout={"num_generations": 5, "forward_batch_size": forward},
        train={"steps": 1, "timestep_batch_size": training},
    )
    assert recorder.largest <= 1e-6


FOUR_REWARDS = ([0.0, 1.0, 3.0], [2.0, 5.0, 1.0], [1.0, 1.0, 1.0], [4.0, float("nan"), 2.0])


def train_in_cuts(
    make_rig: RigMaker, groups_per_cut: int, *, backwards: bool = False
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Two RL steps of four groups, generated and accumulated in micro-batches; the last gradient and all digests."""
    rig = make_rig(
        model={"lora": LORA},
        rollout={"prompts_per_step": 4, "forward_batch_size": 5},
        train={"steps": 2, "timestep_batch_size": 4, "deterministic": True, "ema": {}},
    )
    text, advantages = rig.conditioning(), rig.advantages(*FOUR_REWARDS)
    for step in range(2):
        cuts = [range(start, min(start + groups_per_cut, 4)) for start in range(0, 4, groups_per_cut)]
        trajectories = []
        for cut in cuts:
            samples = [SampleId(step, prompt, sample) for prompt in cut for sample in range(3)]
            rows = torch.tensor([s.prompt for s in samples])
            trajectories.append((cut, rig.generator.generate(samples, text, rows, rig.policy.version)))
        for cut, trajectory in trajectories[::-1] if backwards else trajectories:
            rig.trainer.accumulate(trajectory, text.select(torch.tensor(cut)), [advantages[prompt] for prompt in cut])
        gradient = rig.gradient()
        rig.trainer.optimizer_step()
    return gradient, {part: digest(tensors) for part, tensors in rig.trainer.weights().items()}


def test_other_micro_batches_give_identical_weights_optimizer_and_average(make_rig: RigMaker) -> None:
    _, whole = train_in_cuts(make_rig, 4)
    for groups in (1, 2, 3):
        assert train_in_cuts(make_rig, groups)[1] == whole
    assert len(set(whole.values())) == 3


def test_another_order_of_micro_batches_changes_the_gradient_by_rounding_alone(
    make_rig: RigMaker, rel: Callable[..., float]
) -> None:
    forwards, digests = train_in_cuts(make_rig, 1)
    backwards, other = train_in_cuts(make_rig, 1, backwards=True)
    assert rel(backwards, forwards) <= 1e-5
    assert other != digests, "sums in another order do round differently; else this test sees nothing"


@pytest.mark.parametrize("size", [1, 2, 5, 6, 9])
def test_packing_holds_every_pair_of_a_group_once_in_order(size: int) -> None:
    rows = torch.tensor([3, 4, 6])
    batches = list(pack_pairs(rows, 2, size))
    real = [(int(r), int(s)) for b in batches for r, s, w in zip(b.rows, b.slots, b.weights, strict=True) if w == 1]
    assert real == [(3, 0), (3, 1), (4, 0), (4, 1), (6, 0), (6, 1)]
    assert all(len(b.rows) == len(b.slots) == len(b.weights) == size for b in batches)
    assert all(w in (0.0, 1.0) for b in batches for w in b.weights.tolist())


def test_a_forward_batch_never_holds_more_than_a_group() -> None:
    assert pairs_per_batch("all", 5, 3) == 15
    assert pairs_per_batch(4, 5, 3) == 4
    assert pairs_per_batch(99, 5, 3) == 15
    assert list(pack_pairs(torch.tensor([], dtype=torch.int64), 3, 4)) == []


def test_no_forward_batch_crosses_a_prompt_group(make_rig: RigMaker) -> None:
    rig = make_rig(train={"steps": 1, "timestep_batch_size": 4})
    trajectory, text, advantages = rig.trajectory(), rig.conditioning(), rig.advantages([0, 1, 3], [2, 5, 1])
    seen: list[tuple[int, int]] = []
    embeds = text.tensors["prompt_embeds"]

    def spy(module: Any, args: Any, kwargs: dict[str, Tensor]) -> None:
        rows = kwargs["encoder_hidden_states"]
        prompts = {p for p in range(2) for row in rows if torch.equal(row, embeds[p])}
        seen.append((len(rows), *prompts))

    rig.adapter.transformer.register_forward_pre_hook(spy, with_kwargs=True)
    rig.trainer.accumulate(trajectory, text, advantages)
    assert seen == [(4, 0)] * 3 + [(4, 1)] * 3
