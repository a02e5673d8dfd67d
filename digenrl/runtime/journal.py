"""The journal of a run: timings and results of commands become metrics, pictures and lines on the console."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from digenrl.config.schema import Recipe
from digenrl.data.categories import categories_of
from digenrl.data.prompts import Prompt
from digenrl.errors import RunFailed
from digenrl.ids import SampleId, StepOutcome
from digenrl.metrics.console import RunConsole
from digenrl.metrics.guards import warnings_of
from digenrl.metrics.hacking import HackingWatch, standard_error
from digenrl.metrics.log import MetricsLog
from digenrl.metrics.video import filmstrips
from digenrl.rewards.compose import Effort, Rewards
from digenrl.runtime.ledger import StepRecord
from digenrl.runtime.run_folder import RunFolder
from digenrl.training.start_gate import start_gate_of
from digenrl.workers.evaluator import Evaluation

_MOST_CATEGORIES = 20
"""A field with more values than this names no kinds, and would flood the logs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pictures:
    """Pictures of a micro-batch that are to be saved."""

    rows: list[int]
    """n rows of the micro-batch."""
    images: NDArray[np.uint8]
    """[n, H, W, 3], of videos [n, F, H, W, 3]."""


class Journal:
    """Collects what one run does."""

    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder,
        log: MetricsLog,
        console: RunConsole,
        *,
        skipped_steps: int = 0,
        history: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """history: rows of metrics.jsonl from before this process, of a run that goes on."""
        self._recipe = recipe
        self._folder = folder
        self._log = log
        self._console = console
        self._step_timing: dict[str, float] = {}
        self.timing: dict[str, float] = {}
        """Seconds by kind of command, since this process began."""
        self.skipped_steps = skipped_steps
        """Steps of the whole run that changed nothing: voided, or without a valid sample."""
        self.pool_metrics: Callable[[], dict[str, float]] = dict
        """What the schedule made of the step that is ending: bubbles, staleness."""
        self._hacking = HackingWatch(
            window=recipe.eval.alarm_window if recipe.eval else 0, errors=recipe.eval.alarm_errors if recipe.eval else 0.0
        )
        self._hacking.replay(history)
        self._without_rewards = 0
        self._step_began = time.monotonic()

    def say(self, text: str) -> None:
        """A line for people."""
        self._console.say(text)

    def warn(self, kind: str, text: str) -> None:
        """A warning for people, once per kind."""
        self._console.warn(kind, text)

    def timed(self, kind: str, seconds: float) -> None:
        """A command of this kind took so long."""
        for timing in (self._step_timing, self.timing):
            timing[kind] = timing.get(kind, 0.0) + seconds

    def encoded(self, truncated: Collection[str]) -> None:
        """Prompts are encoded; ``truncated`` are the ones so far that no text encoder saw to their end."""
        if truncated:
            self._console.warn(
                "truncated",
                f"a prompt is longer than the text encoders read, and its end is ignored: {min(truncated)[:80]!r}...",
            )

    def picture_rows(self, samples: Sequence[SampleId]) -> list[int]:
        """Rows of a micro-batch whose pictures are due for saving: the first samples of the first prompts of some steps."""
        log, step = self._recipe.log, samples[0].step
        last = step == self._recipe.train.steps - 1
        if not log.sample_freq or (step % log.sample_freq and not last):
            return []
        per_group = max(1, log.num_samples // self._recipe.rollout.prompts_per_step)
        return [
            row for row, s in enumerate(samples) if s.sample < per_group and s.prompt * per_group + s.sample < log.num_samples
        ]

    def scored(
        self, samples: Sequence[SampleId], prompts: Sequence[Prompt], rewards: Rewards, pictures: Pictures, policy_version: int
    ) -> None:
        """Save the pictures of a micro-batch that are due. prompts: one per sample; policy_version: whose pictures they are."""
        step, chosen = samples[0].step, pictures.rows
        if not chosen:
            return
        rows = [
            {
                "step": step,
                "prompt": prompts[row].text,
                "sample": str(samples[row]),
                "seed": self._recipe.run.seed,
                "policy_version": policy_version,
                "reward": _plain(rewards.totals[row]),
                "rewards": {name: _plain(values[row]) for name, values in rewards.parts.items()},
            }
            for row in chosen
        ]
        names = [f"prompt-{samples[row].prompt:03d}-sample-{samples[row].sample:03d}" for row in chosen]
        self._folder.save_samples(f"step-{step:06d}", pictures.images, names, rows, fps=self._recipe.rollout.fps)
        self._log.images("train/samples", step, filmstrips(pictures.images), [_caption(row) for row in rows])

    def stepped(self, step: int, outcome: StepOutcome, trained: Mapping[str, float], record: StepRecord[Any, Any]) -> None:
        """An RL step is over: log its metrics. trained: what the trainer says of it."""
        weights = {reward.name: reward.weight for reward in self._recipe.rewards}
        metrics = _reward_metrics(record, weights) | dict(trained)
        self.skipped_steps += outcome is not StepOutcome.APPLIED
        now = time.monotonic()
        seconds = now - self._step_began - self._step_timing.get("evaluate", 0.0)
        self._step_began = now
        metrics["skipped_steps"] = float(self.skipped_steps)
        metrics["samples_per_second"] = record.rewards.size / seconds if seconds > 0 else math.nan
        metrics |= {f"timing_s/{kind}": value for kind, value in self._step_timing.items()}
        metrics["timing_s/step"] = seconds
        metrics |= self.pool_metrics()
        self._step_timing = {}
        self._hacking.trained(step, metrics["reward_mean"])
        self._log.log("train", step, metrics)
        self._console.stepped(step, metrics)
        if outcome is StepOutcome.VOIDED:
            self._console.warn(f"voided-{step}", f"step {step} was voided: its gradient was not finite")
        if outcome is StepOutcome.EMPTY:
            self._console.warn(f"empty-{step}", f"step {step} changed nothing: it has no valid sample to learn from")
        self._stop_without_rewards(step, bool(np.isfinite(record.rewards).any()))
        if metrics["invalid_samples"]:
            self._console.warn("invalid", f"{int(metrics['invalid_samples'])} samples of step {step} have no valid reward")
        gate = start_gate_of(self._recipe)
        for kind, text in warnings_of(metrics, clip_range=gate.clip_range, noise_share=gate.warn):
            self._console.warn(kind, text)

    def _stop_without_rewards(self, step: int, any_valid: bool) -> None:
        """Raise RunFailed when no reward was valid for ``train.max_skipped_steps`` steps in a row."""
        self._without_rewards = 0 if any_valid else self._without_rewards + 1
        if self._without_rewards >= self._recipe.train.max_skipped_steps:
            raise RunFailed(
                f"No reward was valid in {self._without_rewards} steps in a row, the last one step {step}.",
                why="Every reward is NaN or infinite, or no image is finite: there is nothing to learn from.",
                fix="Look at the saved pictures and at the reward; a model that diverged wants a smaller learning rate.",
            )

    def evaluated(self, version: int, evaluation: Evaluation, prompts: Sequence[Prompt]) -> None:
        """A version was evaluated: log it and save the first pictures."""
        metrics = {
            "reward": evaluation.reward,
            "reward_std": evaluation.reward_std,
            "num_images": float(len(evaluation.rewards)),
            "invalid_samples": float((~np.isfinite(evaluation.rewards)).sum()),
            **{f"reward/{name}": value for name, value in evaluation.parts.items()},
            **_effort_metrics(evaluation.efforts),
            **category_means(evaluation, prompts),
        }
        parts = ", ".join(f"{name} {value:.3f}" for name, value in evaluation.parts.items())
        self._console.say(f"held out, version {version}: reward {evaluation.reward:.3f} ({parts})")
        count = min(self._recipe.log.num_samples, len(prompts))
        rows = [
            {
                "prompt": prompts[i].text,
                "policy_version": version,
                "held_out": True,
                "reward": _plain(evaluation.rewards[i]),
                "rewards": {name: _plain(values[i]) for name, values in evaluation.part_values.items()},
            }
            for i in range(count)
        ]
        names = [f"prompt-{i:03d}" for i in range(count)]
        images = evaluation.images[:count]
        self._folder.save_samples(f"eval-version-{version:06d}", images, names, rows, fps=self._recipe.rollout.fps)
        self._log.images("eval/samples", version, filmstrips(images), [_caption(row) for row in rows])
        alarm = self._hacking.evaluated(
            version, evaluation.reward, standard_error(evaluation.reward_std, int(np.isfinite(evaluation.rewards).sum()))
        )
        if alarm is not None:
            self._console.warn(f"hacking-{version}", str(alarm))
        metrics["hacking_alarm"] = float(self._hacking.in_episode)
        # The row comes last: a version whose row is there is not evaluated again when the run goes on.
        self._log.log("eval", version, metrics)


def _reward_metrics(record: StepRecord[Any, Any], weights: Mapping[str, float]) -> dict[str, float]:
    valid = record.rewards[np.isfinite(record.rewards)]
    metrics = {
        "reward_mean": float(valid.mean()) if valid.size else math.nan,
        "reward_std": float(valid.std()) if valid.size else math.nan,
        "invalid_samples": float(record.rewards.size - valid.size),
        "zero_std_ratio": _zero_std_ratio(record.rewards),
    }
    for name, pieces in record.parts.items():
        values = np.concatenate([pieces[index] for index in sorted(pieces)])
        values = values[np.isfinite(values)]
        metrics[f"reward/{name}"] = float(values.mean()) if values.size else math.nan
        if name in weights:
            metrics[f"reward_weighted/{name}"] = weights[name] * metrics[f"reward/{name}"]
    return metrics | _effort_metrics({name: sum(efforts.values(), Effort()) for name, efforts in record.efforts.items()})


def _effort_metrics(efforts: Mapping[str, Effort]) -> dict[str, float]:
    metrics = {}
    for name, effort in efforts.items():
        metrics[f"timing_s/reward/{name}"] = effort.seconds
        metrics[f"invalid_samples/{name}"] = float(effort.invalid)
        metrics[f"retries/{name}"] = float(effort.retries)
    return metrics


def category_means(evaluation: Evaluation, prompts: Sequence[Prompt]) -> dict[str, float]:
    """``category/<name>/reward`` and ``category/<name>/<part>``: means of the valid ones, where prompts have categories."""
    _, kinds = categories_of(prompts)
    names = list(dict.fromkeys(kind for kind in kinds if kind is not None))
    if len(names) > _MOST_CATEGORIES:
        return {}
    means = {}
    for name in names:
        chosen = np.array([kind == name for kind in kinds])
        for part, values in {"reward": evaluation.rewards, **evaluation.part_values}.items():
            valid = values[chosen & np.isfinite(values)]
            if valid.size:
                means[f"category/{name.replace('/', '_')}/{part}"] = float(valid.mean())
    return means


def _caption(row: Mapping[str, object]) -> str:
    return f"{row['prompt']} ({row['reward']})"


def _zero_std_ratio(rewards: NDArray[np.float64]) -> float:
    """Share of the groups (rows) with equal rewards, of those with at least two valid ones; 0 where there is none."""
    rows = [row[np.isfinite(row)] for row in rewards]
    spreads = [float(np.ptp(row)) for row in rows if row.size > 1]
    return sum(spread == 0 for spread in spreads) / len(spreads) if spreads else 0.0


def _plain(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
