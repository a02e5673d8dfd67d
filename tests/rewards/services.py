"""Real HTTP servers on loopback for the tests of rewards: one that scores as the product does and can be told to misbehave."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from digenrl.config.loader import load_reward
from digenrl.ids import SampleId
from digenrl.rewards.base import RewardSample
from digenrl.rewards.compose import WeightedRewards
from digenrl.rewards.remote.wire import SCHEMA, decode_request

ROOT = Path(__file__).parents[2]
HEALTHY = json.dumps({"status": "ok", "schema": SCHEMA, "rewards": ["jpeg"]}).encode()


@dataclass
class Reply:
    """What a server sends."""

    body: bytes
    status: int = 200
    headers: dict[str, str] = field(default_factory=lambda: {"Content-Type": "application/json"})


Fault = Callable[["FaultyServer", Reply], "Reply | None"]
"""Makes another reply of the right one; None: the connection is reset."""


def status(code: int, **headers: str) -> Fault:
    return lambda server, right: Reply(b'{"error": "as told"}', code, {k.replace("_", "-"): v for k, v in headers.items()})


def scores(change: Callable[[list[dict[str, Any]]], Any]) -> Fault:
    def fault(server: FaultyServer, right: Reply) -> Reply:
        plain = json.loads(right.body)
        plain["scores"] = change(plain["scores"])
        return Reply(json.dumps(plain).encode())

    return fault


def value(new: Any) -> Fault:
    return scores(lambda all_: [{**all_[0], "value": new}, *all_[1:]])


def body(content: bytes, kind: str = "application/json") -> Fault:
    return lambda server, right: Reply(content, 200, {"Content-Type": kind})


def reset(server: FaultyServer, right: Reply) -> None:
    return None


def slow(seconds: float) -> Fault:
    def fault(server: FaultyServer, right: Reply) -> Reply:
        time.sleep(seconds)
        return right

    return fault


class FaultyServer:
    """Scores with a built-in reward; the n-th request gets the n-th fault (None: none), and those beyond get ``then``."""

    def __init__(self, faults: Sequence[Fault | None] = (), then: Fault | None = None, reward: str = "jpeg") -> None:
        self._faults, self._then = list(faults), then
        self._rewards = WeightedRewards.from_recipe([load_reward(reward)])
        self._lock = threading.Lock()
        self.requests: list[dict[str, Any]] = []
        self.health = Reply(HEALTHY)
        self.inside, self.most_inside = 0, 0
        self.down = False
        """Whether its process has ended: who is still connected is cut off."""

    def says(self, **more: Any) -> None:
        """Have its health say more than it does."""
        self.health = Reply(json.dumps({**json.loads(HEALTHY), **more}).encode())

    def answer(self, content: bytes) -> Reply | None:
        if self.down:
            return None
        with self._lock:
            number = len(self.requests)
            self.requests.append(json.loads(content))
            self.inside += 1
            self.most_inside = max(self.most_inside, self.inside)
        try:
            right = self._right(content)
            fault = self._faults[number] if number < len(self._faults) else self._then
            return right if fault is None else fault(self, right)
        finally:
            with self._lock:
                self.inside -= 1

    def _right(self, content: bytes) -> Reply:
        request, samples = decode_request(content)
        scored = self._rewards.score(samples)
        plain = [{"id": str(s.id), "value": float(v)} for s, v in zip(samples, scored.totals, strict=True)]
        return Reply(json.dumps({"schema": SCHEMA, "request": request, "scores": plain}).encode())


@contextmanager
def serving(server: Any, port: int = 0) -> Iterator[str]:
    """Listen on loopback; yields the address. server: has ``answer(content)`` and ``health``."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send(server.health)

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            server.path, server.headers = self.path, dict(self.headers)
            self._send(server.answer(content))

        def _send(self, reply: Reply | None) -> None:
            if reply is None:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.close_connection = True
                self.connection.close()
                return
            try:
                self.send_response(reply.status)
                for name, text in reply.headers.items():
                    self.send_header(name, text)
                self.send_header("Content-Length", str(len(reply.body)))
                self.end_headers()
                self.wfile.write(reply.body)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True  # who asked does not wait any more

        def log_message(self, *arguments: Any) -> None:
            """Quiet."""

        def finish(self) -> None:
            try:
                super().finish()
            except (ValueError, OSError):
                return  # closed already

    http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    http.daemon_threads = True
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}"
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@contextmanager
def reward_serve(*arguments: str, **environment: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """``digenrl reward-serve`` in a process of its own; yields its address once it listens, and the process."""
    process = subprocess.Popen(
        [sys.executable, "-m", "digenrl.cli.main", "reward-serve", *arguments],
        env={**os.environ, **environment},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert " at http" in line, process.communicate()[1]
        yield line.rpartition(" at ")[2].strip(), process
    finally:
        process.terminate()
        process.communicate(timeout=20)


def pictures(count: int, size: int = 16) -> list[RewardSample]:
    """Samples that all score differently."""
    random = np.random.default_rng(5)
    noise = random.integers(0, 256, size=(size, size, 3), dtype=np.uint8)
    samples = []
    for number in range(count):
        image = noise.copy()
        image[: (number + 1) * size // (count + 1)] = 128
        samples.append(
            RewardSample(id=SampleId(3, number // 4, number % 4), prompt=f"p {number}", metadata={"n": number}, image=image)
        )
    return samples
