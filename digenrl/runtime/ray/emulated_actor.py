"""An emulated worker as an actor. Imports no torch, and neither does anything that is sent to it or that it answers."""

from __future__ import annotations

import ray

from digenrl.runtime.emulated import EmulatedHost, WorkerPlan
from digenrl.runtime.ray.answers import Hello
from digenrl.runtime.ray.shell import ActorShell


class EmulatedActor(ActorShell):
    """An EmulatedHost as an actor."""

    def setup(self, plan: WorkerPlan) -> tuple[Hello, str]:
        """Returns who this is, and its node's address."""
        self.host = EmulatedHost(plan)
        return self.host.hello(), str(ray.util.get_node_ip_address())
