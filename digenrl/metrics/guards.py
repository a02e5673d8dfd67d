"""Warnings about runs that go wrong quietly: a clip drowned in numerical noise, groups with nothing to learn from."""

from __future__ import annotations

from collections.abc import Mapping


def warnings_of(metrics: Mapping[str, float], *, clip_range: float | None, noise_share: float = 0.1) -> list[tuple[str, str]]:
    """(kind, text) of everything in one step's metrics that a user should look at.

    clip_range: of the ratio, if any, the narrower side. noise_share: clip ranges of numerical noise that are let pass.

    The weights do not change between rollout and training of a step, so ``logprob_abs_diff`` is numerical noise alone.
    """
    found = []
    noise = metrics.get("logprob_abs_diff", 0.0)
    if clip_range is not None and noise > noise_share * clip_range:
        found.append(
            (
                "clip_noise",
                f"algorithm.clip_range ({clip_range:g}) is not far from the numerical difference of rollout and training "
                f"log-probabilities ({noise:.1e}): clipping acts on noise. Use float32, equal forward batch sizes "
                "(rollout.forward_batch_size = train.timestep_batch_size), or a wider clip.",
            )
        )
    if metrics.get("clip_fraction", 0.0) > 0.5:
        found.append(
            (
                "clip_fraction",
                f"{metrics['clip_fraction']:.0%} of the pairs are clipped: most of the gradient is gone. "
                "Lower the learning rate.",
            )
        )
    if metrics.get("zero_std_ratio", 0.0) >= 0.9:
        found.append(
            (
                "zero_std",
                f"{metrics['zero_std_ratio']:.0%} of the groups have equal rewards: there is hardly anything to learn from. "
                "The reward may be saturated, constant, or too hard for this model.",
            )
        )
    return found
