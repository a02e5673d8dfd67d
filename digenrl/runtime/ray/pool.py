"""The worker processes of a run: started, called, watched, and started anew when they die.

Results and deaths arrive in one inbox, in the order in which they happened, and are looked at by the driver's thread alone.
Invariants: what a process that was given up still answers is never seen again; the ranks of a crew are given up together and
started anew together, with a meeting of their own, so that none of them waits for one that is gone.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from digenrl.config.schema import Recipe
from digenrl.errors import DigenError, WorkerError
from digenrl.ids import WorkerId
from digenrl.runtime.ray.actor import WorkerActor
from digenrl.runtime.ray.answers import Hello
from digenrl.runtime.ray.placement import Rank
from digenrl.runtime.ray.shell import as_actor

_STARTS = 5
"""Starts in a row that may fail before a worker is left dead."""
_RESTART_PAUSE_S = 1.0
_KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**32)}
"""For workers on CPUs: glibc keeps what a pass has freed for the next one, which needs as much; fewer page faults save 2 % of a
step. Beside a GPU it would keep the host memory that loading a model has freed."""


@dataclass(slots=True)
class Process:
    """One rank's process, as the driver sees it."""

    rank: Rank
    actor: Any = None
    hello: Hello | None = None
    """None until it is loaded."""
    node: str = ""
    incarnation: int = 0
    failed_starts: int = 0
    pinged_at: float | None = None
    """When the ping was sent that is not answered yet."""
    next_ping: float = 0.0

    @property
    def up(self) -> bool:
        """Whether it takes commands."""
        return self.hello is not None


Handler = Callable[["Future[Any]"], Sequence[Any]]
"""Called in the driver's thread with a finished call; returns events."""


@dataclass(slots=True)
class Inbox:
    """What has happened, in order."""

    items: queue.SimpleQueue[tuple[Handler, Future[Any]]] = field(default_factory=queue.SimpleQueue)

    def watch(self, future: Future[Any], handler: Handler) -> None:
        """Have ``handler`` called once the future is done."""
        future.add_done_callback(lambda done: self.items.put((handler, done)))

    def after(self, seconds: float, handler: Handler) -> None:
        """Have ``handler`` called after a while."""
        pause: Future[Any] = Future()
        timer = threading.Timer(seconds, pause.set_result, [None])
        timer.daemon = True
        timer.start()
        self.watch(pause, handler)


