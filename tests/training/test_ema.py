"""The moving average never touches the trained weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from digenrl.config.schema import EmaSection
from digenrl.ids import StepOutcome
from digenrl.training.digest import digest
from digenrl.training.ema import Ema


def weights() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(3, 4, generator=generator)) for name in ("a", "b")}


def add_one(parameters: dict[str, nn.Parameter]) -> None:
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.add_(1.0)


def bits(tensors: Any) -> str:
    return digest({name: tensor.detach() for name, tensor in tensors.items()})


def test_the_average_starts_at_the_weights_and_shares_no_memory_with_them() -> None:
    parameters = weights()
    ema = Ema(parameters, EmaSection(decay=0.9))
    assert bits(ema.average) == bits(parameters)
    start = bits(parameters)
    add_one(parameters)
    assert bits(ema.average) == start


def test_the_decay_warms_up_to_its_limit() -> None:
    parameters = {"w": nn.Parameter(torch.zeros(1))}
    ema = Ema(parameters, EmaSection(decay=0.25))
    expected = 0.0
    for step, decay in enumerate([0.1, 2 / 11, 0.25, 0.25]):
        with torch.no_grad():
            parameters["w"].fill_(step + 1.0)
        ema.update()
        expected = decay * expected + (1 - decay) * (step + 1.0)
        assert float(ema.average["w"]) == pytest.approx(expected, rel=1e-6)


def test_only_every_nth_call_updates() -> None:
    parameters = weights()
    ema = Ema(parameters, EmaSection(decay=0.5, update_interval=3))
    start = bits(ema.average)
    for expect_change in (False, False, True):
        add_one(parameters)
        ema.update()
        assert (bits(ema.average) != start) == expect_change


@pytest.mark.parametrize("fails", [False, True])
def test_swapping_shows_the_average_and_brings_the_weights_back_bit_for_bit(fails: bool) -> None:
    parameters = weights()
    ema = Ema(parameters, EmaSection(decay=0.5))
    add_one(parameters)
    ema.update()
    trained, average = bits(parameters), bits(ema.average)
    assert trained != average
    try:
        with ema.swapped():
            assert bits(parameters) == average
            if fails:
                raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    assert bits(parameters) == trained
    assert bits(ema.average) == average


def test_an_average_that_cannot_be_loaded_leaves_no_half_swapped_weights() -> None:
    parameters = weights()
    ema = Ema(parameters, EmaSection(decay=0.5))
    add_one(parameters)
    trained = bits(parameters)
    del ema.average["b"]
    with pytest.raises(KeyError), ema.swapped():
        pass
    assert bits(parameters) == trained


def test_the_average_follows_applied_steps_and_nothing_else(make_rig: Callable[..., Any]) -> None:
    rig = make_rig(train={"steps": 4, "learning_rate": 1e-3, "ema": {"decay": 0.5}})
    nothing = [float("nan")] * 3
    for rewards, outcome in (
        (([0, 1, 3], [2, 5, 1]), StepOutcome.APPLIED),
        ((nothing, nothing), StepOutcome.EMPTY),
        (([0, 1, 3], [2, 5, 1]), StepOutcome.APPLIED),
    ):
        before = bits(rig.trainer.ema.average)
        rig.trainer.accumulate(rig.trajectory(), rig.conditioning(), rig.advantages(*rewards))
        assert bits(rig.trainer.ema.average) == before
        assert rig.trainer.optimizer_step().outcome is outcome
        assert (bits(rig.trainer.ema.average) != before) == (outcome is StepOutcome.APPLIED)
