"""The trainer: sums gradients over pairs, divides by Z once, clips, steps.

Invariants: weights change in ``optimizer_step`` and nowhere else; an algorithm sees real, finite pairs only; a pair with a
non-finite latent, log-probability, advantage or loss is masked before backward and still counts in Z; a non-finite gradient,
or a step without a single finite pair, voids the whole step: weights, optimizer and average stay as they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from digenrl.algorithms.base import Algorithm, GroupAdvantages, LossInputs
from digenrl.config.schema import Recipe
from digenrl.diffusion.dynamics import StepDistribution
from digenrl.diffusion.noise_schedule import NoiseSchedule
from digenrl.diffusion.trajectory import Trajectory
from digenrl.errors import ConfigError, ProtocolError, RunFailed
from digenrl.ids import StepOutcome
from digenrl.models.base import Conditioning, Guidance
from digenrl.training.checkpoint import Checkpoint
from digenrl.training.ema import Ema
from digenrl.training.optim import learning_rate, make_optimizer
from digenrl.training.policy import Policy
from digenrl.training.timestep_parallel import PairBatch, pack_pairs, pairs_per_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one optimizer step did."""

    outcome: StepOutcome
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pairs:
    """The tensors of N pairs, on the device."""

    latents: Tensor
    next_latents: Tensor
    timesteps: Tensor
    sigma: Tensor
    sigma_next: Tensor
    noise_levels: Tensor
    old_log_prob: Tensor
    advantages: Tensor
    real: Tensor
    """[n] int64, the rows that are not padding, ascending."""

    def without(self, bad: Tensor) -> _Pairs:
        """The same pairs, with those of ``real`` that are ``bad`` [n] bool turned into harmless padding.

        All padding is cleared, because it repeats a real pair: 0 times a NaN activation would still poison the gradient.
        """
        kept = self.real[~bad]
        padding = torch.ones(len(self.latents), dtype=torch.bool, device=kept.device).index_fill(0, kept, False)
        latent_padding = padding.view(-1, *(1 for _ in self.latents.shape[1:]))
        return replace(
            self,
            latents=self.latents.masked_fill(latent_padding, 0.0),
            next_latents=self.next_latents.masked_fill(latent_padding, 0.0),
            real=kept,
        )


