"""The connection to Ray: a private cluster on this machine, one that is there already, or the one this process has.

Invariants of the private one: token authentication is on, the dashboard is off, its node has a loopback address; when the
session is closed, no process of it is left, and neither is its folder. (Ray's own control ports listen on all interfaces; they
refuse whoever does not know the token, which never leaves this process and its children: environment.prepare comes first.)
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
import ray

from digenrl.errors import ConfigError
from digenrl.runtime.interrupt import StopRequested
from digenrl.runtime.ray.reaper import Reaper

_REACH_TIMEOUT_S = 5.0
_SETTINGS_FRAME, _FRAME_HEADER_BYTES = 4, 9
_HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, _SETTINGS_FRAME, 0, 0, 0, 0, 0])
"""What a client begins with (RFC 9113, section 3.4): a fixed text, and settings of which there are none."""


def loopback() -> str:
    """A loopback address that Ray takes as it stands: it replaces 127.0.0.1 by the machine's outward address."""
    return "127.0.0.2" if sys.platform == "linux" else "127.0.0.1"


class RaySession:
    """Connected while the context is open. A connection that the process has already is used, and left as it is."""

    def __init__(self, address: str | None) -> None:
        self._address = address
        self._borrowed = False
        self._stack = ExitStack()
        self._reaper: Reaper | None = None
        """Of a private cluster."""
        self._strangers: list[psutil.Process] = []
        """Children that this process had before the cluster."""

    def __enter__(self) -> Self:
        """Start or connect. Raises ConfigError when the address cannot be reached."""
        self._borrowed = ray.is_initialized()
        if self._borrowed:
            return self
        kept = signal.getsignal(signal.SIGTERM)
        try:
            self._start() if self._address is None else self._connect(self._address)
        except (SystemExit, StopRequested) as stop:
            # A signal; ray.init has a handler of its own for SIGTERM. Broken off, Ray would crash at its shutdown, so nothing is
            # shut down here: nothing of the run is written yet, and the reaper ends what there is of the cluster.
            os._exit(stop.exit_code if isinstance(stop, StopRequested) else 128 + signal.SIGTERM)
        except BaseException:
            self._stop()
            raise
        finally:
            if kept is not None:
                signal.signal(signal.SIGTERM, kept)  # ray.init puts one of its own in its place
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._stop()

    def _start(self) -> None:
        # Sockets lie in it, whose paths may not be longer than about a hundred characters.
        folder = Path(tempfile.mkdtemp(prefix="digenrl-", dir="/tmp" if os.path.isdir("/tmp") else None))
        self._reaper = self._stack.enter_context(Reaper(folder))
        self._strangers = _children()
        ray.init(
            address="local",
            num_cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
            _node_ip_address=loopback(),
            _temp_dir=str(folder),
            # What Ray's dashboard shows of every task, which its server would keep: 80 KiB a step.
            _system_config={"task_events_report_interval_ms": 0},
        )
        self.watch_processes()

    def _connect(self, address: str) -> None:
        if address != "auto":
            _check_reachable(address)
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
        except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
            raise ConfigError(
                f"--address {address}: no Ray cluster answers there: {next(iter(str(error).splitlines()), '')}",
                why="A run needs a cluster that was started with `ray start`, of the same Ray and Python version.",
                fix="Start one, set RAY_AUTH_MODE and RAY_AUTH_TOKEN as its nodes have them, or leave --address out to use this "
                "machine alone.",
            ) from error

    def watch_processes(self) -> None:
        """Tell the reaper who there is now; to be called again when workers were started."""
        if self._reaper is not None:
            ours = [process for process in _children() if process not in self._strangers]
            self._reaper.watch(each for process in ours for each in (process, *process.children(recursive=True)))

    def _stop(self) -> None:
        if not self._borrowed:
            self.watch_processes()  # of a start that failed, Ray itself does not know them all
            try:
                ray.shutdown()
            finally:
                self._stack.close()


def _check_reachable(address: str) -> None:
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if address.startswith("ray://") or not (host and port.isdigit() and int(port) < 2**16):
        raise ConfigError(
            f"--address {address!r} is not HOST:PORT.",
            why="The driver connects to the cluster's own port (GCS, 6379 by default), from one of its nodes.",
            fix="Give HOST:PORT as `ray start --head` printed it, or auto on a node of the cluster.",
        )
    try:
        speaks_grpc = _speaks_grpc(host.strip("[]"), int(port))
    except OSError as error:
        raise ConfigError(
            f"--address {address}: cannot be reached: {error}.",
            why="No worker can be started without it.",
            fix="Check host and port, and that `ray start --head` runs there; leave --address out to use this machine alone.",
        ) from error
    if not speaks_grpc:
        raise ConfigError(
            f"--address {address}: what listens there is not Ray's GCS.",
            why="It may be the dashboard (8265 by default) or another program; Ray would try to talk to it for minutes.",
            fix="Give the HOST:PORT that `ray start --head` printed (6379 by default), or auto on a node of the cluster.",
        )


def _speaks_grpc(host: str, port: int) -> bool:
    """Whether a server greets as HTTP/2 ones do, which gRPC is. Raises OSError where nothing listens."""
    with socket.create_connection((host, port), timeout=_REACH_TIMEOUT_S) as connection:
        if os.environ.get("RAY_USE_TLS", "0") != "0":
            return True  # it would greet once it knows us
        try:
            connection.sendall(_HTTP2_GREETING)
            answer = connection.recv(_FRAME_HEADER_BYTES, socket.MSG_WAITALL)
        except OSError:
            return False
    return len(answer) == _FRAME_HEADER_BYTES and answer[3] == _SETTINGS_FRAME


def _children() -> list[psutil.Process]:
    return list(psutil.Process().children())
