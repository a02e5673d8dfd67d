from __future__ import annotations

import pytest

from digenrl.errors import ConfigError
from digenrl.simulation.costs import SimulationCosts

GOOD = {"generate": [2.0, 3.0], "score": [0.1, 0.2], "update": 1.0, "tag": 2.0}


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("generate", [2.0, -1.0], r"costs.generate\[1\]"),
        ("generate", 0, r"costs.generate\[0\]"),
        ("generate", [], "costs.generate"),
        ("generate", None, "costs.generate is missing"),
        ("update", 0.0, "costs.update"),
        ("update", None, "costs.update is missing"),
        ("update", "soon", "costs.update"),
        ("update", float("nan"), "costs.update"),
        ("update", float("inf"), "costs.update"),
        ("score", [0.1, 0.0], r"costs.score\[1\]"),
        ("tag", -2, "costs.tag"),
        ("switch_in", -0.1, "costs.switch_in"),
        ("sync", "x", "costs.sync"),
        ("last_share", 0, "costs.last_share"),
        ("last_share", 1.5, "costs.last_share"),
        ("optimiser", 1.0, "costs.optimiser"),
    ],
)
def test_a_cost_that_is_negative_zero_missing_or_unknown_is_refused_by_name(key: str, value: object, named: str) -> None:
    plain = {name: each for name, each in {**GOOD, key: value}.items() if each is not None}
    with pytest.raises(ConfigError, match=named):
        SimulationCosts.from_plain(plain)


def test_a_number_written_as_text_counts_as_yaml_means_it() -> None:
    assert SimulationCosts.from_plain({**GOOD, "update": "1e-3"}).update == 1e-3


def test_the_searches_see_the_same_costs_in_microseconds() -> None:
    costs = SimulationCosts.from_plain(GOOD).step_costs()
    assert (costs.generate, costs.score, costs.update, costs.tag) == (
        (2_000_000, 3_000_000),
        (100_000, 200_000),
        1_000_000,
        2_000_000,
    )
