"""Settings of the built-in algorithms: what each adds to, or sets otherwise in, the common ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from digenrl.config.settings.policy_gradient import DynamicsName, PolicyGradientSettings, check_window, share_of_steps
from digenrl.errors import ConfigError

if TYPE_CHECKING:
    from digenrl.config.schema import Recipe


class FlowGRPOSettings(PolicyGradientSettings):
    """Flow-GRPO (arXiv 2505.05470), Flow-GRPO-Fast when ``timestep_selection`` is ``window``, Flow-CPS with ``dynamics: cps``."""

    timestep_selection: Literal["first", "random", "window"] = Field(
        default="first",
        description="Which denoising steps are trained: the first K, a random K per sample, or a random window that is "
        "the only noisy part of the rollout. The last step is never trained.",
    )
    timestep_fraction: float = Field(
        default=0.99,
        gt=0,
        le=1,
        description="Share f of the T denoising steps trained by `first` and `random`: K = int(T f), from 1 to T - 1.",
    )
    sde_window_size: int = Field(default=2, ge=1, description="Denoising steps in the window of `timestep_selection: window`.")
    sde_window_range: tuple[int, int] | None = Field(
        default=None,
        description="The window lies in steps [lo, hi) of the schedule; all but the last step when not given.",
    )

    def num_trained_steps(self, num_inference_steps: int) -> int:
        """Denoising steps trained per sample: K = int(T f) of the first T - 1, at least 1, or the window's length."""
        if self.timestep_selection == "window":
            return self.sde_window_size
        return max(1, min(share_of_steps(num_inference_steps, self.timestep_fraction), num_inference_steps - 1))

    def window_range(self, num_inference_steps: int) -> tuple[int, int]:
        """Steps [lo, hi) in which the window lies; by default all but the last step."""
        return self.sde_window_range or (0, num_inference_steps - 1)

    def check(self, recipe: Recipe) -> None:
        """See PolicyGradientSettings.check."""
        super().check(recipe)
        steps = recipe.rollout.num_inference_steps
        if self.timestep_selection == "window":
            check_window(self.sde_window_size, self.window_range(steps), steps)


class DanceGRPOSettings(PolicyGradientSettings):
    """DanceGRPO (arXiv 2505.07818): constant noise, a random share of the steps, the best and the worst of a group."""

    dynamics: DynamicsName = Field(
        default="dance_sde",
        description="One denoising step as a distribution: DanceGRPO's SDE, whose noise is the same at every step "
        "(`rollout.noise_level` is its eta: 0.3 for images, 0.25 for HunyuanVideo), or one of flow_grpo's.",
    )
    timestep_fraction: float = Field(
        default=0.6,
        gt=0,
        le=1,
        description="Share f of the first T - 1 denoising steps that each sample trains, a random choice of its own: "
        "int((T - 1) f), as DanceGRPO counts.",
    )
    best_of_n: int | None = Field(
        default=None,
        ge=2,
        description="Train only so many samples of each group, the best half and the worst half of them; all if not given.",
    )
    advantage_ddof: Literal[0, 1] = Field(default=1, description="0: population; 1: unbiased, as DanceGRPO.")
    advantage_eps: float = Field(default=1e-8, ge=0, description="Added to the standard deviation; DanceGRPO's.")
    reward_weighting: Literal["reward", "advantage", "loss"] = Field(
        default="loss",
        description="Where several rewards meet: in a weighted sum of clipped objectives, as DanceGRPO's for HunyuanVideo; "
        "`reward` and `advantage` as in flow_grpo.",
    )

    def num_trained_steps(self, num_inference_steps: int) -> int:
        """Denoising steps trained per sample: int((T - 1) f)."""
        return share_of_steps(num_inference_steps - 1, self.timestep_fraction)

    def num_trained_samples(self, num_generations: int) -> int:
        """Samples trained of each group."""
        return num_generations if self.best_of_n is None else self.best_of_n

    def check(self, recipe: Recipe) -> None:
        """See PolicyGradientSettings.check."""
        super().check(recipe)
        steps, group = recipe.rollout.num_inference_steps, recipe.rollout.num_generations
        if not self.num_trained_steps(steps):
            raise ConfigError(
                f"algorithm.timestep_fraction ({self.timestep_fraction:g}) of the {steps - 1} steps before the last one "
                "trains none.",
                why="int((T - 1) f) steps of each sample are trained, T being rollout.num_inference_steps.",
                fix=f"Use algorithm.timestep_fraction=0.6, or any from {1 / (steps - 1):.3g} on.",
            )
        if self.best_of_n is not None and self.best_of_n > group:
            raise ConfigError(
                f"algorithm.best_of_n ({self.best_of_n}) is more than rollout.num_generations ({group}).",
                why="They are chosen among the samples of a prompt.",
                fix=f"Use algorithm.best_of_n={max(2, group // 2)}, or more generations.",
            )


