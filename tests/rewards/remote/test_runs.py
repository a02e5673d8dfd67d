"""Runs whose rewards come from a service: the numbers of a run in process, or an end in time with the right exit code."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from digenrl.cli.main import main
from digenrl.config.loader import load_recipe
from digenrl.errors import RewardUnavailable
from digenrl.metrics.log import read_metrics
from digenrl.runtime.train import train
from tests.rewards.services import ROOT, FaultyServer, Reply, free_port, reset, scores, serving, slow, status, value

QUICKSTART = ROOT / "recipes" / "quickstart.yaml"
SMALL = (
    "cluster.placement=inline",
    "rollout.prompts_per_step=4",
    "rollout.num_generations=4",
    "rollout.num_inference_steps=4",
    "rollout.forward_batch_size=4",
    "algorithm.sde_window_size=2",
    "algorithm.sde_window_range=[0, 3]",
    "schedule.groups_per_micro_batch=1",
    "train.steps=3",
    "train.deterministic=true",
    "eval=null",
    "log.tensorboard=false",
    "log.sample_freq=0",
)


def remote(url: str, **settings: float) -> str:
    given = {"timeout_s": 2, "deadline_s": 30, "start_timeout_s": 20, "samples_per_request": 2} | settings
    return "rewards=[{type: remote, url: '" + url + "', " + ", ".join(f"{k}: {v}" for k, v in given.items()) + "}]"


def run(output: Path, rewards: str, *more: str) -> dict[str, Any]:
    return train(load_recipe(QUICKSTART, [*SMALL, rewards, f"run.output_dir={output}", *more]))


@pytest.fixture(scope="module")
def in_process(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run(tmp_path_factory.mktemp("runs") / "here", "rewards=[{type: jpeg}]")["digests"]


def test_faults_that_pass_give_the_weights_of_a_run_in_process(tmp_path: Path, in_process: Any) -> None:
    faults = [
        status(500),
        None,
        reset,
        status(429, Retry_After="0"),
        scores(lambda a: a[:-1]),
        None,
        scores(lambda a: [*a, a[0]]),
    ]
    faults += [None, value("high"), None, slow(2.5), None, status(503), lambda server, right: Reply(right.body[:-3])]
    server = FaultyServer(faults)
    with serving(server) as url:
        assert run(tmp_path / "there", remote(url, max_inflight=1, timeout_s=2))["digests"] == in_process
    assert len(server.requests) >= 3 * 8 + sum(fault is not None for fault in faults)


def test_a_service_that_is_many_times_slower_changes_nothing(tmp_path: Path, in_process: Any) -> None:
    server = FaultyServer(then=slow(0.1))  # scoring two pictures takes it some milliseconds
    with serving(server) as url:
        assert run(tmp_path / "there", remote(url, timeout_s=20))["digests"] == in_process
    assert len(server.requests) == 3 * 8


def test_a_service_that_is_restarted_in_mid_run_changes_nothing(tmp_path: Path, in_process: Any) -> None:
    server, port = FaultyServer(), free_port()
    stack = ExitStack()
    url = stack.enter_context(serving(server, port))

    def restart() -> None:
        while len(server.requests) < 9:
            time.sleep(0.01)
        server.down = True
        stack.close()
        time.sleep(0.7)
        server.down = False
        stack.enter_context(serving(server, port))

    thread = threading.Thread(target=restart, daemon=True)
    thread.start()
    with stack:
        assert run(tmp_path / "there", remote(url, timeout_s=2))["digests"] == in_process
        assert not thread.is_alive(), "it was restarted while the run went on"


def test_a_sample_that_the_service_cannot_score_is_invalid_and_counted(tmp_path: Path) -> None:
    with serving(FaultyServer([value(None)])) as url:
        run(tmp_path / "there", remote(url), "train.steps=1")
    row = read_metrics(tmp_path / "there" / "metrics.jsonl")[0]
    assert row["invalid_samples"] == row["invalid_samples/remote"] == 1
    assert row["retries/remote"] == 0
    assert row["timing_s/reward/remote"] > 0
    assert row["reward_mean"] < 0


def test_a_service_that_stays_away_in_mid_run_stops_it_in_time(tmp_path: Path) -> None:
    with serving(FaultyServer([None] * 9, then=status(500))) as url:
        began = time.monotonic()
        with pytest.raises(RewardUnavailable, match="HTTP 500"):
            run(tmp_path / "there", remote(url, deadline_s=0.5))
        assert time.monotonic() - began < 20
    assert [row["step"] for row in read_metrics(tmp_path / "there" / "metrics.jsonl")] == [0]


def exit_code(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    monkeypatch.setattr(sys, "argv", ["digenrl", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    return caught.value.code


def test_the_exit_code_says_whether_the_service_was_never_there_or_went_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("train", str(QUICKSTART), *SMALL, f"run.output_dir={tmp_path / 'run'}")
    assert exit_code(monkeypatch, *arguments, remote(f"http://127.0.0.1:{free_port()}", start_timeout_s=0.5)) == 2
    assert "reward-serve" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    with serving(FaultyServer([None] * 9, then=reset)) as url:
        assert exit_code(monkeypatch, *arguments, remote(url, deadline_s=0.5)) == 4
    assert "never scored as 0" in capsys.readouterr().err