class WorkerPool:
    """All processes of a run."""

    actor: Any = as_actor(WorkerActor)
    """What each of them is."""

    def __init__(self, recipe: Recipe, ranks: Sequence[Rank], group: Any, inbox: Inbox, *, keep_previous: bool) -> None:
        self._recipe = recipe
        self._group = group
        self._inbox = inbox
        self._keep_previous = keep_previous
        self._processes = [Process(rank) for rank in ranks]
        self._place = {rank.name: place for place, rank in enumerate(ranks)}
        self._meetings: dict[WorkerId, ObjectRef[Any]] = {}
        """Where the ranks of each crew meet."""
        self._closed = False
        self.on_lost: Callable[[Rank, str], Sequence[Any]] = _no_events
        """Called with the rank whose loss its worker did not survive; returns events."""
        self.on_back: Callable[[WorkerId], Sequence[Any]] = _no_events
        """Called when all ranks of a worker are up again; returns events."""

    def start(self) -> None:
        """Start and load all processes. Raises what the first one to fail raises, with its name."""
        loading = {process.rank.name: (process, self._launch(process)) for process in self._processes}
        deadline = time.monotonic() + self._recipe.cluster.load_timeout_s
        for name, (process, future) in loading.items():
            try:
                process.hello, process.node = future.result(max(0.0, deadline - time.monotonic()))
            except TimeoutError as error:
                raise WorkerError(
                    f"{name} has not loaded its model within cluster.load_timeout_s={self._recipe.cluster.load_timeout_s:g}.",
                    why="A large model from a slow disk or the hub can take long.",
                    fix="Raise the limit, or keep the weights on a local disk.",
                ) from error
            except RayError as error:
                raise worker_exception(name, "loading", error) from error
        for process in self._processes:
            self._watch_life(process)

    def processes(self, worker: WorkerId) -> list[Process]:
        """The ranks of a worker, in order."""
        return [process for process in self._processes if process.rank.worker == worker]

    def all(self) -> list[Process]:
        """Every process."""
        return self._processes

    def write_list(self, path: Path) -> None:
        """Which process is which worker, for people who look for a hung one: name, pid, node and device of each."""
        plain = {
            process.rank.name: {"pid": process.hello.pid, "node": process.node, "device": process.hello.device}
            for process in self._processes
            if process.hello is not None
        }
        draft = path.with_suffix(".json.tmp")
        draft.write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")
        draft.replace(path)

    def call(
        self, process: Process, method: str, *arguments: Any, num_returns: int = 1, beside: bool = False
    ) -> list[ObjectRef[Any]]:
        """Call a method of a worker's host; references to its results.

        Object references among the arguments arrive as what they refer to. beside: not after the commands given before.
        """
        actor = process.actor
        call = (actor.run_beside if beside else actor.run).options(num_returns=num_returns)
        refs = call.remote(method, *arguments)
        return [refs] if num_returns == 1 else list(refs)

    def beat(self) -> Sequence[Any]:
        """Ask all for a sign of life; events for those that have not given one in time. To be called a few times a second."""
        now, limit = time.monotonic(), self._recipe.cluster.heartbeat_timeout_s
        for process in self._processes:
            if not process.up:
                continue
            if process.pinged_at is None:
                if now >= process.next_ping:
                    process.next_ping = now + limit / 10
                    self._ping(process, now)
            elif now - process.pinged_at > limit:
                return self.lose(process, f"no sign of life for {limit:g} s")
        return ()

    def lose(self, process: Process, error: str) -> Sequence[Any]:
        """Give a process up, and its crew with it: end them, whatever state they are in, and start them anew.

        Events of the worker's loss, unless another of its ranks was lost before.
        """
        if not process.up:
            return ()
        whole = all(each.up for each in self.processes(process.rank.worker))
        given_up = self._crew(process)
        for each in given_up:
            _give_up(each)
        events = self.on_lost(process.rank, error) if whole else ()
        if "train" not in process.rank.roles:
            self._restart(given_up)
        return events

    def close(self) -> None:
        """End all processes."""
        self._closed = True
        for process in self._processes:
            if process.actor is not None:
                _end(process)

    def _launch(self, process: Process) -> Future[Any]:
        rank = process.rank
        resources = dict(rank.resources)
        process.actor = self.actor.options(
            num_cpus=resources.pop("CPU", 0),
            num_gpus=resources.pop("GPU", 0),
            resources=resources,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, self._place[rank.name]),
            runtime_env={"env_vars": _environment(self._recipe, _device(rank))},
        ).remote()
        future: Future[Any] = self.set_up(process).future()
        return future

    def set_up(self, process: Process) -> ObjectRef[Any]:
        """Have a process load what it needs; it answers its Hello and its node's address."""
        rank = process.rank
        path = [str(Path(entry or ".").resolve()) for entry in ("", *sys.path)]
        meeting = None
        if rank.crew is not None:
            if rank.index == 0:
                self._meetings[rank.worker] = process.actor.listen.remote()
            meeting = self._meetings[rank.worker]
        ref: ObjectRef[Any] = process.actor.setup.remote(
            self._recipe.to_plain(), sorted(rank.roles), _device(rank), self._keep_previous, path, rank.index, rank.crew, meeting
        )
        return ref

    def _crew(self, process: Process) -> list[Process]:
        """Who lives and dies with a process, itself among them; in order of rank."""
        return self.processes(process.rank.worker) if process.rank.crew is not None else [process]

    def _restart(self, crew: Sequence[Process]) -> None:
        for process in crew:
            self._start_anew(process, crew)

    def _start_anew(self, process: Process, crew: Sequence[Process]) -> None:
        incarnation = process.incarnation

        def loaded(future: Future[Any]) -> Sequence[Any]:
            if self._closed or process.incarnation != incarnation:
                return ()
            if future.exception() is not None:
                self._failed_to_start(process, crew)
                return ()
            process.hello, process.node = future.result()
            self._watch_life(process)
            if not all(each.up for each in crew):
                return ()
            for each in crew:
                each.failed_starts = 0
            worker = process.rank.worker
            return self.on_back(worker) if all(each.up for each in self.processes(worker)) else ()

        self._inbox.watch(self._launch(process), loaded)

    def _failed_to_start(self, process: Process, crew: Sequence[Process]) -> None:
        """Start a crew once more, of which a process did not come up, after a while; but not for ever."""
        for each in crew:
            _give_up(each)
            each.failed_starts += 1
        if process.failed_starts < _STARTS:
            incarnation = process.incarnation

            def again(_: Future[Any]) -> Sequence[Any]:
                if not self._closed and process.incarnation == incarnation:
                    self._restart(crew)
                return ()

            self._inbox.after(_RESTART_PAUSE_S * process.failed_starts, again)

    def _watch_life(self, process: Process) -> None:
        incarnation = process.incarnation

        def ended(future: Future[Any]) -> Sequence[Any]:
            if self._closed or process.incarnation != incarnation:
                return ()
            return self.lose(process, short(future.exception()))

        self._inbox.watch(process.actor.lives.remote().future(), ended)

    def _ping(self, process: Process, now: float) -> None:
        incarnation, process.pinged_at = process.incarnation, now

        def answered(future: Future[Any]) -> None:
            # In a thread of Ray's: a driver that is busy for long must not count its workers' silence.
            if future.exception() is None and process.incarnation == incarnation:
                process.pinged_at = None

        process.actor.ping.remote().future().add_done_callback(answered)


