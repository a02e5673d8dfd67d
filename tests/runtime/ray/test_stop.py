"""A run on a private cluster that is stopped, or whose driver or trainer dies: it ends in time, leaves nothing, and goes on."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from digenrl.runtime.train import train
from digenrl.training.checkpoint import load_newest
from digenrl.training.digest import digests
from tests.runtime.ray.conftest import small_recipe
from tests.runtime.ray.drivers import Driver, arguments, steps_done, summary, workers

pytestmark = pytest.mark.timeout(1200)

STEPS = 40
# Learning rates that do not depend on the number of steps: a prefix of the run is a run.
RUN = ("train.lr_schedule=constant", "train.save_freq=4", f"train.steps={STEPS}")
TO_STOP_S, LEFT_S, LEFT_BY_A_KILL_S = 30.0, 5.0, 10.0
"""How long a run may take to end once it is asked to, and how long anything of it may be left afterwards."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> object:
    """Digests of the same run in one process."""
    return train(small_recipe(tmp_path_factory.mktemp("undisturbed") / "run", *RUN))["digests"]


def goes_on_to(run: Path, log: Path) -> object:
    """Go on with a run to its end, in a process of its own, and return its digests."""
    with Driver(log, *arguments(run, *RUN)) as driver:
        driver.wait_for_end(300)
        assert driver.exit_code == 0, driver.stderr
        driver.remains.wait_until_gone(LEFT_S)
    return summary(run)["digests"]


def generation_begins(run: Path) -> Callable[[], bool]:
    """A function that says whether, since it was made, the newest command of the run was to generate something."""
    trace = max(run.glob("trace*.jsonl"), key=lambda path: path.stat().st_mtime_ns)
    size = trace.stat().st_size

    def begins() -> bool:
        lines = trace.read_text(encoding="utf-8")[size:].splitlines()
        return bool(lines) and '"Generate"' in lines[-1].partition('"commands"')[2]

    return begins


def test_a_stopped_run_has_saved_what_an_undisturbed_one_has_and_leaves_nothing(tmp_path: Path) -> None:
    seed = int(time.time())
    run = tmp_path / "run"
    with Driver(tmp_path / "log", *arguments(run, *RUN)) as driver:
        driver.wait_until(lambda: steps_done(run) > 0)
        time.sleep(random.Random(seed).uniform(0.0, 1.5))
        driver.signal(signal.SIGTERM)
        took_s = driver.wait_for_end(TO_STOP_S)
        assert driver.exit_code == 143, driver.stderr
        left_s = driver.remains.wait_until_gone(LEFT_S)
    saved, _ = load_newest(run / "checkpoints")
    print(f"seed {seed}: at version {saved.policy_version}, ended within {took_s:.1f} s, nothing left {left_s:.1f} s later")
    calm = train(small_recipe(tmp_path / "calm", *RUN, f"train.steps={saved.policy_version}"))
    assert digests(saved.weights) == calm["digests"]


@pytest.mark.slow
def test_a_run_that_is_stopped_ten_times_leaves_nothing_and_ends_as_an_undisturbed_one(
    tmp_path: Path, undisturbed: object
) -> None:
    seed, run = int(time.time()), tmp_path / "run"
    draw = random.Random(seed)
    print(f"seed {seed}")

    def starting(driver: Driver) -> None:
        time.sleep(draw.uniform(0.5, 14.0))

    def running(driver: Driver) -> None:
        driver.wait_for("training ")
        time.sleep(draw.uniform(0.0, 2.0))

    def generating(driver: Driver) -> None:
        driver.wait_for("training ")
        driver.wait_until(generation_begins(run))

    def ending(driver: Driver) -> None:
        driver.wait_until(lambda: steps_done(run) == STEPS)
        time.sleep(draw.uniform(0.0, 0.3))

    points = [starting, starting, starting, running, generating, running, generating, running, generating]
    for number, point in enumerate([*points, ending]):
        with Driver(tmp_path / f"log-{number}", *arguments(run, *RUN)) as driver:
            point(driver)
            after_s = time.monotonic() - driver.began
            driver.signal(signal.SIGTERM)
            took_s = driver.wait_for_end(TO_STOP_S)
            # A run that has done all that it was to do ends as such, whatever it is asked then.
            finished = point is ending and driver.exit_code == 0 and summary(run)["digests"] == undisturbed
            assert driver.exit_code == 143 or finished, f"{point.__name__}: {driver.exit_code}\n{driver.stderr}"
            left_s = driver.remains.wait_until_gone(LEFT_S)
            print(
                f"{point.__name__} after {after_s:.1f} s, {steps_done(run)} steps: {driver.exit_code} within {took_s:.1f} s, "
                f"nothing left {left_s:.1f} s later"
            )
    assert goes_on_to(run, tmp_path / "log-last") == undisturbed


@pytest.mark.slow
def test_a_driver_that_is_killed_leaves_no_orphan_and_its_run_goes_on(tmp_path: Path, undisturbed: object) -> None:
    seed, run = int(time.time()), tmp_path / "run"
    draw = random.Random(seed)
    print(f"seed {seed}")
    for number, loaded in enumerate((False, False, True)):
        with Driver(tmp_path / f"log-{number}", *arguments(run, *RUN)) as driver:
            if loaded:
                driver.wait_until(lambda: steps_done(run) >= 5)
            time.sleep(draw.uniform(0.0, 2.0) if loaded else draw.uniform(2.0, 14.0))
            after_s = time.monotonic() - driver.began
            driver.signal(signal.SIGKILL)
            driver.wait_for_end(5)
            left_s = driver.remains.wait_until_gone(LEFT_BY_A_KILL_S)
            print(f"killed after {after_s:.1f} s, {steps_done(run)} steps: nothing left {left_s:.1f} s later")
    assert goes_on_to(run, tmp_path / "log-last") == undisturbed


@pytest.mark.slow
def test_a_run_whose_trainer_is_killed_names_it_leaves_nothing_and_goes_on(tmp_path: Path, undisturbed: object) -> None:
    seed, run = int(time.time()), tmp_path / "run"
    with Driver(tmp_path / "log", *arguments(run, *RUN)) as driver:
        driver.wait_until(lambda: steps_done(run) >= 5)
        time.sleep(random.Random(seed).uniform(0.0, 1.5))
        driver.remains.look()
        os.kill(workers(run)["trainer"], signal.SIGKILL)
        took_s = driver.wait_for_end(TO_STOP_S)
        left_s = driver.remains.wait_until_gone(LEFT_S)
        print(f"seed {seed}: ended within {took_s:.1f} s, nothing left {left_s:.1f} s later")
        assert driver.exit_code == 3, driver.stderr
        assert "the trainer was lost: trainer: its process ended" in driver.stderr
        assert "Traceback" not in driver.stderr
    assert goes_on_to(run, tmp_path / "log-last") == undisturbed