class Trainer:
    """Updates one policy with one algorithm."""

    def __init__(self, policy: Policy, algorithm: Algorithm, recipe: Recipe, schedule: NoiseSchedule) -> None:
        self.policy = policy
        self.ema = Ema(policy.parameters, recipe.train.ema) if recipe.train.ema else None
        self.optimizer = make_optimizer(policy.parameters.values(), recipe.train)
        self.stepping = False
        """True from the beginning of an optimizer step until it is over and logged, also when it was broken off."""
        self._algorithm = algorithm
        self._recipe = recipe
        self._schedule = schedule
        self._guidance = Guidance(recipe.rollout.true_cfg_scale, recipe.rollout.guidance_scale)
        self._pairs = 0
        self._nonfinite_pairs = 0
        self._metrics: list[dict[str, Tensor]] = []
        self._stale_metrics: list[dict[str, Tensor]] = []
        """Of pairs that the version before generated, whose ratios are not 1 for a reason: kept apart."""

    @property
    def settled(self) -> bool:
        """Whether the weights are those of ``policy.version``, and so may be saved."""
        return not self.stepping and not (self.ema is not None and self.ema.in_place)

    def accumulate(self, trajectory: Trajectory, conditioning: Conditioning, advantages: Sequence[GroupAdvantages]) -> None:
        """Add the gradient of one micro-batch.

        trajectory: whole groups, contiguous, in order of prompt. conditioning: one row per group. advantages: one per group.
        """
        self._schedule.check_same(trajectory.sigmas)
        metrics = self._metrics if trajectory.policy_version == self.policy.version else self._stale_metrics
        group_size = _check_groups(trajectory, len(conditioning), advantages)
        trained_steps = trajectory.denoising_steps.shape[1]
        batch_size = pairs_per_batch(self._recipe.train.timestep_batch_size, group_size, trained_steps)
        for group, its in enumerate(advantages):
            self._pairs += int(its.kept.sum()) * trained_steps
            # Where the objective is nothing but the advantage's, a pair of advantage 0 counts in Z and needs no pass.
            useful = its.kept if self._algorithm.needs_reference else its.kept & (its.values != 0)
            rows = torch.from_numpy(np.flatnonzero(useful)) + group * group_size
            values = torch.zeros(len(trajectory.samples), dtype=torch.float32)
            values[group * group_size : (group + 1) * group_size] = torch.from_numpy(its.values).float()
            text = conditioning.select(torch.tensor([group]).expand(batch_size))
            for batch in pack_pairs(rows, trained_steps, batch_size):
                self._backward(self._gather(trajectory, batch, values), text, metrics)

    def optimizer_step(self) -> StepReport:
        """Divide by Z, clip, step; or leave everything as it is where Z = 0 or the gradient is not finite."""
        train, pairs = self._recipe.train, self._pairs
        metrics = self._step_metrics() | {"trained_pairs": float(pairs), "nonfinite_pairs": float(self._nonfinite_pairs)}
        rate = learning_rate(self.policy.version, train)
        outcome = StepOutcome.EMPTY
        if pairs:
            norm = self._divide_and_clip(pairs)
            metrics |= {"grad_norm": float(norm), "learning_rate": rate}
            nothing_finite = self._nonfinite_pairs > 0 and not (self._metrics or self._stale_metrics)
            finite = bool(torch.isfinite(norm)) and not nothing_finite
            outcome = StepOutcome.APPLIED if finite else StepOutcome.VOIDED
        self.stepping = True
        if outcome is StepOutcome.APPLIED:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            if self.ema is not None:
                self.ema.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.policy.version += 1
        self._pairs, self._nonfinite_pairs, self._metrics, self._stale_metrics = 0, 0, [], []
        return StepReport(outcome=outcome, metrics=metrics)

    def weights(self) -> dict[str, dict[str, Tensor]]:
        """Trained parameters, optimizer state and average, by part and name."""
        optimizer = {
            f"{key}.{name}": value
            for name, parameter in self.policy.parameters.items()
            for key, value in self.optimizer.state[parameter].items()
        }
        return {
            "parameters": {name: parameter.detach() for name, parameter in self.policy.parameters.items()},
            "optimizer": optimizer,
            "ema": dict(self.ema.average) if self.ema else {},
        }

    def counters(self) -> dict[str, int]:
        """What a checkpoint holds of the trainer beside ``weights``."""
        return {"ema_steps": self.ema.steps if self.ema else 0}

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on exactly where a checkpoint was written. Raises ConfigError when it is of another model or optimizer."""
        source = str(checkpoint.path)
        self.policy.load(checkpoint.weights["parameters"], source=source)
        self.policy.version = checkpoint.policy_version
        average = checkpoint.weights["ema"]
        if (self.ema is not None) != bool(average):
            raise ConfigError(f"{source} was written with{'' if average else 'out'} an EMA.", fix="Leave train.ema as it was.")
        if self.ema is not None:
            self.ema.load(average, int(checkpoint.state["trainer"]["ema_steps"]))
        saved: dict[str, dict[str, Tensor]] = {}
        for key, tensor in checkpoint.weights["optimizer"].items():
            kind, _, name = key.partition(".")
            saved.setdefault(name, {})[kind] = tensor
        if saved and saved.keys() != self.policy.parameters.keys():
            raise ConfigError(f"{source} holds the optimizer of another model.", fix="Use the recipe of the run.")
        for name, state in saved.items():
            parameter = self.policy.parameters[name]
            self.optimizer.state[parameter] = {kind: tensor.to(parameter.device) for kind, tensor in state.items()}

    def _gather(self, trajectory: Trajectory, batch: PairBatch, advantages: Tensor) -> _Pairs:
        device = self.policy.adapter.device
        steps = trajectory.denoising_steps[batch.rows, batch.slots].cpu()
        rows, slots = batch.rows.to(trajectory.latents.device), batch.slots.to(trajectory.latents.device)
        return _Pairs(
            latents=trajectory.latents[rows, slots].to(device),
            next_latents=trajectory.next_latents[rows, slots].to(device),
            timesteps=self._schedule.timesteps[steps].to(device),
            sigma=self._schedule.sigmas[steps].to(device),
            sigma_next=self._schedule.sigmas[steps + 1].to(device),
            noise_levels=trajectory.noise_levels[batch.rows, batch.slots].to(device),
            old_log_prob=trajectory.log_probs[rows, slots].to(device),
            advantages=advantages[batch.rows].to(device),
            real=batch.weights.nonzero().flatten().to(device),
        )

    def _backward(self, pairs: _Pairs, text: Conditioning, metrics: list[dict[str, Tensor]]) -> None:
        """Add the gradient of the finite pairs; every round masks at least one more, so this ends."""
        while len(pairs.real):
            bad = self._try_backward(pairs, text, metrics)
            if not bool(bad.any()):
                return
            self._nonfinite_pairs += int(bad.sum())
            pairs = pairs.without(bad)

    def _try_backward(self, pairs: _Pairs, text: Conditioning, metrics: list[dict[str, Tensor]]) -> Tensor:
        """Add the gradient of all pairs, or of none if one is not finite. Returns which are not: [n] bool, as ``real``.

        A method of its own, so that a failed round's graph is gone before the next one is built.
        """
        inputs = self._inputs(pairs, text)
        bad = _nonfinite(inputs)
        if bool(bad.any()):
            return bad
        out = self._algorithm.loss(inputs)
        if out.loss.shape != inputs.log_prob.shape:
            raise RunFailed(
                f"The algorithm's loss has shape {tuple(out.loss.shape)} for {len(inputs.log_prob)} pairs.",
                why="The sum over pairs is divided by Z later; a loss that is averaged already would be divided twice.",
                fix="Return one loss per pair, [N].",
            )
        bad = ~torch.isfinite(out.loss.detach())
        if not bool(bad.any()):
            out.loss.sum().backward()  # type: ignore[no-untyped-call]
            metrics.append(out.metrics)
        return bad

    def _inputs(self, pairs: _Pairs, text: Conditioning) -> LossInputs:
        """What the algorithm needs of the pairs that are not padding; the forward pass has the padding's rows too."""
        step, real = self._step(pairs, text), pairs.real
        reference_mean = None
        if self._algorithm.needs_reference:
            with torch.no_grad(), self.policy.reference():
                reference_mean = self._step(pairs, text).mean[real]
        step = StepDistribution(step.mean[real], step.transition_std[real])
        return LossInputs(
            log_prob=self._algorithm.dynamics.log_prob(pairs.next_latents[real], step, self._algorithm.log_prob_reduction),
            old_log_prob=pairs.old_log_prob[real],
            advantages=pairs.advantages[real],
            mean=step.mean,
            transition_std=step.transition_std,
            dt=(pairs.sigma_next - pairs.sigma)[real],
            reference_mean=reference_mean,
        )

    def _step(self, pairs: _Pairs, text: Conditioning) -> StepDistribution:
        velocity = self.policy.adapter.predict(pairs.latents, pairs.timesteps, text, self._guidance)
        sigma_1 = self._schedule.sigmas[1].to(velocity.device)
        return self._algorithm.dynamics.step(pairs.latents, velocity, pairs.sigma, pairs.sigma_next, sigma_1, pairs.noise_levels)

    def _divide_and_clip(self, pairs: int) -> Tensor:
        parameters = list(self.policy.parameters.values())
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.div_(pairs)
        limit = self._recipe.train.max_grad_norm
        return torch.nn.utils.clip_grad_norm_(parameters, float("inf") if limit is None else limit)

    def _step_metrics(self) -> dict[str, float]:
        stale = _means(self._stale_metrics)
        return _means(self._metrics) | {f"stale/{name}": value for name, value in stale.items()}


