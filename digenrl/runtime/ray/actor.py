"""A worker process of a real run: a WorkerHost behind the shell of an actor, after it has met the ranks that it works with."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import ray
import torch

from digenrl.config.loader import recipe_from_plain
from digenrl.runtime.build import Role
from digenrl.runtime.ray.answers import Hello
from digenrl.runtime.ray.host import WorkerHost
from digenrl.runtime.ray.placement import Crew
from digenrl.runtime.ray.shell import ActorShell
from digenrl.training.group import ALONE, TrainerGroup, join_group
from digenrl.weight_sync.transport import Address, Listener, open_store


class WorkerActor(ActorShell):
    """A WorkerHost as an actor."""

    def __init__(self) -> None:
        self._listener: Listener | None = None

    def listen(self) -> Address:
        """Open a socket at which the ranks of a crew meet; on rank 0, before ``setup``."""
        self._listener = Listener(str(ray.util.get_node_ip_address()))
        return self._listener.address

    def setup(
        self,
        recipe: dict[str, Any],
        roles: Sequence[Role],
        device: str,
        keep_previous: bool,
        path: Sequence[str],
        rank: int,
        crew: Crew | None,
        meeting: Address | None,
    ) -> tuple[Hello, str]:
        """Load everything. Returns who this is, and its node's address. meeting: where the crew meets, if there is one."""
        # A user's own rewards are imported from where the driver imports them.
        sys.path.extend(entry for entry in path if entry not in sys.path)
        node = str(ray.util.get_node_ip_address())
        group = ALONE
        if crew is not None and meeting is not None:
            group = self._join(crew, rank, meeting, torch.device(device))
        self.host = WorkerHost(
            recipe_from_plain(recipe),
            frozenset(roles),
            torch.device(device),
            keep_previous=keep_previous,
            node_ip=node,
            group=group,
        )
        return self.host.hello(), node

    def _join(self, crew: Crew, rank: int, meeting: Address, device: torch.device) -> TrainerGroup:
        if meeting.ip.startswith("127."):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
        # The server of the store lives as long as this process does.
        store, self._store_server = open_store(self._listener or meeting, timeout_s=crew.timeout_s)
        return join_group(store, rank=rank, size=crew.size, shard=crew.shard, device=device, timeout_s=crew.timeout_s)
