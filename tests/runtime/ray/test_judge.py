"""A judge behind HTTP, asked by the generators of a disaggregated run, trains the weights of the same reward in one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from digenrl.errors import ConfigError
from tests.rewards.judge import Judge
from tests.rewards.services import FaultyServer, serving
from tests.runtime.ray.conftest import DISAGGREGATED, TrainSmall


@pytest.mark.slow
def test_a_judge_over_http_trains_the_weights_of_the_same_reward_in_process(train_small: TrainSmall, ray_session: None) -> None:
    here = train_small("here", "rewards=[{type: brightness}]")
    judge = Judge()
    with serving(judge) as url:
        reward = f"rewards=[{{type: vlm_judge, url: '{url}/v1', model: tiny-vl, maximum: 1}}]"
        there = train_small("there", *DISAGGREGATED, reward)
    assert len(judge.requests) == 3 * 6 * 4 + 2, "every sample once, and the self-test"
    assert there["digests"] == here["digests"]


@pytest.mark.slow
def test_workers_refuse_a_service_that_cannot_score_what_is_made_before_anything_is(
    train_small: TrainSmall, ray_session: None, tmp_path: Path
) -> None:
    service = FaultyServer()
    service.says(media=["video"])
    with serving(service) as url, pytest.raises(ConfigError, match=r"rewards\.0: remote scores videos"):
        train_small("there", *DISAGGREGATED, f"rewards=[{{type: remote, url: '{url}'}}]")
    assert service.requests == []
    assert not (tmp_path / "there").exists()
