"""What Ray reads from the environment, once, when it is imported. Imports no Ray, and so comes before everything that does."""

from __future__ import annotations

import os
import secrets
import sys

from digenrl.errors import ConfigError

NICENESS = "RAY_worker_niceness"
"""How much less than its driver a worker of a private cluster insists on a core; Ray's own spelling."""

_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Pages of raylet logs when a worker dies; what happened is said by us, in a line. And that many workers share few cores.
    "RAY_DEDUP_LOGS_SKIP_REGEX": "A worker died or was killed|Raylet is terminated|has been marked dead|"
    "worker processes have been started",
}


def prepare(*, private: bool) -> None:
    """Set what Ray reads when it is imported; what the user has set stands.

    private: a cluster of our own, which nobody else may talk to: a token that never leaves this process and its children.
    Raises ConfigError when Ray was imported before, without one.
    """
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    if not private:
        return
    has_token = os.environ.get("RAY_AUTH_MODE") == "token" and os.environ.get("RAY_AUTH_TOKEN")
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return  # the process has a connection, which is used
    if ray is not None and not has_token:
        raise ConfigError(
            "Ray was imported before DigenRL could turn its token authentication on.",
            why="Anybody who reaches this machine could run code in an unprotected cluster (CVE-2023-48022).",
            fix="Set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN before `import ray`, or call digenrl before importing it.",
        )
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    # The workers are what the machine is for. At Ray's 15 they wait for whatever else it does, the driver's own threads included.
    os.environ.setdefault(NICENESS, "0")
