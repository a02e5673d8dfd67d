"""``digenrl reward-serve``."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence

from digenrl.cli.environment import calm_threads
from digenrl.cli.notes import note
from digenrl.config.builtin_recipes import names_recipe
from digenrl.config.loader import load_recipe, load_reward
from digenrl.config.reward_list import RewardSpec
from digenrl.errors import ConfigError
from digenrl.rewards.compose import WeightedRewards
from digenrl.rewards.remote.server import Limits, make_app


def run(source: str, overrides: Sequence[str], *, host: str, port: int, token_env: str, limits: Limits) -> None:
    """Score until a signal comes. Raises ConfigError before anything listens."""
    token = os.environ.get(token_env, "")
    if not token and not is_loopback(host):
        raise ConfigError(
            f"--host {host} can be reached from other machines, and {token_env} holds no token.",
            why="Whoever reaches the port could make this machine work, and see what the reward sees.",
            fix=f"Put a long random text into {token_env}, here and where the run is started; or listen at 127.0.0.1.",
        )
    rewards = rewards_to_serve(source, overrides)
    calm_threads()
    app = make_app(WeightedRewards.from_recipe(rewards), token=token, limits=limits)
    import uvicorn

    listener = _listen(host, port)
    shown = f"[{host}]" if ":" in host else host
    names = ", ".join(reward.name for reward in rewards)
    print(f"serving {names} at http://{shown}:{listener.getsockname()[1]}", flush=True)
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=10)
    uvicorn.Server(config).run(sockets=[listener])


def rewards_to_serve(source: str, overrides: Sequence[str]) -> tuple[RewardSpec, ...]:
    """The rewards of a recipe, or one that is named, with its settings as ``key=value``."""
    rewards = load_recipe(source, overrides, say=note).rewards if names_recipe(source) else (load_reward(source, overrides),)
    for reward in rewards:
        if reward.type == "remote":
            raise ConfigError(
                f"{source!r} has the reward {reward.name!r} of type remote.",
                why="A service that asks another one would only pass questions on, perhaps to itself.",
                fix="Serve the reward itself: `digenrl reward-serve jpeg`.",
            )
    return rewards


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address. A name counts when it is localhost alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        raise ConfigError(
            f"Cannot listen at {host}:{port}: {error}.",
            fix="Choose another --port (0 takes a free one), or end what listens there.",
        ) from error
