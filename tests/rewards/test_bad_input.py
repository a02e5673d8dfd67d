"""Rewards that a recipe gets wrong: one message with what, why and how to mend it, exit code 2, and no run folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from digenrl.cli.main import main
from tests.rewards.judge import Judge
from tests.rewards.services import ROOT, FaultyServer, Reply, serving

QUICKSTART = ROOT / "recipes" / "quickstart.yaml"
OWN = '''
from pydantic import BaseModel


class Motion:
    media = ("video",)

    class Settings(BaseModel):
        """None."""

    def __init__(self, settings):
        raise AssertionError("it is refused before it is made")


class Portrait(Motion):
    media = ("image",)

    class Settings(BaseModel):
        """It can judge one size alone."""

        height: int = 64

        @property
        def sample_size(self):
            return (self.height, 32)
'''
SMALL = ("cluster.placement=inline", "train.steps=1", "log.tensorboard=false", "log.sample_freq=0")
CASES = {
    "an unknown reward": ("{type: jepg}", "rewards.0.type", "Built in are", "Did you mean 'jpeg'?"),
    "weights that are not there": (
        "{type: pickscore, path: nobody/no-such-model, tokenizer_path: null}",
        "'nobody/no-such-model' (tokenizer",
        "It needs config.json",
        "hf download nobody/no-such-model --local-dir FOLDER",
    ),
    "a folder without weights": ("{type: clip_score, path: empty}", "The CLIP model 'empty'", "model.safetensors", "path=FOLDER"),
    "a template without its placeholder": (
        "{type: vlm_judge, url: 'http://127.0.0.1:9/v1', model: m, template: Is it good}",
        "template does not contain {prompt}",
        "checked before anything starts",
        "Put it in",
    ),
    "a reward of videos on images": (
        "{type: 'own_rewards:Motion'}",
        "rewards.0: own_rewards:Motion scores videos, and rollout.num_frames is 1",
        "",
        "use a reward that scores images",
    ),
    "weights that sum to 0": (
        "{type: jpeg}, {type: brightness, weight: -1}",
        "weights in rewards (1, -1) sum to 0",
        "worth nothing",
        "Let the weights sum to something else",
    ),
    "weights that sum to 0 but for rounding": (
        "{type: jpeg, weight: 0.1}, {type: brightness, weight: 0.2}, {type: sharpness, weight: -0.3}",
        "weights in rewards (0.1, 0.2, -0.3) sum to 0",
        "worth nothing",
        "Let the weights sum to something else",
    ),
    "a name that another reward's part has": (
        "{type: jpeg}, {type: jpeg, name: jpeg/kilobytes}",
        "rewards.1.name",
        "",
        "",
    ),
    "samples of another size": (
        "{type: 'own_rewards:Portrait', height: 48}",
        "scores pictures of 48 x 32 pixels, and rollout.height x rollout.width is 32 x 32",
        "this size alone",
        "rollout.height=48",
    ),
    "a network that is not there to be offloaded": ("{type: jpeg, offload: true}", "nothing to offload", "no network", "=false"),
}


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_rewards.py").write_text(OWN)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_rewards", raising=False)
    return tmp_path


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verb: str, rewards: str) -> str:
    """What a command says of a recipe with these rewards, which it has to refuse."""
    monkeypatch.setattr(sys, "argv", ["digenrl", verb, str(QUICKSTART), *SMALL, f"rewards=[{rewards}]"])
    with pytest.raises(SystemExit) as caught:
        main()
    said = capsys.readouterr()
    assert caught.value.code == 2, said
    assert "Traceback" not in said.err
    assert not Path("runs").exists()
    return said.err


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused_with_what_why_and_fix_before_anything_runs(
    case: str, workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rewards, what, why, fix = CASES[case]
    said = refused(monkeypatch, capsys, "train", rewards)
    before, _, after = said.partition("  fix: ")
    assert what in before
    assert why in before
    assert fix in (after or said) or fix in before  # a recipe's own mistakes are mended in the sentence that names them


@pytest.mark.parametrize(
    "case",
    [
        "an unknown reward",
        "a template without its placeholder",
        "a reward of videos on images",
        "weights that sum to 0",
        "samples of another size",
    ],
)
def test_check_refuses_what_needs_no_weights_in_the_same_words(
    case: str, workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rewards, what, _, _ = CASES[case]
    assert what in refused(monkeypatch, capsys, "check", rewards)


PAGE = Reply(b"<!doctype html><html>welcome</html>", headers={"Content-Type": "text/html"})


@pytest.mark.parametrize("kind", ["remote", "vlm_judge"])
def test_an_endpoint_that_answers_web_pages_is_refused_before_anything_runs(
    kind: str, workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server: Any = FaultyServer() if kind == "remote" else Judge()
    server.health = PAGE
    with serving(server) as url:
        said = refused(
            monkeypatch, capsys, "train", f"{{type: {kind}, url: '{url}', {'model: m' if kind == 'vlm_judge' else ''}}}"
        )
    assert "a web page (HTML) instead of JSON" in said
    assert "before anything is generated" in said
    assert "url" in said.partition("fix: ")[2]


def test_a_service_of_videos_is_refused_for_images_by_check_and_by_train(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = FaultyServer()
    server.says(media=["video"])
    with serving(server) as url:
        for verb in ("check", "train"):
            said = refused(monkeypatch, capsys, verb, f"{{type: remote, url: '{url}'}}")
            assert "rewards.0: remote scores videos, and rollout.num_frames is 1" in said
    assert server.requests == []
