"""Determines how much memory this process may still allocate."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def available_bytes() -> int | None:
    """Returns the bytes that this process may still allocate, or None if no limit is known.

    This is the least of what the machine, the container and the process limit leave.
    """
    found = [limit for limit in (_machine_bytes(), _container_bytes(), _process_bytes()) if limit is not None]
    return max(min(found), 0) if found else None


def _machine_bytes() -> int | None:
    """Returns the available memory of the machine in bytes, or None if it is not known."""
    return _field(Path("/proc/meminfo"), "MemAvailable:", 1024)


def _container_bytes() -> int | None:
    """Returns the available memory of the container in bytes, from cgroups of version 2 or 1; None without a limit.

    Cached file pages count as available.
    """
    for limit, used, cached in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        with contextlib.suppress(OSError, ValueError):  # ValueError: "max", no limit
            left = int((_CGROUPS / limit).read_text()) - int((_CGROUPS / used).read_text())
            return left + (_field(_CGROUPS / Path(limit).parent / "memory.stat", cached, 1) or 0)
    return None


def _process_bytes() -> int | None:
    """Returns the bytes that the limit of the address space leaves to this process, or None without a limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    used = _field(Path("/proc/self/status"), "VmSize:", 1024)
    return None if used is None else limit - used


def _field(path: Path, name: str, unit: int) -> int | None:
    """Returns a number from a file of lines "name number", multiplied by `unit` bytes, or None."""
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            words = line.split()
            if words[:1] == [name]:
                return int(words[1]) * unit
    return None
