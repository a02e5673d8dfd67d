"""``digenrl check`` and ``digenrl show`` about algorithms: what is refused, what waiting for a step costs, what there is."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from digenrl.cli.check import run
from digenrl.cli.main import app
from digenrl.errors import ConfigError

QUICKSTART = str(Path(__file__).parents[2] / "recipes" / "quickstart.yaml")
HELD = ("algorithm.advantage_std=batch", "schedule.update_after=step")


def check(*changes: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["check", QUICKSTART, *changes])
    return done.exit_code, done.output


def test_what_it_costs_to_wait_for_the_whole_step_is_told() -> None:
    code, text = check(*HELD, "cluster.placement=disaggregated")
    assert code == 0
    (line,) = [line for line in text.splitlines() if "update_after: step" in line]
    assert int(line.split("takes ")[1].split(" %")[0]) > 0
    _, alone = check(*HELD, "cluster.placement=inline")
    assert "no time is lost" in alone
    _, usual = check()
    assert "updates wait" not in usual


def test_the_updates_of_a_rollout_are_told() -> None:
    code, text = check("algorithm.updates_per_rollout=3")
    assert code == 0
    assert "3 optimizer steps per rollout, over 3 micro-batches" in text


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        (("algorithm.updates_per_rollout=4",), "updates_per_rollout"),
        (("algorithm.dynamics=ddim",), "flow model"),
        (("algorithm.clip_range=0",), "clip_range"),
        (("algorithm.clip_range=[1e-4, -1]",), "clip_range"),
        (("algorithm={type: dance_grpo, best_of_n: 13}",), "best_of_n"),
        (("algorithm={type: dance_grpo, timestep_fraction: 0.1}",), "timestep_fraction"),
        (("algorithm={type: mix_grpo, sde_window_size: 8}",), "sde_window_size"),
        (("rollout.num_generations=1",), "num_generations"),
        (("rollout.guidance_scale=3.5",), "true_cfg_scale"),
        (("algorithm.advantage_std=batch",), "update_after"),
    ],
)
def test_what_cannot_train_is_refused_with_what_why_and_fix(changes: tuple[str, ...], what: str) -> None:
    with pytest.raises(ConfigError) as refused:
        run(QUICKSTART, changes, as_json=False)
    assert what in str(refused.value)
    assert refused.value.fix


def test_the_algorithms_are_listed_by_either_name() -> None:
    one, many = (CliRunner().invoke(app, ["show", kind]).output for kind in ("algorithm", "algorithms"))
    assert one == many
    assert all(name in many for name in ("flow_grpo", "dance_grpo", "mix_grpo"))
