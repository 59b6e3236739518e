"""Memory for arenas: what is available, also by the cgroup's limits, and what may take it away."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from discod.checkup.finding import Finding, ok, warn
from discod.config import RAM_SHARE, available_bytes, cgroup_limits, default_ram_bytes
from discod.wire.sizes import format_size

LITTLE_BYTES = 1 << 30
"""With a smaller ``--ram`` nearly everything goes to disk, whatever the model."""

MUCH_SWAPPED = 0.25
"""Of the swap space: the machine is short of memory, and not just tidy."""


def check_memory(root: Path = Path("/")) -> Iterator[Finding]:
    """The findings; ``root`` is where /proc, /sys and /dev are."""
    yield _available(root)
    yield _cgroup(root)
    yield _swap(root)
    yield _shm(root)


def _available(root: Path) -> Finding:
    check = "memory"
    default = default_ram_bytes(root)
    found = (
        f"{format_size(available_bytes(root))} are available; without --ram the daemon takes "
        f"up to {format_size(default)} for arenas ({RAM_SHARE:.0%} of what limits leave)"
    )
    if default < LITTLE_BYTES:
        return warn(check, found, "free memory, raise the container's limit, or set --ram")
    return ok(check, found)


def _cgroup(root: Path) -> Finding:
    check = "cgroup"
    total = _meminfo(root, "MemTotal")
    # Version 1 says 2^63 where there is none.
    limits = [pair for pair in cgroup_limits(root) if not total or pair[0] < total]
    if not limits:
        return ok(check, "no memory limit that is seen from here")
    limit, free = min(limits, key=lambda pair: pair[1])
    found = f"a memory limit of {format_size(limit)}, of which {format_size(free)} are free"
    if free * RAM_SHARE < LITTLE_BYTES:
        remedy = "raise it: docker run --memory, MemoryMax=, the job's memory"
        return warn(check, f"{found}; arenas count", remedy)
    return ok(check, f"{found}; arenas count, also those of clients in it")


def _swap(root: Path) -> Finding:
    check = "swap"
    total, free = (_meminfo(root, name) for name in ("SwapTotal", "SwapFree"))
    if not total:
        return ok(check, "none")
    used = total - free
    found = f"{format_size(used)} of {format_size(total)} are used"
    if used > MUCH_SWAPPED * total:
        return warn(
            check,
            f"{found}: arenas may be swapped out, and are then read and written twice",
            "free memory, lower --ram, or switch it off (swapoff -a)",
        )
    return ok(check, found)


def _shm(root: Path) -> Finding:
    """Said so that nobody need ask; other offloaders fail for its 64 MiB in containers."""
    found = "not needed: arenas are memfds"
    with contextlib.suppress(OSError):
        status = os.statvfs(root / "dev/shm")
        found += f" (it has {format_size(status.f_blocks * status.f_frsize)} here)"
    return ok("/dev/shm", found)


def _meminfo(root: Path, wanted: str) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == wanted:
                return int(value.split()[0]) * 1024
    return 0
