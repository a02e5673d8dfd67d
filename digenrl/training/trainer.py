"""The trainer: sums gradients over pairs, divides by Z once, clips, steps.

Invariants: weights change in ``optimizer_step`` and nowhere else, their version with the last one of an RL step; an algorithm
sees real, finite pairs only; a pair with a non-finite latent, log-probability, advantage or loss is masked before backward and
still counts in Z; a non-finite gradient, or a step without a single finite pair, voids the whole update: weights, optimizer and
average stay as they were.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from digenrl.algorithms.base import Algorithm, GroupAdvantages, LossInputs, LossOutputs
from digenrl.config.arithmetic import trained_samples
from digenrl.config.schema import Recipe
from digenrl.diffusion.dynamics import StepDistribution
from digenrl.diffusion.noise_schedule import NoiseSchedule
from digenrl.diffusion.trajectory import Trajectory
from digenrl.errors import ConfigError, ProtocolError, RunFailed
from digenrl.ids import StepOutcome
from digenrl.models.base import Conditioning, Guidance
from digenrl.training.batch_size import GIB, BatchSize, Measured, largest_that_fits
from digenrl.training.checkpoint import Checkpoint
from digenrl.training.ema import Ema
from digenrl.training.group import ALONE, RankGroup, one_of_several, spread_like, whole, whole_on_first
from digenrl.training.memory import memory_meter
from digenrl.training.optim import bytes_to_come, learning_rate, make_optimizer, size_of_last_change
from digenrl.training.pairs import Pairs, gather_pairs, one_ahead
from digenrl.training.policy import Policy
from digenrl.training.report import StepReport, Sums
from digenrl.training.start_gate import start_gate_of
from digenrl.training.timestep_parallel import PairBatch, pack_pairs, pairs_per_batch, share_of_rank, turns_of_rank


class Trainer:
    """Updates one policy with one algorithm."""

    def __init__(
        self, policy: Policy, algorithm: Algorithm, recipe: Recipe, schedule: NoiseSchedule, group: RankGroup = ALONE
    ) -> None:
        """group: the ranks that share the work; each of them has a trainer, and all are called alike."""
        self.policy = policy
        self._group = group
        self.ema = Ema(policy.parameters, recipe.train.ema, policy.weights_changed) if recipe.train.ema else None
        self.optimizer = make_optimizer(policy.parameters.values(), recipe.train)
        self.stepping = False
        """True from the beginning of an optimizer step until it is over and logged, also when it was broken off."""
        self._algorithm = algorithm
        self._recipe = recipe
        self._schedule = schedule
        self._guidance = Guidance(recipe.rollout.true_cfg_scale, recipe.rollout.guidance_scale)
        self._batch_size = 0
        """Pairs in a pass that ``train.timestep_batch_size: auto`` has chosen; 0 before, and where the recipe says how many."""
        self._pairs = 0
        self._nonfinite_pairs = 0
        self._unsharded = group.mesh is not None and recipe.train.accumulate == "unsharded"
        self._unreduced: tuple[Pairs, Conditioning] | None = None
        """The last pass, where gradients wait on their ranks to be summed up (``train.accumulate: unsharded``)."""
        self._metrics: dict[str, list[dict[str, Tensor]]] = {}
        """By prefix of their names. ``stale/``: of pairs that the version before generated; ``later_updates/``: of the second
        update of a rollout and after. Their ratios are not 1 for a reason, and kept apart."""
        self._updates = recipe.updates_per_rollout
        self._update = 0
        """Optimizer steps of the present RL step that are done."""
        self._gate = start_gate_of(recipe)
        self._started = False
        """Whether the start gate has been passed."""

    @property
    def settled(self) -> bool:
        """Whether the weights are those of ``policy.version``, and so may be saved."""
        return not self.stepping and not self.policy.between_updates and not (self.ema is not None and self.ema.in_place)

    def accumulate(
        self,
        trajectory: Trajectory,
        conditioning: Conditioning,
        advantages: Sequence[GroupAdvantages],
        *,
        more_to_come: bool = False,
    ) -> None:
        """Add the gradient of one micro-batch. Every rank of a group is given the whole of it, and computes its share.

        trajectory: whole groups, contiguous, in order of prompt. conditioning: one row per group. advantages: one per group.
        more_to_come: whether another micro-batch comes before the optimizer step, which ``train.accumulate: unsharded`` uses.
        """
        self._schedule.check_same(trajectory.sigmas)
        prefix = "stale/" if trajectory.policy_version != self.policy.version else "later_updates/" if self._update else ""
        metrics = self._metrics.setdefault(prefix, [])
        group_size = _check_groups(trajectory, len(conditioning), advantages)
        trained_steps = trajectory.denoising_steps.shape[1]
        rank, ranks = self._group.rank, self._group.size
        self.choose_batch_size(trajectory, conditioning)
        size = trained_samples(self._recipe)
        batch_size = pairs_per_batch(self._asked_batch_size(), size, trained_steps, ranks)
        batches_per_group = -(-size * trained_steps // batch_size)
        values = torch.zeros(len(trajectory.samples), *advantages[0].values.shape[1:], dtype=torch.float32)
        mine: list[tuple[int, PairBatch]] = []
        for number, its in enumerate(advantages):
            self._pairs += int(its.kept.sum()) * trained_steps
            # Where the objective is nothing but the advantage's, a pair of advantage 0 counts in Z and needs no pass.
            useful = its.kept if self._algorithm.needs_reference else its.kept & its.values.reshape(group_size, -1).any(1)
            rows = torch.from_numpy(np.flatnonzero(useful)) + number * group_size
            values[number * group_size : (number + 1) * group_size] = torch.from_numpy(its.values).float()
            batches = list(pack_pairs(rows, trained_steps, batch_size))
            if self._group.mesh is None:
                first = trajectory.samples[number * group_size].prompt * batches_per_group
                its_share = turns_of_rank(batches, first, rank, ranks)
            else:
                its_share = share_of_rank(batches, rank, ranks)
            mine += [(number, batch) for batch in its_share]
        prepared = one_ahead(
            (batch for _, batch in mine), lambda batch: self._gather(trajectory, batch, values), self.policy.adapter.device
        )
        for place, ((number, _), pairs) in enumerate(zip(mine, prepared, strict=True)):
            text = conditioning.select(torch.tensor([number]).expand(batch_size))
            more = more_to_come or place < len(mine) - 1
            self._pass(pairs, text, metrics, more=more)

    def choose_batch_size(self, trajectory: Trajectory, conditioning: Conditioning) -> BatchSize | None:
        """With ``train.timestep_batch_size: auto``, measure how many pairs fit into a pass; None where that is known. Collective.

        ``accumulate`` does so by itself; called before it, with the same micro-batch, the time that it takes is not that of an
        update, and what it found can be told. Raises ConfigError where the budget is too small for one pair.
        """
        train = self._recipe.train
        if train.timestep_batch_size != "auto" or self._batch_size:
            return None
        assert train.memory_budget_gib is not None, "checked with the recipe"
        size, steps = trained_samples(self._recipe), trajectory.denoising_steps.shape[1]
        meter, group = memory_meter(self.policy.adapter.device), self._group

        def measure(pairs: int) -> Measured:
            meter.settle()
            for more in (True, False):  # the second one on top of the gradient of the first
                self._rehearse(trajectory, conditioning, pairs, more=more)
            group.sum_gradients([each.grad for each in self.policy.parameters.values() if each.grad is not None])
            peak, to_come = meter.peak_bytes(), bytes_to_come(self.optimizer)
            found = Measured(rest=group.agree_on_most(meter.settle() + to_come), peak=group.agree_on_most(peak + to_come))
            self.optimizer.zero_grad(set_to_none=True)
            return found

        gc.collect()  # of what loading has left behind
        total = -group.agree_on_most(-meter.total_bytes())
        most = pairs_per_batch("all", size, steps, group.size)
        found = largest_that_fits(most, int(train.memory_budget_gib * GIB), total, measure)
        self._batch_size = found.pairs
        meter.settle()
        return found

    def optimizer_step(self) -> StepReport:
        """Divide by Z, clip, step; or leave everything as it is where Z = 0 or the gradient is not finite."""
        train, pairs, group = self._recipe.train, self._pairs, self._group
        if self._unreduced is not None:
            # The last micro-batch had nothing to train, and a pass is needed to bring the gradients of the others together.
            waiting, text = self._unreduced
            self._pass(waiting.without_any(), text, [], more=False)
        sums = {f"{prefix}{name}": its for prefix, metrics in self._metrics.items() for name, its in _sums(metrics).items()}
        self._pass_start_gate(sums)
        sums["nonfinite_pairs"] = Sums(total=float(self._nonfinite_pairs))
        metrics = {"trained_pairs": float(pairs)}
        if self._batch_size:
            metrics["timestep_batch_size"] = float(self._batch_size)
        rate = learning_rate(self.policy.version, train)
        outcome = StepOutcome.EMPTY
        if pairs:
            norm = self._divide_and_clip(pairs)
            metrics |= {"grad_norm": float(norm), "learning_rate": rate}
            some_finite = group.agree_on_any(any(self._metrics.values()))
            nothing_finite = group.agree_on_any(self._nonfinite_pairs > 0) and not some_finite
            finite = bool(torch.isfinite(norm)) and not nothing_finite
            outcome = StepOutcome.APPLIED if finite else StepOutcome.VOIDED
        self.stepping = True
        if outcome is StepOutcome.APPLIED:
            for parameters in self.optimizer.param_groups:
                parameters["lr"] = rate
            self.optimizer.step()
            metrics["update_norm"] = float(whole(size_of_last_change(self.optimizer)))
            self.policy.weights_changed()
            if self.ema is not None:
                self.ema.update()
        self.optimizer.zero_grad(set_to_none=True)
        self._update = (self._update + 1) % self._updates
        self.policy.between_updates = self._update > 0
        self.policy.version += not self.policy.between_updates
        self._pairs, self._nonfinite_pairs, self._metrics = 0, 0, {}
        return StepReport(outcome=outcome, common=metrics, sums=sums)

    def weights(self) -> dict[str, dict[str, Tensor]]:
        """Trained parameters, optimizer state and average, by part and name, each of them whole; on rank 0 alone. Collective."""
        optimizer = {
            f"{key}.{name}": value
            for name, parameter in self.policy.parameters.items()
            for key, value in self.optimizer.state[parameter].items()
        }
        parts = {
            "parameters": {name: parameter.detach() for name, parameter in self.policy.parameters.items()},
            "optimizer": optimizer,
            "ema": self.ema.average if self.ema else {},
        }
        return {part: whole_on_first(tensors, self._group) for part, tensors in parts.items()}

    def counters(self) -> dict[str, int]:
        """What a checkpoint holds of the trainer beside ``weights``."""
        return {"ema_steps": self.ema.steps if self.ema else 0, "timestep_batch_size": self._batch_size}

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on exactly where a checkpoint was written. Raises ConfigError when it is of another model or optimizer."""
        source = str(checkpoint.path)
        self.policy.load(checkpoint.weights["parameters"], source=source)
        self.policy.version = checkpoint.policy_version
        self._batch_size = int(checkpoint.state["trainer"].get("timestep_batch_size", 0))
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
            self.optimizer.state[parameter] = {kind: spread_like(parameter, tensor) for kind, tensor in state.items()}

    def _pass_start_gate(self, sums: dict[str, Sums]) -> None:
        """Raise RunFailed where rollout and training disagree before the first update of this process. Collective."""
        if self._started:
            return
        found, refused = sums.get("logprob_abs_diff"), None
        try:
            if found is not None and found.count:
                self._gate.check(found.total / found.count)
        except RunFailed as error:
            refused = error
        if self._group.agree_on_any(refused is not None):
            raise refused or RunFailed("Another rank of the trainer refuses to start.", fix="Its message says why.")
        self._started = self._group.agree_on_any(found is not None)

    def _gather(self, trajectory: Trajectory, batch: PairBatch, advantages: Tensor) -> Pairs:
        return gather_pairs(trajectory, batch, advantages, self._schedule, self.policy.adapter.device)

    def _pass(self, pairs: Pairs, text: Conditioning, metrics: list[dict[str, Tensor]], *, more: bool) -> None:
        """Add the gradient of one batch, on all ranks. more: whether another pass follows before the optimizer step."""
        if not self._unsharded:
            self._backward(pairs, text, metrics)
            return
        with one_of_several(self.policy.adapter.transformer, more=more):
            self._backward(pairs, text, metrics)
        self._unreduced = (pairs, text) if more else None

    def _asked_batch_size(self) -> int | Literal["all"]:
        asked = self._recipe.train.timestep_batch_size
        return self._batch_size if asked == "auto" else asked

    def _rehearse(self, trajectory: Trajectory, conditioning: Conditioning, pairs: int, *, more: bool) -> None:
        """A pass as large as one of so many pairs, whose gradient is of no use: its first pair, over and over."""
        rows = torch.zeros(pairs, dtype=torch.int64)
        first = self._gather(trajectory, PairBatch(rows, rows, torch.ones(pairs)), torch.ones(len(trajectory.samples)))
        with one_of_several(self.policy.adapter.transformer, more=more) if self._unsharded else nullcontext():
            inputs = self._inputs(first.cleaned(), conditioning.select(rows))
            self._loss(inputs).loss.sum().backward()  # type: ignore[no-untyped-call]

    def _backward(self, pairs: Pairs, text: Conditioning, metrics: list[dict[str, Tensor]]) -> None:
        """Add the gradient of the finite pairs; every round masks at least one more, so this ends."""
        while len(pairs.real) or self._group.mesh is not None:
            bad, done = self._try_backward(pairs, text, metrics)
            if done:
                return
            self._nonfinite_pairs += int(bad.sum())
            pairs = pairs.without(bad)

    def _try_backward(self, pairs: Pairs, text: Conditioning, metrics: list[dict[str, Tensor]]) -> tuple[Tensor, bool]:
        """Add the gradient of all pairs of all ranks, or of none if one of them is not finite; whether it was added.

        Also which of this rank's are not finite: [n] bool, as ``real``. A method of its own, so that a failed round's graph is
        gone before the next one is built.
        """
        inputs = self._inputs(pairs, text)
        bad = _nonfinite(inputs)
        out = None
        if len(bad) and not bool(bad.any()):
            out = self._loss(inputs)
            bad = ~torch.isfinite(out.loss.detach())
        wrong = bool(bad.any())
        if self._group.agree_on_any(wrong) if self._group.mesh is not None else wrong:
            return bad, False
        # A rank with nothing but padding goes backward, too: the others' collectives wait for it.
        loss = out.loss.sum() if out is not None else inputs.log_prob.sum()
        loss.backward()  # type: ignore[no-untyped-call]
        if out is not None:
            metrics.append(out.metrics)
        return bad, True

    def _loss(self, inputs: LossInputs) -> LossOutputs:
        out = self._algorithm.loss(inputs)
        if out.loss.shape != inputs.log_prob.shape:
            raise RunFailed(
                f"The algorithm's loss has shape {tuple(out.loss.shape)} for {len(inputs.log_prob)} pairs.",
                why="The sum over pairs is divided by Z later; a loss that is averaged already would be divided twice.",
                fix="Return one loss per pair, [N].",
            )
        return out

    def _inputs(self, pairs: Pairs, text: Conditioning) -> LossInputs:
        """What the algorithm needs of the pairs that are not padding; the forward pass has the padding's rows too."""
        (step, velocity), real = self._step(pairs, text), pairs.real
        reference_mean = reference_velocity = None
        if self._algorithm.needs_reference:
            with torch.no_grad(), self.policy.reference():
                reference, predicted = self._step(pairs, text)
                reference_mean, reference_velocity = reference.mean[real], predicted[real]
        step = StepDistribution(step.mean[real], step.transition_std[real])
        return LossInputs(
            log_prob=self._algorithm.dynamics.log_prob(pairs.next_latents[real], step, self._algorithm.log_prob_reduction),
            old_log_prob=pairs.old_log_prob[real],
            advantages=pairs.advantages[real],
            mean=step.mean,
            transition_std=step.transition_std,
            dt=(pairs.sigma_next - pairs.sigma)[real],
            velocity=velocity[real],
            reference_mean=reference_mean,
            reference_velocity=reference_velocity,
        )

    def _step(self, pairs: Pairs, text: Conditioning) -> tuple[StepDistribution, Tensor]:
        """The distribution of each pair's step, and the velocity that it comes from."""
        velocity = self.policy.adapter.predict(pairs.latents, pairs.timesteps, text, self._guidance)
        sigma_1 = self._schedule.sigmas[1].to(velocity.device)
        dynamics = self._algorithm.dynamics
        step = dynamics.step(pairs.latents, velocity, pairs.sigma, pairs.sigma_next, sigma_1, pairs.noise_levels)
        return step, velocity

    def _divide_and_clip(self, pairs: int) -> Tensor:
        parameters = list(self.policy.parameters.values())
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        self._group.sum_gradients(gradients)
        for gradient in gradients:
            gradient.div_(pairs)
        limit = self._recipe.train.max_grad_norm
        return whole(torch.nn.utils.clip_grad_norm_(parameters, float("inf") if limit is None else limit))


def _sums(metrics: list[dict[str, Tensor]]) -> dict[str, Sums]:
    """Sums over all pairs, by name, in float64: a ratio of exactly 1 has a standard deviation of exactly 0."""
    found: dict[str, Sums] = {}
    for name in metrics[0] if metrics else ():
        values = torch.cat([each[name] for each in metrics]).double()
        found[name] = Sums(total=float(values.sum()), squares=float((values * values).sum()), count=len(values))
    return found


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
    log_probs = torch.isfinite(torch.stack([pairs.log_prob.detach(), pairs.old_log_prob])).all(0)
    advantages = torch.isfinite(pairs.advantages)
    return ~(log_probs & (advantages.all(1) if advantages.ndim == 2 else advantages))
