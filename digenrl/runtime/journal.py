"""The journal of a run: timings and results of commands become metrics, pictures and lines on the console."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from digenrl.config.schema import Recipe
from digenrl.data.prompts import Prompt
from digenrl.ids import MicroBatchId, SampleId
from digenrl.metrics.console import RunConsole
from digenrl.metrics.guards import warnings_of
from digenrl.metrics.log import MetricsLog
from digenrl.runtime.ledger import StepRecord
from digenrl.runtime.run_folder import RunFolder
from digenrl.scheduling.events import StepOutcome
from digenrl.training.trainer import StepReport
from digenrl.workers.evaluator import Evaluation
from digenrl.workers.scorer import ScoredBatch


class Journal:
    """Collects what one run does."""

    def __init__(self, recipe: Recipe, folder: RunFolder, log: MetricsLog, console: RunConsole) -> None:
        self._recipe = recipe
        self._folder = folder
        self._log = log
        self._console = console
        self._step_timing: dict[str, float] = {}
        self.timing: dict[str, float] = {}
        """Seconds by kind of command, over the whole run."""
        self.evaluations: dict[int, Evaluation] = {}
        """By policy version; images are dropped once saved."""
        self.skipped_steps = 0
        self.steps = 0

    def timed(self, kind: str, seconds: float) -> None:
        """A command of this kind took so long."""
        for timing in (self._step_timing, self.timing):
            timing[kind] = timing.get(kind, 0.0) + seconds

    def scored(
        self, micro_batch: MicroBatchId, samples: Sequence[SampleId], prompts: Sequence[Prompt], batch: ScoredBatch
    ) -> None:
        """Save pictures of a micro-batch where they are due: the first samples of the first prompts of the step."""
        log, step = self._recipe.log, micro_batch.step
        last = step == self._recipe.train.steps - 1
        if not log.sample_freq or (step % log.sample_freq and not last):
            return
        groups = self._recipe.rollout.prompts_per_step
        per_group = max(1, log.num_samples // groups)
        chosen = [
            row for row, s in enumerate(samples) if s.sample < per_group and s.prompt * per_group + s.sample < log.num_samples
        ]
        rows = [
            {
                "step": step,
                "prompt": prompts[row].text,
                "sample": str(samples[row]),
                "seed": self._recipe.run.seed,
                "policy_version": step,
                "reward": _plain(batch.rewards.totals[row]),
                "rewards": {name: _plain(values[row]) for name, values in batch.rewards.parts.items()},
            }
            for row in chosen
        ]
        names = [f"prompt-{samples[row].prompt:03d}-sample-{samples[row].sample:03d}" for row in chosen]
        self._folder.save_samples(f"step-{step:06d}", batch.images[chosen], names, rows)

    def stepped(self, step: int, report: StepReport, record: StepRecord) -> None:
        """An RL step is over: log its metrics."""
        metrics = _reward_metrics(record) | report.metrics
        self.skipped_steps += report.outcome is StepOutcome.VOIDED
        self.steps = step + 1
        seconds = sum(v for kind, v in self._step_timing.items() if kind != "evaluate")
        metrics["skipped_steps"] = float(self.skipped_steps)
        metrics["samples_per_second"] = record.rewards.size / seconds if seconds else math.nan
        metrics |= {f"timing_s/{kind}": value for kind, value in self._step_timing.items()}
        metrics["timing_s/step"] = seconds
        self._step_timing = {}
        self._log.log("train", step, metrics)
        self._console.stepped(step, metrics)
        if report.outcome is StepOutcome.VOIDED:
            self._console.warn(f"voided-{step}", f"step {step} was voided: its gradient was not finite")
        if metrics["invalid_samples"]:
            self._console.warn("invalid", f"{int(metrics['invalid_samples'])} samples of step {step} have no valid reward")
        clip = getattr(self._recipe.algorithm.settings, "effective_clip_range", None)
        for kind, text in warnings_of(metrics, clip_range=clip):
            self._console.warn(kind, text)

    def evaluated(self, version: int, evaluation: Evaluation, prompts: Sequence[Prompt]) -> None:
        """A version was evaluated: log it and save the first pictures."""
        self.evaluations[version] = evaluation
        metrics = {
            "reward": evaluation.reward,
            "num_images": float(len(evaluation.rewards)),
            "invalid_samples": float((~np.isfinite(evaluation.rewards)).sum()),
            **{f"reward/{name}": value for name, value in evaluation.parts.items()},
        }
        self._log.log("eval", version, metrics)
        parts = ", ".join(f"{name} {value:.3f}" for name, value in evaluation.parts.items())
        self._console.say(f"held out, version {version}: reward {evaluation.reward:.3f} ({parts})")
        count = min(self._recipe.log.num_samples, len(prompts))
        rows = [
            {"prompt": prompts[i].text, "policy_version": version, "held_out": True, "reward": _plain(evaluation.rewards[i])}
            for i in range(count)
        ]
        names = [f"prompt-{i:03d}" for i in range(count)]
        self._folder.save_samples(f"eval-version-{version:06d}", evaluation.images[:count], names, rows)


def _reward_metrics(record: StepRecord) -> dict[str, float]:
    valid = record.rewards[np.isfinite(record.rewards)]
    metrics = {
        "reward_mean": float(valid.mean()) if valid.size else math.nan,
        "reward_std": float(valid.std()) if valid.size else math.nan,
        "invalid_samples": float(record.rewards.size - valid.size),
        "zero_std_ratio": float(np.mean([group.zero_variance for group in record.groups])),
    }
    for name, pieces in record.parts.items():
        values = np.concatenate(pieces)
        values = values[np.isfinite(values)]
        metrics[f"reward/{name}"] = float(values.mean()) if values.size else math.nan
    return metrics


def _plain(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
