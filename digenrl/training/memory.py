"""The most memory that this process has in use, where its passes run.

On CUDA it is what torch has allocated on the device, to the byte; other processes and the driver's own share are not in it.
On CPUs it is the resident set of the whole process, libraries included (some 0.5 GiB), in pages of 4 KiB; what comes and goes
in other threads, and what the allocator keeps, makes it good to a few MiB. Linux lets it be forgotten and measured anew.
Elsewhere it only grows, so something smaller that is measured after something larger looks as large.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch

_PROCESS = Path("/proc/self")


class MemoryMeter(Protocol):
    """Measures one device, for the process that it is in."""

    def settle(self) -> int:
        """Give back what is free and forget the peak. Returns the bytes in use."""
        ...

    def peak_bytes(self) -> int:
        """Most bytes in use since ``settle``."""
        ...

    def total_bytes(self) -> int:
        """What there is of it, in use or not."""
        ...


def memory_meter(device: torch.device) -> MemoryMeter:
    """The meter of a device."""
    return _DeviceMeter(device) if device.type == "cuda" else _ProcessMeter()


class _DeviceMeter:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda: Any = torch.cuda

    def settle(self) -> int:
        self._cuda.synchronize(self._device)
        self._cuda.empty_cache()
        self._cuda.reset_peak_memory_stats(self._device)
        return int(self._cuda.memory_allocated(self._device))

    def peak_bytes(self) -> int:
        self._cuda.synchronize(self._device)
        return int(self._cuda.max_memory_allocated(self._device))

    def total_bytes(self) -> int:
        return int(self._cuda.get_device_properties(self._device).total_memory)


class _ProcessMeter:
    def settle(self) -> int:
        _trim_heap()
        if sys.platform == "linux":
            with contextlib.suppress(OSError):  # in a sandbox that forbids it, the peak only grows
                (_PROCESS / "clear_refs").write_text("5", encoding="ascii")  # man 5 proc: resets the peak resident set
        return int(psutil.Process().memory_info().rss)

    def peak_bytes(self) -> int:
        import resource

        if sys.platform == "linux":
            for line in (_PROCESS / "status").read_text(encoding="ascii", errors="replace").splitlines():
                if line.startswith("VmHWM:"):
                    return 1024 * int(line.split()[1])
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else 1024 * most

    def total_bytes(self) -> int:
        return int(psutil.virtual_memory().total)


def _trim_heap() -> None:
    """Have glibc return freed memory, which would otherwise count as in use for good; other C libraries have no such call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
