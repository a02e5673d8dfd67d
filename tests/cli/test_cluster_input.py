"""What no cluster can run is refused before any worker works: exit code 2, what, why and fix, and no run folder."""

from __future__ import annotations

import os

os.environ["RAY_AUTH_MODE"] = "token"
os.environ.setdefault("RAY_AUTH_TOKEN", "0123456789abcdef" * 4)

import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from digenrl.cli.main import main

QUICKSTART = str(Path(__file__).parents[2] / "recipes" / "quickstart.yaml")
POOLS, IN_TURN, ALONE = (f"cluster.placement={placement}" for placement in ("disaggregated", "colocated", "inline"))
Refused = Callable[..., str]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Refused:
    """Call a verb with the quickstart and some changes, in this process; what it refuses them with."""

    def call(verb: str, *arguments: str) -> str:
        folder = tmp_path / "run"
        monkeypatch.setattr(sys, "argv", ["digenrl", verb, QUICKSTART, f"run.output_dir={folder}", *arguments])
        monkeypatch.setattr(sys, "excepthook", sys.excepthook)
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main()
        error = capsys.readouterr().err
        assert caught.value.code == 2, error
        assert not folder.exists()
        assert error.startswith("error: ") and "\n  fix: " in error and "Traceback" not in error
        return error

    return call


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ([POOLS, "cluster.generators=[]"], "cluster.generators cannot be []: at least 1 is needed"),
        ([POOLS, "cluster.generators.0.replicas=0"], "cluster.generators.0.replicas cannot be 0"),
        ([POOLS, "cluster.generators.0.ranks=0"], "cluster.generators.0.ranks cannot be 0"),
        ([POOLS, "cluster.trainer.ranks=0"], "cluster.trainer.ranks cannot be 0"),
        ([POOLS, "cluster.generators.0.resources.gpus=-1"], "cluster.generators.0.resources.gpus cannot be -1"),
        ([POOLS, "cluster.generators.0.resources.custom={h100: 0}"], "cluster.generators.0.resources.custom.h100 cannot be 0"),
        (
            [IN_TURN, "schedule.tag=bts_plus"],
            "schedule.tag: bts_plus needs cluster.placement: disaggregated, and it is colocated",
        ),
        ([ALONE, "schedule.tag=greedy"], "schedule.tag: greedy needs cluster.placement: disaggregated, and it is inline"),
        (
            [IN_TURN, "schedule.max_stale_fraction=0.5"],
            "schedule.max_stale_fraction (0.5) needs cluster.placement: disaggregated",
        ),
    ],
)
def test_a_recipe_that_no_cluster_can_run_is_refused_by_check_and_by_train_alike(
    refused: Refused, changes: list[str], what: str
) -> None:
    told = refused("check", *changes)
    assert told.startswith(f"error: {what}") and "\n  why: " in told
    assert told.count("cannot be") <= 1, "a mistake is named once"
    assert refused("train", *changes) == told


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ([IN_TURN, "run.device=cuda:0"], "run.device: cuda:0 names one GPU"),
        ([POOLS, "--address", "somewhere"], "--address 'somewhere' is not HOST:PORT"),
        ([POOLS, "--address", "ray://127.0.0.1:10001"], "--address 'ray://127.0.0.1:10001' is not HOST:PORT"),
        ([ALONE, "--address", "127.0.0.1:6379"], "--address is for a cluster, and cluster.placement is inline"),
    ],
)
def test_what_train_alone_cannot_do_is_refused_before_a_cluster_is_looked_for(
    refused: Refused, changes: list[str], what: str
) -> None:
    assert refused("train", *changes).startswith(f"error: {what}")


def test_an_address_where_nobody_listens_is_refused(refused: Refused) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    told = refused("train", POOLS, "--address", f"127.0.0.1:{port}")
    assert f"--address 127.0.0.1:{port}: cannot be reached" in told and "`ray start --head`" in told


@pytest.fixture
def web_server() -> Iterator[int]:
    """The port of something that is no Ray: it answers whatever it is asked as a web server would."""

    def serve(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(100)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(30)
        thread = threading.Thread(target=serve, args=(server,))
        thread.start()
        yield server.getsockname()[1]
        thread.join()


def test_an_address_at_which_another_program_answers_is_refused_at_once(refused: Refused, web_server: int) -> None:
    told = refused("train", POOLS, "--address", f"127.0.0.1:{web_server}")
    assert f"--address 127.0.0.1:{web_server}: what listens there is not Ray's GCS" in told and "6379" in told


def test_an_address_at_which_nobody_answers_is_refused_in_time(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    from digenrl.runtime.ray import session

    monkeypatch.setattr(session, "_REACH_TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert "is not Ray's GCS" in refused("train", POOLS, "--address", f"127.0.0.1:{silent.getsockname()[1]}")


def test_more_ranks_than_the_cluster_has_are_refused_with_a_share_that_would_fit(refused: Refused) -> None:
    large = ("cluster.generators.0.resources.cpus=1000", "cluster.trainer.resources.cpus=1000", "run.device=cpu")
    told = refused("train", POOLS, "cluster.generators.0.replicas=3", *large)
    assert "no room for 4 workers" in told and "Needed: 4000 CPU (" in told and "\n  why: " in told
    found = re.search(r"cluster.generators.0.resources.cpus=(\S+) cluster.trainer.resources.cpus=([\d.]*\d)", told)
    assert found is not None and found[1] == found[2]
    assert 4 * float(found[1]) <= len(os.sched_getaffinity(0))


def test_a_reward_that_a_worker_cannot_import_is_refused_with_the_worker_s_name(
    refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """
import sys

from pydantic import BaseModel

if "default_worker" in sys.argv[0]:
    raise ModuleNotFoundError("No module named 'a_library_of_the_driver_s_node'")


class Reward:
    class Settings(BaseModel):
        pass

    def __init__(self, settings):
        pass

    def score(self, samples):
        return {sample.id: 0.5 for sample in samples}
"""
    (tmp_path / "reward_of_one_node.py").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "reward_of_one_node", raising=False)
    shared = ("cluster.generators.0.resources.cpus=0.25", "cluster.trainer.resources.cpus=0.25", "run.device=cpu")
    told = refused("train", POOLS, *shared, "rewards=[{type: 'reward_of_one_node:Reward'}]")
    # Every process reads the recipe, and any of them may be the first to say so.
    assert "(loading): rewards.0.type" in told and told.partition(" (loading)")[0] in {"error: generator-0", "error: trainer"}
    assert "No module named 'a_library_of_the_driver_s_node'" in told and "on a cluster, on every node" in told
