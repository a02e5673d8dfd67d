"""On a cluster, whose ranks share the samples of a prompt, a reward that compares them still sees all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from digenrl.metrics.log import read_metrics
from tests.runtime.ray.conftest import DISAGGREGATED, TrainSmall

EXAMPLES = Path(__file__).parents[3] / "examples"
REWARDS = "rewards=[{type: brightness}, {type: 'group_reward:Variety', weight: 2}]"
HELD_OUT = "num_inference_steps: 1, rewards: [{type: jpeg}, {type: brightness, weight: 0}]"


@pytest.mark.slow
@pytest.mark.parametrize("scorers", ["generator", "pool", "driver"])
def test_groups_and_held_out_rewards_are_those_of_one_process(
    scorers: str, train_small: TrainSmall, ray_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    prompts = tmp_path / "held_out.txt"
    prompts.write_text("".join(f"{number} red circles\n" for number in range(7)))
    changes = (REWARDS, f"eval={{prompts: {prompts}, {HELD_OUT}}}", "train.steps=1", "rollout.prompts_per_step=3")
    here = train_small("here", *changes)
    replica = ("cluster.generators.0.ranks=2", f"cluster.scorers.placement={scorers}", "cluster.scorers.resources.cpus=0.25")
    there = train_small("there", *DISAGGREGATED, *replica, *changes)
    assert there["digests"] == here["digests"]
    assert there["eval"] == here["eval"]
    rows = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("here", "there")]
    for own, other in zip(*rows, strict=True):
        named = {key for key in own if key.startswith("reward/")}
        wanted = {"train": {"brightness", "group_reward:Variety", "Variety"}, "eval": {"jpeg", "jpeg/kilobytes", "brightness"}}
        assert named <= {f"reward/{name}" for name in wanted[own["kind"]]}
        assert len(named) == {"train": 2, "eval": 3}[own["kind"]]
        assert {key: own[key] for key in named} == {key: other[key] for key in named}