def _no_events(*_: object) -> Sequence[Any]:
    return ()


def worker_exception(name: str, doing: str, error: BaseException) -> DigenError:
    """What a worker raised, as an error of the same kind that names the worker and carries its traceback."""
    cause = error.cause if isinstance(error, RayTaskError) else None
    if isinstance(cause, DigenError):
        named = type(cause)(f"{name} ({doing}): {cause.what}", why=cause.why, fix=cause.fix)
        named.__cause__ = WorkerTraceback(str(error))
        return named
    failed = WorkerError(
        f"{name} failed while {doing}: {short(error)}",
        why="Its traceback stands above." if isinstance(error, RayTaskError) else "Its process ended.",
        fix="Mend what it names; a process that ended without a word may have run out of memory.",
    )
    failed.__cause__ = WorkerTraceback(str(error))
    return failed


class WorkerTraceback(Exception):
    """The traceback of an exception in another process, as text."""


def short(error: BaseException | None) -> str:
    """One line of an error of Ray's: the exception itself, not the wrapping."""
    if isinstance(error, RayTaskError) and error.cause is not None:
        return f"{type(error.cause).__name__}: {next(iter(str(error.cause).splitlines()), '')}"
    if isinstance(error, RayActorError):
        return "its process ended"
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def _give_up(process: Process) -> None:
    """End a process; what it was asked before, it never answers."""
    _end(process)
    process.hello, process.pinged_at = None, None
    process.incarnation += 1


def _end(process: Process) -> None:
    try:
        ray.kill(process.actor, no_restart=True)
    except (RayError, ValueError):
        return  # it is gone already
    hello = process.hello
    if hello is not None and process.node == str(ray.util.get_node_ip_address()):
        try:
            os.kill(hello.pid, signal.SIGKILL)  # a stopped process does not hear Ray
        except (ProcessLookupError, PermissionError):
            return


def _device(rank: Rank) -> str:
    return "cuda" if rank.resources.get("GPU") else "cpu"


def _environment(recipe: Recipe, device: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name.startswith(("HF_", "TRANSFORMERS_", "MALLOC_"))}
    threads = {"OMP_NUM_THREADS": str(recipe.run.threads_per_worker), "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
    return {**(_KEEP_FREED_MEMORY if device == "cpu" else {}), **kept, **threads}