def _means(metrics: list[dict[str, Tensor]]) -> dict[str, float]:
    """Means over all pairs, by name."""
    means: dict[str, float] = {}
    for name in metrics[0] if metrics else ():
        values = torch.cat([each[name] for each in metrics])
        if name == "ratio":
            means |= {"ratio_mean": float(values.mean()), "ratio_std": float(values.std(correction=0))}
        else:
            means[name] = float(values.mean())
    return means


def _check_groups(trajectory: Trajectory, texts: int, advantages: Sequence[GroupAdvantages]) -> int:
    """Size of the groups. Raises ProtocolError unless the micro-batch is whole groups in a row, with text and advantages."""
    size = len(advantages[0].values)
    prompts = [(sample.step, sample.prompt) for sample in trajectory.samples]
    expected = [prompts[start] for start in range(0, len(prompts), size) for _ in range(size)]
    if prompts != expected or texts != len(advantages) or len(prompts) != size * len(advantages):
        raise ProtocolError(
            f"A micro-batch of {len(prompts)} samples came with {len(advantages)} groups of advantages of {size} and "
            f"{texts} encoded prompts.",
            why="Samples must be whole prompt groups, one after the other: else one prompt's text trains another's pictures.",
            fix="This is a bug; please report it with the run's trace.jsonl.",
        )
    return size


def _nonfinite(pairs: LossInputs) -> Tensor:
    """[N] bool: pairs that must not reach the algorithm. Latents and means show in the log-probability."""
    values = torch.stack([pairs.log_prob.detach(), pairs.old_log_prob, pairs.advantages])
    return ~torch.isfinite(values).all(0)
