"""Settings of the built-in algorithms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

from digenrl.errors import ConfigError

if TYPE_CHECKING:
    from digenrl.config.schema import Recipe


class FlowGRPOSettings(BaseModel):
    """Flow-GRPO (arXiv 2505.05470), Flow-GRPO-Fast when ``timestep_selection`` is ``window``, Flow-CPS with ``dynamics: cps``."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    dynamics: Literal["flow_sde", "dance_sde", "cps", "ode"] = Field(
        default="flow_sde",
        description="One denoising step as a distribution: Flow-GRPO's SDE, DanceGRPO's (constant noise: `rollout.noise_level` "
        "is its eta, 0.3 there), or Flow-CPS (`rollout.noise_level` at most 1, 0.8 there); `ode` has no randomness to train on.",
    )
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
    clip_range: float | None = Field(
        default=None,
        gt=0,
        description="Clip of the importance ratio, 1 - c to 1 + c. Default 1e-4 for `log_prob_reduction: mean` (1e-5 with "
        "`dynamics: cps`, whose log-ratios are smaller), 0.2 for `sum`.",
    )
    log_prob_reduction: Literal["mean", "sum"] = Field(
        default="mean",
        description="Log-probability of a step as the mean over latent elements (as all peers: the ratio is then the "
        "D-th root of the density ratio, hence the small clip) or as their sum.",
    )
    adv_clip_max: float = Field(default=5.0, gt=0, description="Advantages are clamped to [-c, c].")
    advantage_std: Literal["group", "batch", "none"] = Field(
        default="group",
        description="What a group's centred rewards are divided by: its own standard deviation, that of all rewards of "
        "the step (needs `schedule.update_after: step`), or nothing.",
    )
    advantage_ddof: Literal[0, 1] = Field(default=0, description="0: population standard deviation; 1: unbiased.")
    advantage_eps: float = Field(default=1e-4, ge=0, description="Added to the standard deviation.")
    skip_zero_variance: bool = Field(
        default=False, description="Leave groups of equal rewards out of the loss and of its divisor Z."
    )
    kl_beta: float = Field(default=0.0, ge=0, description="Weight of the KL divergence to the starting model.")
    kl_form: Literal["exact", "flow_grpo"] = Field(
        default="exact",
        description="`exact`: per-element KL of the two Gaussian steps, divisor 2 b^2 |dt|; `flow_grpo`: divisor 2 b^2, "
        "as that code has it (its kl_beta values belong to this form), for `dynamics: flow_sde` alone.",
    )

    @property
    def effective_clip_range(self) -> float:
        """``clip_range``, or the default that fits ``log_prob_reduction`` and ``dynamics``."""
        if self.clip_range is not None:
            return self.clip_range
        if self.log_prob_reduction == "sum":
            return 0.2
        return 1e-5 if self.dynamics == "cps" else 1e-4

    def num_trained_steps(self, num_inference_steps: int) -> int:
        """Denoising steps trained per sample: K = int(T f) of the first T - 1, at least 1, or the window's length."""
        if self.timestep_selection == "window":
            return self.sde_window_size
        # The epsilon keeps 50 * 0.58 = 28.999999999999996 and its kind from losing a step to rounding.
        asked = int(num_inference_steps * self.timestep_fraction + 1e-9)
        return max(1, min(asked, num_inference_steps - 1))

    def window_range(self, num_inference_steps: int) -> tuple[int, int]:
        """Steps [lo, hi) in which the window lies; by default all but the last step."""
        return self.sde_window_range or (0, num_inference_steps - 1)

    def check(self, recipe: Recipe) -> None:
        """Refuse what cannot train: called by config/checks.py with the whole recipe."""
        steps = recipe.rollout.num_inference_steps
        self._check_dynamics(recipe)
        if recipe.rollout.num_generations < 2:
            raise ConfigError(
                f"rollout.num_generations ({recipe.rollout.num_generations}) is too small for group advantages.",
                why="A sample is judged against the others of its prompt; a group of one always has advantage 0.",
                fix="Use rollout.num_generations=8 or more.",
            )
        if steps < 2:
            raise ConfigError(
                f"rollout.num_inference_steps ({steps}) leaves no step to train.",
                why="The last denoising step is never trained: its noise would stay in the image.",
                fix="Use rollout.num_inference_steps=8 or more.",
            )
        if self.timestep_selection == "window":
            low, high = self.window_range(steps)
            if not (0 <= low < high <= steps - 1) or self.sde_window_size > high - low:
                raise ConfigError(
                    f"algorithm.sde_window_size ({self.sde_window_size}) does not fit into steps {low} to {high - 1} of the "
                    f"{steps} denoising steps of rollout.num_inference_steps.",
                    why="A window must lie inside the schedule and leave the last step out.",
                    fix=f"Use a window of at most {max(1, min(high, steps - 1) - max(low, 0))}, a range inside [0, {steps - 1}], "
                    f"or rollout.num_inference_steps={max(self.sde_window_size, high) + 1}.",
                )
        if self.advantage_std == "batch" and recipe.schedule.update_after != "step":
            raise ConfigError(
                "algorithm.advantage_std: batch needs schedule.update_after: step.",
                why="The standard deviation of all rewards of a step is known only when the whole step is scored.",
                fix="Set schedule.update_after=step, or algorithm.advantage_std=group.",
            )

    def _check_dynamics(self, recipe: Recipe) -> None:
        if self.dynamics == "ode" or recipe.rollout.noise_level == 0:
            key = "algorithm.dynamics: ode" if self.dynamics == "ode" else "rollout.noise_level: 0"
            raise ConfigError(
                f"{key} leaves nothing to train.",
                why="Flow-GRPO learns from the randomness of its denoising steps; a deterministic step has no log-probability.",
                fix="Use algorithm.dynamics=flow_sde with rollout.noise_level=0.7; evaluation uses the ODE by itself.",
            )
        if self.dynamics == "cps" and recipe.rollout.noise_level > 1:
            raise ConfigError(
                f"rollout.noise_level ({recipe.rollout.noise_level}) is more than 1 with algorithm.dynamics: cps.",
                why="Flow-CPS replaces the share sin(pi a / 2) of a step's noise: all of it at 1, and less again above.",
                fix="Use rollout.noise_level=0.8, or algorithm.dynamics=flow_sde, which takes any strength.",
            )
        if self.dynamics != "flow_sde" and self.kl_form == "flow_grpo":
            raise ConfigError(
                f"algorithm.kl_form: flow_grpo does not go with algorithm.dynamics: {self.dynamics}.",
                why="It divides by the diffusion coefficient of Flow-GRPO's SDE; the peers have no such form for other dynamics.",
                fix="Use algorithm.kl_form=exact, or algorithm.dynamics=flow_sde.",
            )
