"""Settings that all clipped policy gradients on group advantages share: objective, advantages, KL, updates, start gate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from digenrl.errors import ConfigError

if TYPE_CHECKING:
    from digenrl.config.schema import Recipe

DynamicsName = Literal["flow_sde", "dance_sde", "cps", "ode", "ddim"]


class PolicyGradientSettings(BaseModel):
    """What flow_grpo, dance_grpo and mix_grpo have in common; defaults are Flow-GRPO's."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    dynamics: DynamicsName = Field(
        default="flow_sde",
        description="One denoising step as a distribution: Flow-GRPO's SDE, DanceGRPO's (constant noise: `rollout.noise_level` "
        "is its eta, 0.3 there), or Flow-CPS (`rollout.noise_level` at most 1, 0.8 there). `ode` has no randomness to train on, "
        "and `ddim` is for models that predict noise, of which none is built in: both are refused.",
    )
    clip_range: float | tuple[float, float] | None = Field(
        default=None,
        description="Clip of the importance ratio: c for 1 - c to 1 + c, or [low, high] for 1 - low to 1 + high. Default 1e-4 "
        "for `log_prob_reduction: mean` (1e-5 with `dynamics: cps`, whose log-ratios are smaller), 0.2 for `sum`.",
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
    advantage_trim: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Share of a group's lowest rewards that is left out of its mean and standard deviation (they keep their "
        "advantage); nothing is left out where the others are equal.",
    )
    reward_weighting: Literal["reward", "advantage", "loss"] = Field(
        default="reward",
        description="Where several rewards meet: `reward` weighs and sums them, and takes advantages of the sum; `advantage` "
        "normalizes each reward in its group and sums the weighted advantages; `loss` clips the objective of each reward apart "
        "and sums these. With one reward of weight 1 all are the same.",
    )
    skip_zero_variance: bool = Field(
        default=False, description="Leave groups of equal rewards out of the loss and of its divisor Z."
    )
    kl_beta: float = Field(default=0.0, ge=0, description="Weight of the KL divergence to the starting model.")
    kl_form: Literal["exact", "flow_grpo", "v_based"] = Field(
        default="exact",
        description="`exact`: per-element KL of the two Gaussian steps, divisor 2 b^2 |dt|; `flow_grpo`: divisor 2 b^2, "
        "as that code has it (its kl_beta values belong to this form), for `dynamics: flow_sde` alone; `v_based`: mean squared "
        "difference of the velocities, without a divisor.",
    )
    updates_per_rollout: int = Field(
        default=1,
        ge=1,
        description="Optimizer steps per RL step, each over its own share of the micro-batches; from the second on, the samples "
        "are of slightly older weights. At most the micro-batches of a step.",
    )
    start_gate_warn: float = Field(
        default=0.1,
        ge=0,
        description="A mean difference of rollout and training log-probabilities above this many clip ranges is warned about: "
        "with unchanged weights it is numerical noise.",
    )
    start_gate_refuse: float = Field(
        default=1.0, gt=0, description="Before the first update, a difference above this many clip ranges stops the run."
    )

    @field_validator("clip_range")
    @classmethod
    def _clip_is_positive(cls, given: float | tuple[float, float] | None) -> float | tuple[float, float] | None:
        if given is not None and min(given if isinstance(given, tuple) else (given,)) <= 0:
            raise ValueError("a clip range must be greater than 0, or no ratio but 1 has a gradient")
        return given

    @property
    def effective_clip_range(self) -> tuple[float, float]:
        """(low, high) of ``clip_range``, or the default that fits ``log_prob_reduction`` and ``dynamics``."""
        if isinstance(self.clip_range, tuple):
            return self.clip_range
        both = self.clip_range
        if both is None:
            both = 0.2 if self.log_prob_reduction == "sum" else 1e-5 if self.dynamics == "cps" else 1e-4
        return both, both

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
        if self.advantage_std == "batch" and recipe.schedule.update_after != "step":
            raise ConfigError(
                "algorithm.advantage_std: batch needs schedule.update_after: step.",
                why="The standard deviation of all rewards of a step is known only when the whole step is scored.",
                fix="Set schedule.update_after=step, or algorithm.advantage_std=group.",
            )

    def _check_dynamics(self, recipe: Recipe) -> None:
        if self.dynamics == "ddim":
            raise ConfigError(
                f"algorithm.dynamics: ddim does not go with model.type: {recipe.model.type}, a flow model.",
                why="DDIM's step is for models that predict noise on a table of alphas; this one predicts a velocity.",
                fix="Use algorithm.dynamics=flow_sde, dance_sde or cps.",
            )
        if self.dynamics == "ode" or recipe.rollout.noise_level == 0:
            key = "algorithm.dynamics: ode" if self.dynamics == "ode" else "rollout.noise_level: 0"
            raise ConfigError(
                f"{key} leaves nothing to train.",
                why="The policy learns from the randomness of its denoising steps; a deterministic one has no log-probability.",
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


def check_window(size: int, window_range: tuple[int, int], num_inference_steps: int) -> None:
    """Raise ConfigError unless a window of ``size`` steps fits into [lo, hi), inside the schedule and without its last step."""
    low, high = window_range
    if 0 <= low < high <= num_inference_steps - 1 and size <= high - low:
        return
    most = max(1, min(high, num_inference_steps - 1) - max(low, 0))
    raise ConfigError(
        f"algorithm.sde_window_size ({size}) does not fit into steps {low} to {high - 1} of the {num_inference_steps} denoising "
        "steps of rollout.num_inference_steps.",
        why="A window must lie inside the schedule and leave the last step out.",
        fix=f"Use a window of at most {most}, a range inside [0, {num_inference_steps - 1}], or "
        f"rollout.num_inference_steps={max(size, high) + 1}.",
    )


def share_of_steps(num_steps: int, fraction: float) -> int:
    """int(num_steps f). The epsilon keeps 50 * 0.58 = 28.999999999999996 and its kind from losing a step to rounding."""
    return int(num_steps * fraction + 1e-9)
