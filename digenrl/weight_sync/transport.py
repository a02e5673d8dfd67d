"""Collective operations between processes that stand apart from torch's default group: gloo on CPU, NCCL on GPUs.

Invariants: no wait is longer than its timeout; on gloo, all that listens does so on the one address that the group meets at.
(NCCL picks its interfaces itself, by NCCL_SOCKET_IFNAME.) Nothing that arrives is unpickled.
"""

from __future__ import annotations

import secrets
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from digenrl.errors import WorkerError


class TransportFailed(WorkerError):
    """A peer died, stalled or never came. The group is closed; another one can be opened, without that peer."""


dist: Any = torch.distributed  # its classes of C++ are exported in a way that type checkers do not see


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a group meets; small, and travels by value."""

    ip: str
    port: int
    token: str
    """Tells this meeting from others that had the same port."""


class Listener:
    """A socket of this node at which one group meets. Bound by us, because TCPStore would listen on all interfaces."""

    def __init__(self, ip: str = "127.0.0.1") -> None:
        """ip: this node's own address, reachable by all peers; loopback by default. Raises TransportFailed if it is not ours."""
        family = socket.AF_INET6 if ":" in ip else socket.AF_INET
        try:
            self._socket = socket.create_server((ip, 0), family=family, backlog=1024)
        except OSError as error:
            raise TransportFailed(
                f"No socket could be opened at {ip!r}: {error}.", fix="Use an address of this node, without a port."
            ) from error
        self.address = Address(ip=ip, port=self._socket.getsockname()[1], token=secrets.token_hex(8))

    def detach(self) -> int:
        """Give the socket away, as a file descriptor."""
        return self._socket.detach()

    def close(self) -> None:
        """Close the socket, if it was not given away. May be called twice."""
        self._socket.close()


def open_store(meeting: Listener | Address, *, timeout_s: float) -> tuple[Any, Any]:
    """The key-value store at which processes meet, and the server or connection that must live as long as it does.

    Whoever brings the Listener serves it. Raises RuntimeError or OSError, as torch does, when nobody is there in time.
    """
    address = meeting.address if isinstance(meeting, Listener) else meeting
    server = dist.TCPStore(
        address.ip,
        address.port,
        is_master=isinstance(meeting, Listener),
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=meeting.detach() if isinstance(meeting, Listener) else None,
    )
    return dist.PrefixStore(address.token, server), server


class Collectives:
    """Broadcast and barrier among ``world_size`` ranks, of which rank 0 brought the listener. For one thread at a time."""

    def __init__(
        self, *, rank: int, world_size: int, meeting: Listener | Address, timeout_s: float, device: torch.device
    ) -> None:
        """Meet all others, within ``timeout_s``; also the timeout of every operation. Raises RuntimeError, as torch does."""
        assert isinstance(meeting, Listener) == (rank == 0), "rank 0 brings the listener, the others its address"
        assert 0 <= rank < world_size, f"rank {rank} of {world_size}"
        deadline = time.monotonic() + timeout_s
        address = meeting.address if isinstance(meeting, Listener) else meeting
        self._is_root = rank == 0
        self._device = device
        self._timeout = timedelta(seconds=timeout_s)
        store, self._server = open_store(meeting, timeout_s=timeout_s)
        _meet(store, rank, world_size, deadline)
        # A stream of its own: this runs beside training, and must neither wait for its kernels nor hold them up.
        cuda: Any = torch.cuda
        self._stream = cuda.Stream(device) if device.type == "cuda" else None
        rest = timedelta(seconds=max(1.0, deadline - time.monotonic()))
        self._group: Any = (
            _gloo(store, rank, world_size, rest, own_ip=_own_ip(address))
            if self._stream is None
            else _nccl(store, rank, world_size, rest)
        )
        # Torch forms NCCL's communicators in the first operation: here, where everyone has just been seen.
        self.barrier()

    def broadcast(self, host: Tensor) -> None:
        """Rank 0's bytes into everyone's; done when this returns. host: [num_bytes] uint8, CPU. Raises RuntimeError.

        All ranks must give the same size: gloo ends a process that receives more bytes than it expects.
        """
        if not len(host):
            return
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        if self._stream is None:
            options.timeout = self._timeout
            _finish(self._group.broadcast([host], options))
            return
        with torch.cuda.stream(self._stream):
            staged = host.to(self._device) if self._is_root else torch.empty_like(host, device=self._device)
            _finish(self._group.broadcast([staged], options), self._timeout)
            if not self._is_root:
                host.copy_(staged)
        self._stream.synchronize()

    def barrier(self) -> None:
        """Return when every rank has come here. Raises RuntimeError."""
        options = dist.AllreduceOptions()
        if self._stream is None:
            options.timeout = self._timeout
            _finish(self._group.allreduce([torch.ones(1)], options))
            return
        with torch.cuda.stream(self._stream):
            _finish(self._group.allreduce([torch.ones(1, device=self._device)], options), self._timeout)
        self._stream.synchronize()

    def close(self) -> None:
        """Leave; peers that wait for this process fail at once. May be called twice."""
        group, self._group, self._server = self._group, None, None
        if group is not None and self._stream is not None:
            group.abort()  # NCCL's destructor would wait for kernels that wait for a dead peer


def _finish(work: Any, timeout: timedelta | None = None) -> None:
    """Wait for an operation. gloo keeps its own timeouts; NCCL blocks until the kernel is done only with one given."""
    try:
        finished = work.wait() if timeout is None else work.wait(timeout)
    finally:
        # It holds the connections open, and an error's traceback would hold it: then nobody would notice that we left.
        del work
    if not finished:
        raise RuntimeError("the operation did not finish")


def _meet(store: Any, rank: int, world_size: int, deadline: float) -> None:
    """Wait until all ranks have come. Raises RuntimeError naming those that have not."""
    keys = {peer: f"came/{peer}" for peer in range(world_size)}
    store.set(keys[rank], "1")
    try:
        store.wait(list(keys.values()), timedelta(seconds=max(0.001, deadline - time.monotonic())))
    except RuntimeError as error:
        absent = [str(peer) for peer, key in keys.items() if not store.check([key])]
        raise RuntimeError(f"of the ranks 0..{world_size - 1} these did not come: {', '.join(absent)}") from error


def _gloo(store: Any, rank: int, world_size: int, timeout: timedelta, *, own_ip: str) -> Any:
    # dist.new_group needs the default group, which belongs to the trainer's ranks. The constructor with options, private in
    # name only, is the one that takes a device; without one gloo listens wherever the host's name points to.
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    options._threads = 1
    options._devices = [gloo.create_device(hostname=own_ip)]
    return gloo(store, rank, world_size, options)


def _nccl(store: Any, rank: int, world_size: int, timeout: timedelta) -> Any:
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    # Torch's watchdog ends the process when this has passed. Our own waits are shorter, raise, and abort the group.
    options._timeout = timedelta(minutes=30) + timeout
    return nccl(store, rank, world_size, options)


def _own_ip(address: Address) -> str:
    """This node's address on the way to the meeting. Nothing is sent: a UDP socket only looks up the route."""
    family = socket.AF_INET6 if ":" in address.ip else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address.ip, address.port))
        return str(probe.getsockname()[0])
