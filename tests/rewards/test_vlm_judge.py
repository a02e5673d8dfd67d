"""A judge behind a real HTTP server that speaks the protocol of chat completions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from digenrl.config.loader import load_reward
from digenrl.config.settings.vlm_judge import VlmJudgeSettings
from digenrl.errors import ConfigError, RewardUnavailable
from digenrl.rewards.answers import read_score
from digenrl.rewards.compose import WeightedRewards
from digenrl.rewards.vlm_judge import VlmJudgeReward
from tests.rewards.judge import Judge
from tests.rewards.services import Reply, pictures, serving

SAMPLES = pictures(6)
TEMPLATE = 'How good is "{prompt}"? Like {"score": 1}.'


def judge(url: str, **settings: Any) -> VlmJudgeReward:
    given = {"url": f"{url}/v1", "model": "tiny-vl", "timeout_s": 10, "deadline_s": 20, "start_timeout_s": 20} | settings
    return VlmJudgeReward(VlmJudgeSettings(**given))


def test_every_sample_gets_the_number_that_the_judge_gives_it() -> None:
    stub = Judge()
    with serving(stub) as url:
        scored = judge(url, template=TEMPLATE, system="Be fair.", max_inflight=3).score(SAMPLES)
    assert {i: s.value for i, s in scored.items()} == {s.id: float(np.mean(s.image)) / 255 for s in SAMPLES}
    assert stub.path == "/v1/chat/completions"
    asked = [request["messages"][1]["content"][-1]["text"] for request in stub.requests]
    assert sorted(asked) == sorted(f'How good is "{s.prompt}"? Like {{"score": 1}}.' for s in SAMPLES)
    assert stub.requests[0]["messages"][0] == {"role": "system", "content": "Be fair."}
    assert stub.requests[0]["temperature"] == 0


def test_of_a_video_the_asked_number_of_frames_is_shown_in_order() -> None:
    frames = np.stack([np.full((4, 4, 3), 10 * number, dtype=np.uint8) for number in range(9)])
    video = replace(SAMPLES[0], image=frames, fps=8.0)
    for count, shown in ((1, [40]), (2, [0, 80]), (3, [0, 40, 80]), (50, [10 * n for n in range(9)])):
        stub = Judge()
        with serving(stub) as url:
            judge(url, num_frames=count).score([video])
        assert [int(picture[0, 0, 0]) for picture in stub.seen[0]] == shown


def test_the_key_comes_from_the_environment_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "sk-secret")
    stub = Judge()
    with serving(stub) as url:
        judge(url, api_key_env="MY_KEY").score(SAMPLES[:1])
        assert stub.headers["Authorization"] == "Bearer sk-secret"
        monkeypatch.delenv("MY_KEY")
        with pytest.raises(ConfigError, match="MY_KEY holds no key"):
            judge(url, api_key_env="MY_KEY")
        judge(url).score(SAMPLES[:1])
        assert "Authorization" not in stub.headers


@pytest.mark.parametrize(
    ("settings", "answer", "score"),
    [
        ({}, '{"score": 7}', 7),
        ({}, ' {"why": "good", "score": 7.5} \n', 7.5),
        ({}, '```json\n{"score": 3}\n```', 3),
        ({}, '{"score": "7"}', None),
        ({}, '{"score": true}', None),
        ({}, '{"score": NaN}', None),
        ({}, '{"score": 11}', None),
        ({}, '{"score": -0.1}', None),
        ({}, '{"value": 7}', None),
        ({}, 'The score is {"score": 7}', None),
        ({}, '{"score": 9, "score": 1}', None),
        ({}, '{"why": {"score": 9, "score": 1}, "score": 2}', None),
        ({}, "7", None),
        ({}, "", None),
        ({}, "[" * 50_000, None),
        ({"score_key": "value"}, '{"value": 7}', 7),
        ({"score_regex": r"Score: (-?[\d.]+)"}, "I like it. Score: 8.5", 8.5),
        ({"score_regex": r"Score: (-?[\d.]+)"}, "Score: 8 or Score: 9", None),
        ({"score_regex": r"Score: (-?[\d.]+)"}, "Score: 1.2.3", None),
        ({"score_regex": r"Score: (-?[\d.]+)"}, "8", None),
        ({"score_regex": r"(\w+)$", "maximum": 5}, "infinity", None),
        ({"score_regex": r"Score: (\S+)"}, "Score: 1_0", None),
        ({"score_regex": r"Score: (\S+)"}, "Score: nan", None),
    ],
)
def test_a_score_is_read_strictly_or_not_at_all(settings: dict[str, Any], answer: str, score: float | None) -> None:
    read = read_score(answer, VlmJudgeSettings(url="http://x", model="m", **settings))
    assert np.isnan(read) if score is None else read == score


def test_an_answer_without_a_score_makes_its_sample_invalid_and_is_counted() -> None:
    with serving(Judge(["I cannot judge this."])) as url:
        scored = list(judge(url, max_inflight=1).score(SAMPLES).values())
    assert [np.isnan(s.value) for s in scored] == [True] + [False] * 5
    assert [s.parts["unreadable"] for s in scored] == [1.0] + [0.0] * 5


PAGE = Reply(b"<html>welcome</html>", headers={"Content-Type": "text/html"})


def test_an_endpoint_that_answers_web_pages_is_refused_at_the_start() -> None:
    stub = Judge()
    stub.health = PAGE
    with serving(stub) as url, pytest.raises(ConfigError, match="a web page") as caught:
        judge(url)
    assert "/v1" in caught.value.fix


def test_an_endpoint_without_the_model_is_refused_and_its_models_are_named() -> None:
    with serving(Judge()) as url, pytest.raises(ConfigError, match="no model 'big-vl'") as caught:
        judge(url, model="big-vl")
    assert "tiny-vl" in caught.value.why


@pytest.mark.parametrize(
    "bad",
    [
        PAGE,
        Reply(b'{"choices": []}'),
        Reply(b'{"choices": [{"message": {"content": 7}}]}'),
        Reply(b"{}", status=500),
        Reply(b"{}", status=400),
    ],
)
def test_an_endpoint_that_fails_stops_the_run_and_is_never_a_score(bad: Reply) -> None:
    stub = Judge()
    stub.always = bad
    with serving(stub) as url, pytest.raises(RewardUnavailable, match="vlm_judge"):
        judge(url, deadline_s=1).score(SAMPLES)


@pytest.mark.parametrize(
    ("change", "detail"),
    [
        ("template=How good is it?", "does not contain {prompt}"),
        ("score_regex='Score: .*'", "has 0 groups"),
        ("score_regex='(('", "not a regular expression"),
        ("minimum=10", "not below maximum"),
        ("{score_key: a, score_regex: '(b)'}", "Leave one of them out"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_the_recipe(change: str, detail: str) -> None:
    changes = ["score_key=a", "score_regex='(b)'"] if change.startswith("{") else [change]
    with pytest.raises(ConfigError) as caught:
        load_reward("vlm_judge", ["url=http://127.0.0.1:1/v1", "model=m", *changes])
    assert detail in str(caught.value)


def test_a_judge_is_tried_at_the_start_and_refused_if_it_cannot_tell_a_circle_from_noise() -> None:
    spec = ["model=tiny-vl", "maximum=1"]
    stub = Judge()
    with serving(stub) as url:
        WeightedRewards.from_recipe([load_reward("vlm_judge", [*spec, f"url={url}/v1"])])
    asked = [request["messages"][-1]["content"][-1]["text"] for request in stub.requests]
    assert ["a red circle on a white background" in text for text in asked] == [True, True]
    for answers in (['{"score": 0.5}'] * 2, ['{"score": 0.9}', "It is nice."]):
        with serving(Judge(answers)) as url, pytest.raises(ConfigError, match="'vlm_judge' fails its self-test"):
            WeightedRewards.from_recipe([load_reward("vlm_judge", [*spec, f"url={url}/v1", "max_inflight=1"])])
    with serving(Judge(['{"score": 0.5}'] * 2)) as url:
        WeightedRewards.from_recipe([load_reward("vlm_judge", [*spec, f"url={url}/v1", "self_test=false"])])
