"""``digenrl reward-serve geneval``, asked over real HTTP."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from digenrl.config.loader import load_reward
from digenrl.rewards.compose import WeightedRewards
from tests.rewards.services import pictures, reward_serve
from tests.rewards.tiny_networks import make_clip, make_detector


@pytest.mark.slow
def test_a_service_gives_the_very_scores_of_the_checker_in_process(tmp_path: Path) -> None:
    make_clip(tmp_path / "clip")
    make_detector(tmp_path / "detector", "mask2former")
    settings = [f"detector_path={tmp_path / 'detector'}", f"clip_path={tmp_path / 'clip'}", "device=cpu", "self_test=false"]
    settings += ["threshold=0", "counting_threshold=0", "read=soft"]
    include = [{"class": "person", "count": 2}, {"class": "tv remote", "count": 1, "position": ["left of", 0]}]
    metadata = {"tag": "position", "include": include, "exclude": [{"class": "stop sign", "count": 1}]}
    samples = [replace(sample, metadata=metadata) for sample in pictures(4, size=40)]
    here = WeightedRewards.from_recipe([load_reward("geneval", settings)]).score(samples)
    with reward_serve("geneval", *settings, "--port", "0") as (url, _):
        there = WeightedRewards.from_recipe([load_reward("remote", [f"url={url}"])]).score(samples)
    assert there.totals.tolist() == here.totals.tolist()
    assert 0 < here.totals.max() < 1
