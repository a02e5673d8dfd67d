"""A process that takes part in broadcasts as its parent says: one JSON object a line in, one out. See conftest.py."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from xxhash import xxh3_128_hexdigest

from digenrl.weight_sync.broadcast import BroadcastGroup
from digenrl.weight_sync.publication import BucketSpec, Publication
from digenrl.weight_sync.transport import Address, TransportFailed


def manifest_of(buckets: list[dict[str, Any]]) -> Publication:
    return Publication(version=0, tensors=(), buckets=tuple(BucketSpec(**bucket) for bucket in buckets), digest="")


def main() -> None:
    group: BroadcastGroup | None = None
    say({"ready": os.getpid()})
    for line in sys.stdin:
        order = json.loads(line)
        try:
            if order["do"] == "open":
                address = Address(**order["address"])
                group = BroadcastGroup.open(
                    rank=order["rank"],
                    world_size=order["world_size"],
                    address=address,
                    timeout_s=order["timeout_s"],
                    device=torch.device(order.get("device", "cpu")),
                )
                say({"done": "open"})
            elif order["do"] == "receive":
                assert group is not None
                buckets = group.receive(manifest_of(order["buckets"]))
                say({"digests": [xxh3_128_hexdigest(bucket.tobytes()) for bucket in buckets]})
            elif order["do"] == "close":
                assert group is not None
                group.close()
                say({"done": "close"})
        except TransportFailed as error:
            say({"failed": error.what})


def say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