class MixGRPOSettings(PolicyGradientSettings):
    """MixGRPO (arXiv 2507.21802): noise and training in a window that slides over the denoising steps, ODE outside."""

    sde_window_size: int = Field(default=4, ge=1, description="Denoising steps in the window (MixGRPO's group_size).")
    sde_window_range: tuple[int, int] | None = Field(
        default=None, description="The window slides in steps [lo, hi) of the schedule; all but the last step when not given."
    )
    window_schedule: Literal["progressive", "random", "decay", "exp_decay"] = Field(
        default="progressive",
        description="How the window moves: every `window_steps` RL steps, to a random place every `window_steps` RL steps, or "
        "faster and faster (`decay`: linearly from `window_steps` down to `window_min_steps`; `exp_decay`: exponentially).",
    )
    window_steps: int = Field(default=25, ge=1, description="RL steps in one place of the window (iters_per_group).")
    window_min_steps: int = Field(default=1, ge=1, description="The fewest of them, at the end of the range (`decay`).")
    window_decay_rate: float = Field(
        default=0.1, ge=0, description="Rate k of `exp_decay`: ceil(window_steps exp(-k (c - c_0)))."
    )
    window_decay_from: int = Field(default=13, ge=0, description="Denoising step c_0 from which `exp_decay` decays.")
    window_stride: int | None = Field(
        default=None, ge=1, description="Denoising steps that the window moves by; its own size if not given (no overlap)."
    )
    window_at_end: Literal["wrap", "stay"] = Field(
        default="wrap", description="At the end of the range the window begins anew (roll_back), or stays there."
    )
    flash_fraction: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="MixGRPO-Flash: DPM-Solver++ takes the steps after the window in this share of their number, at least one "
        "(0.4 there); none are saved if not given.",
    )
    advantage_ddof: Literal[0, 1] = Field(default=1, description="0: population; 1: unbiased, as MixGRPO.")
    advantage_eps: float = Field(default=1e-8, ge=0, description="Added to the standard deviation; MixGRPO's.")
    reward_weighting: Literal["reward", "advantage", "loss"] = Field(
        default="advantage",
        description="Where several rewards meet: in a weighted sum of advantages, as MixGRPO's advantage_aggr; `reward` is its "
        "reward_aggr, and `loss` is DanceGRPO's.",
    )

    def num_trained_steps(self, num_inference_steps: int) -> int:
        """The window's length, whatever the number of steps."""
        del num_inference_steps
        return self.sde_window_size

    def window_range(self, num_inference_steps: int) -> tuple[int, int]:
        """Steps [lo, hi) in which the window slides; by default all but the last step."""
        return self.sde_window_range or (0, num_inference_steps - 1)

    def check(self, recipe: Recipe) -> None:
        """See PolicyGradientSettings.check."""
        super().check(recipe)
        steps = recipe.rollout.num_inference_steps
        check_window(self.sde_window_size, self.window_range(steps), steps)
        if self.window_schedule == "decay" and self.window_min_steps > self.window_steps:
            raise ConfigError(
                f"algorithm.window_min_steps ({self.window_min_steps}) is more than algorithm.window_steps "
                f"({self.window_steps}).",
                why="`decay` goes from the one down to the other.",
                fix=f"Use algorithm.window_min_steps={self.window_steps} or less.",
            )
