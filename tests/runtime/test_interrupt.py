"""Signals stop a run between commands, drop what takes too long, and never strike where weights change."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from digenrl.runtime.interrupt import Interrupt, StopRequested


def test_a_signal_stops_the_run_at_the_next_check_with_the_shell_s_exit_code() -> None:
    with Interrupt() as interrupt:
        interrupt.check()
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(StopRequested) as caught:
            interrupt.check()
    assert caught.value.exit_code == 143


def test_ctrl_c_is_130() -> None:
    with Interrupt() as interrupt:
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(StopRequested) as caught:
            interrupt.check()
    assert caught.value.exit_code == 130


def test_a_command_that_takes_too_long_is_dropped() -> None:
    began = time.monotonic()
    with Interrupt(grace_s=0.2), pytest.raises(StopRequested):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)
    assert time.monotonic() - began < 5


def test_what_must_not_be_dropped_is_finished_first() -> None:
    done = False
    with Interrupt(grace_s=0.1) as interrupt, pytest.raises(StopRequested):
        os.kill(os.getpid(), signal.SIGTERM)
        with interrupt.critical():
            time.sleep(0.5)
            done = True
        time.sleep(30)
    assert done


def test_no_except_exception_of_a_reward_swallows_it() -> None:
    with Interrupt() as interrupt:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(StopRequested):
            try:
                interrupt.check()
            except Exception:
                pytest.fail("it is no Exception")


def test_the_handlers_from_before_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGALRM)
    with Interrupt():
        assert signal.getsignal(signal.SIGTERM) != before[0]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGALRM)) == before


def test_a_second_signal_ends_the_process_at_once() -> None:
    code = (
        "import os, signal, time\n"
        "from digenrl.runtime.interrupt import Interrupt\n"
        "with Interrupt() as interrupt, interrupt.critical():\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    time.sleep(60)\n"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], timeout=50, check=False)
    assert done.returncode == 143
    assert time.monotonic() - began < 20


def test_a_reward_that_swallows_everything_cannot_keep_the_process_alive() -> None:
    code = (
        "import os, signal, time\n"
        "from digenrl.runtime.interrupt import Interrupt\n"
        "with Interrupt(grace_s=0.1, hard_limit_s=1.0) as interrupt:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    while True:\n"
        "        try:\n"
        "            time.sleep(60)\n"
        "        except:\n"
        "            pass\n"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], timeout=50, check=False)
    assert done.returncode == 143
    assert time.monotonic() - began < 20


def test_a_call_that_does_not_return_to_python_cannot_either() -> None:
    code = (
        "import hashlib, os, signal, threading\n"
        "from digenrl.runtime.interrupt import Interrupt\n"
        "threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()\n"
        "with Interrupt(grace_s=0.1, hard_limit_s=1.0):\n"
        "    hashlib.pbkdf2_hmac('sha256', b'', b'', 1_000_000_000)\n"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], timeout=50, check=False)
    assert done.returncode == 143
    assert time.monotonic() - began < 20
