"""The shell around what a worker process does: commands one after the other, signs of life and transfers beside them."""

from __future__ import annotations

import threading
from typing import Any

import ray


class ActorShell:
    """What every actor answers; ``setup`` of the one at hand sets ``host``."""

    host: Any = None
    """Whose methods are called."""

    def run(self, method: str, *arguments: Any) -> Any:
        """Call a method of the host."""
        return getattr(self.host, method)(*arguments)

    @ray.method(concurrency_group="io")
    def run_beside(self, method: str, *arguments: Any) -> Any:
        """Call a method of the host while it may be at a command; for transfers, which touch no weights in use."""
        return getattr(self.host, method)(*arguments)

    @ray.method(concurrency_group="io")
    def ping(self) -> None:
        """A sign of life."""

    @ray.method(concurrency_group="io")
    def lives(self) -> None:
        """Never returns: it fails when the process ends, also when the process has nothing to do."""
        threading.Event().wait()


def as_actor(cls: type[ActorShell]) -> Any:
    """The class as Ray starts it. No restarts of Ray's own: they come back with empty state, and answer as if nothing was."""
    return ray.remote(max_restarts=0, max_task_retries=0, concurrency_groups={"io": 4})(cls)  # type: ignore[call-overload]
