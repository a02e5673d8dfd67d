"""Evaluation: averaged weights, the same noise every time, and nothing changed afterwards."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from digenrl.config.reward_list import RewardSpec
from digenrl.config.section import Section
from digenrl.data.prompts import Prompt
from digenrl.diffusion.dynamics import ODE
from digenrl.diffusion.noise import Purpose, normal
from digenrl.errors import RunFailed
from digenrl.ids import SampleId
from digenrl.models.base import Guidance
from digenrl.rewards.base import RewardSample
from digenrl.rewards.compose import Rewards, WeightedRewards
from digenrl.training.digest import digest
from digenrl.workers.evaluator import Evaluator, summarise
from digenrl.workers.scorer import Scorer

RigMaker = Callable[..., Any]
HELD_OUT = [Prompt(text=text) for text in ("a", "two dogs", "three red cats", "four", "a blue house by the sea")]


class Brightness:
    """Mean pixel; fails or answers NaN when told to."""

    def __init__(self) -> None:
        self.fault = ""
        self.seen: list[str] = []

    def score(self, samples: Sequence[RewardSample]) -> Mapping[SampleId, float]:
        if self.fault == "raises":
            raise ZeroDivisionError
        self.seen.extend(s.prompt for s in samples)
        return {s.id: float("nan") if self.fault == "nan" else float(s.image.mean()) for s in samples}


def evaluated(make_rig: RigMaker, *, ema: bool = True, **section: Any) -> tuple[Any, Evaluator, Brightness]:
    """A rig one good step on, whose average is far from its weights."""
    train = {"steps": 3, "learning_rate": 0.05, "ema": {"decay": 0.9} if ema else None}
    rig = make_rig(train=train, eval={"prompts": "builtin:shapes/heldout.jsonl", "num_inference_steps": 3, **section})
    rig.trainer.accumulate(rig.trajectory(), rig.conditioning(), rig.advantages([0, 1, 3], [2, 5, 1]))
    rig.trainer.optimizer_step()
    reward = Brightness()
    rewards = WeightedRewards([(RewardSpec(type="x", name="brightness", settings=Section()), reward)])
    judge = Scorer(rig.adapter, rewards, forward_batch_size=rig.recipe.rollout.forward_batch_size)
    return rig, Evaluator(rig.policy, rig.trainer.ema, judge, rig.recipe, rig.recipe.eval, HELD_OUT), reward


def plain_images(rig: Any, seed: int = 0) -> np.ndarray:
    """The ODE from the evaluation's noise, in batches of the canonical size, with the weights that the network holds now."""
    schedule, guidance = rig.adapter.noise_schedule(3, 32, 32), Guidance()
    noise = torch.stack([normal(rig.adapter.latent_shape(32, 32), seed, Purpose.EVALUATION, i) for i in range(5)])
    images = []
    for rows in ([0, 1, 2], [3, 4, 4]):
        text = rig.generator.encode([HELD_OUT[r] for r in rows])
        x = noise[torch.tensor(rows)]
        with torch.no_grad():
            for step in range(3):
                s, s_next = (schedule.sigmas[i].expand(3) for i in (step, step + 1))
                v = rig.adapter.predict(x, schedule.timesteps[step].expand(3), text, guidance)
                x = ODE().step(x, v, s, s_next, schedule.sigmas[1], torch.zeros(3)).mean
            images.append(rig.adapter.decode(x))
    pixels = torch.cat(images)[:5]
    return (pixels * 255).round().byte().permute(0, 2, 3, 1).numpy()


def load(rig: Any, weights: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in rig.policy.parameters.items():
            parameter.copy_(weights[name])


def test_evaluation_shows_the_averaged_weights_and_not_the_trained_ones(make_rig: RigMaker) -> None:
    rig, evaluator, _ = evaluated(make_rig)
    result = evaluator.evaluate()
    trained = plain_images(rig)
    load(rig, rig.trainer.ema.average)
    averaged = plain_images(rig)
    assert np.array_equal(result.images, averaged)
    assert not np.array_equal(averaged, trained)


def test_without_an_average_evaluation_shows_the_trained_weights(make_rig: RigMaker) -> None:
    rig, evaluator, _ = evaluated(make_rig, ema=False)
    assert np.array_equal(evaluator.evaluate().images, plain_images(rig))


@pytest.mark.parametrize("fault", ["", "raises"])
def test_evaluation_changes_neither_weights_optimizer_average_version_nor_random_state(fault: str, make_rig: RigMaker) -> None:
    rig, evaluator, reward = evaluated(make_rig)

    def everything() -> list[object]:
        return [
            {part: digest(tensors) for part, tensors in rig.trainer.weights().items()},
            digest(dict(rig.adapter.transformer.state_dict())),
            rig.policy.version,
            [p.requires_grad for p in rig.policy.parameters.values()],
            torch.get_rng_state().tolist(),
            random.getstate(),
            np.random.get_state()[1].tolist(),
        ]

    before = everything()
    reward.fault = fault
    if fault:
        with pytest.raises(RunFailed, match="brightness"):
            evaluator.evaluate()
    else:
        evaluator.evaluate()
    assert everything() == before


def test_an_evaluation_in_between_changes_no_bit_of_the_training(make_rig: RigMaker) -> None:
    digests = []
    for evaluate in (False, True):
        rig, evaluator, _ = evaluated(make_rig)
        if evaluate:
            evaluator.evaluate()
        rig.trainer.accumulate(rig.trajectory(step=1), rig.conditioning(), rig.advantages([3, 1, 3], [2, 5, 9]))
        rig.trainer.optimizer_step()
        digests.append({part: digest(tensors) for part, tensors in rig.trainer.weights().items()})
    assert digests[0] == digests[1]


def test_every_held_out_prompt_is_counted_once_though_batches_are_padded(make_rig: RigMaker) -> None:
    _, evaluator, reward = evaluated(make_rig)
    result = evaluator.evaluate()
    assert reward.seen == [p.text for p in HELD_OUT]
    assert result.rewards.shape == (5,)
    assert len(result.images) == 5
    assert result.reward == pytest.approx(result.images.mean())
    assert result.parts == {"brightness": pytest.approx(result.reward)}


def test_the_noise_is_the_evaluations_own_and_the_same_every_time(make_rig: RigMaker) -> None:
    rig, evaluator, _ = evaluated(make_rig)
    once = evaluator.evaluate().images
    assert np.array_equal(evaluator.evaluate().images, once)
    _, other_seed, _ = evaluated(make_rig, seed=1)
    assert not np.array_equal(other_seed.evaluate().images, once)
    load(rig, rig.trainer.ema.average)
    assert not np.array_equal(plain_images(rig, seed=1), once)


def test_an_infinite_score_is_left_out_of_the_means_as_one_that_is_no_number() -> None:
    scores = np.array([1.0, np.inf, 3.0, np.nan])
    found = summarise(
        np.zeros((4, 1, 1, 3), dtype=np.uint8), Rewards(totals=np.array([2.0, np.nan, 4.0, np.nan]), parts={"x": scores})
    )
    assert (found.reward, found.parts) == (3.0, {"x": 2.0})


def test_evaluation_without_one_valid_reward_fails_and_leaves_the_weights(make_rig: RigMaker) -> None:
    rig, evaluator, reward = evaluated(make_rig)
    before = digest(rig.policy.parameters)
    reward.fault = "nan"
    with pytest.raises(RunFailed, match="valid reward"):
        evaluator.evaluate()
    assert digest(rig.policy.parameters) == before
