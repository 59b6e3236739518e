"""What the daemon was told to do, and the defaults that depend on the machine."""

import contextlib
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from discod.checksum import Mode
from discod.wire import PAGE_BYTES
from discod.wire.sizes import format_size, parse_size

RAM_SHARE = 0.5
"""Of the memory available at start: the other half is the trainers' own."""
DISK_SHARE = 0.9
"""Of the space free at start: a file system that is quite full gets slow, and others use it."""

FIRST_CLIENT_SECONDS = 30.0
"""With ``--exit-idle``: the trainer that started the daemon is given this long to come."""

DEFAULT_THREADS = 4
DEFAULT_CHUNK_BYTES = 8 << 20
MAX_THREADS = 256
"""Far beyond what any device takes; more is a slip of the pen, and would not start."""

MAX_PORT = 65_535

MAX_CHUNK_BYTES = 1 << 30
"""One system call transfers less than 2 GiB (read(2)); half of that stays clear of it."""


DAY_SECONDS = 86_400.0
_SPANS = {"hour": 3600.0, "day": DAY_SECONDS}


LEAST_WRITE_BUDGET_BYTES = 1 << 20
"""The size from which tensors are offloaded by default; less is a unit forgotten."""


class BadOption(ValueError):
    """An option's value is wrong; the text says which, why, and what is allowed."""


@dataclass(frozen=True, slots=True)
class WriteRate:
    """So many bytes in any span of so many seconds."""

    size_bytes: int
    seconds: float

    def __str__(self) -> str:
        span = next((name for name, length in _SPANS.items() if length == self.seconds), None)
        return f"{format_size(self.size_bytes)}/{span or f'{self.seconds:.0f} s'}"


def parse_write_rate(text: str) -> WriteRate:
    """What ``2TB/day`` or ``100GiB/hour`` says.

    Raises:
        ValueError: It is no such text; the error says what is wrong.
    """
    example = "write for example 2TB/day or 100GB/hour"
    size, slash, span = text.partition("/")
    seconds = _SPANS.get(span.strip().lower())
    if not slash or seconds is None:
        raise ValueError(f"{text!r} does not say in which time; {example}")
    try:
        return WriteRate(parse_size(size), seconds)
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}; {example}") from error


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen: a name or an IP address, and a port; 0: any that is free."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """What ``127.0.0.1:9478`` or ``[::1]:9478`` says.

    Raises:
        ValueError: It is no such text; the error says what is wrong.
    """
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not host or (":" in host and not bracketed):
        raise ValueError(f"{text!r} is not HOST:PORT; write for example 127.0.0.1:9478")
    if not (port.isascii() and port.isdecimal() and int(port) <= MAX_PORT):
        raise ValueError(
            f"{text!r} has no port of 0 to {MAX_PORT}; write for example 127.0.0.1:9478"
        )
    return Address(host[1:-1] if bracketed else host, int(port))


@dataclass(frozen=True, slots=True)
class Config:
    """The daemon's options.

    Attributes:
        scratch: Directories for scratch files, at least one.
        socket_dir: Directory of the two sockets.
        ram_bytes: Most arena bytes of all clients; None: ``RAM_SHARE`` of what is available.
        disk_bytes: Most scratch bytes of all clients; None: ``DISK_SHARE`` of what is free.
        threads: I/O threads per device.
        chunk_bytes: Most bytes that one thread transfers at a time.
        checksum: What is checksummed.
        log_level: As :mod:`logging` names it, in lower case.
        exit_idle_seconds: Exit after so long without a client; 0: never. Before the first one,
            after ``FIRST_CLIENT_SECONDS`` at least.
        allow_gids: Groups whose members may attach too.
        metrics: Where Prometheus finds the metrics; None: nowhere.
        write_budget: The most that all clients together may write; None: no limit.

    Raises:
        BadOption: A value is out of range.
    """

    scratch: tuple[Path, ...]
    socket_dir: Path
    ram_bytes: int | None = None
    disk_bytes: int | None = None
    threads: int = DEFAULT_THREADS
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    checksum: Mode = Mode.SAMPLED
    log_level: str = "info"
    exit_idle_seconds: float = 0.0
    allow_gids: tuple[int, ...] = ()
    write_budget: WriteRate | None = None
    metrics: Address | None = None

    def __post_init__(self) -> None:
        if not self.scratch:
            raise BadOption("no scratch directory: give at least one --scratch DIR")
        real = [os.path.realpath(path) for path in self.scratch]
        twice = [path for path in real if real.count(path) > 1]
        if twice:
            raise BadOption(f"--scratch {twice[0]} is given twice: name each directory once")
        if os.path.realpath(self.socket_dir) in real:
            raise BadOption(
                f"{self.socket_dir} is given twice: --scratch and --socket-dir must differ"
            )
        if not 2 <= self.threads <= MAX_THREADS:
            raise BadOption(
                f"--threads {self.threads}: there must be at least 2, so that a read never waits "
                f"for a write, and at most {MAX_THREADS}"
            )
        if self.chunk_bytes % PAGE_BYTES or not 0 < self.chunk_bytes <= MAX_CHUNK_BYTES:
            raise BadOption(
                f"--chunk {self.chunk_bytes}: it must be a multiple of {PAGE_BYTES} bytes and at "
                "most 1GiB"
            )
        for name, size in (("--ram", self.ram_bytes), ("--disk", self.disk_bytes)):
            if size is not None and size < PAGE_BYTES:
                raise BadOption(f"{name} {size}: it must be at least {PAGE_BYTES} bytes")
        if (
            self.write_budget is not None
            and self.write_budget.size_bytes < LEAST_WRITE_BUDGET_BYTES
        ):
            raise BadOption(
                f"--write-budget {self.write_budget}: it must be at least "
                f"{format_size(LEAST_WRITE_BUDGET_BYTES)}, or no tensor would ever be written"
            )
        if not 0 <= self.exit_idle_seconds < math.inf:
            raise BadOption(
                f"--exit-idle {self.exit_idle_seconds}: it must be a number of seconds, 0 or more"
            )


def default_ram_bytes(root: Path = Path("/")) -> int:
    """``RAM_SHARE`` of the memory that is available, also under the limits of our cgroups.

    Args:
        root: Where /proc and /sys are; tests give their own.
    """
    free_bytes = min([available_bytes(root), *(free for _, free in cgroup_limits(root))])
    return max(PAGE_BYTES, int(free_bytes * RAM_SHARE) // PAGE_BYTES * PAGE_BYTES)


def default_disk_bytes(directories: Iterable[tuple[int, int]]) -> int:
    """``DISK_SHARE`` of the free space.

    Args:
        directories: Device and free bytes of each directory; a device counts once.
    """
    free_bytes = sum(dict(directories).values())
    return max(PAGE_BYTES, int(free_bytes * DISK_SHARE) // PAGE_BYTES * PAGE_BYTES)


def available_bytes(root: Path) -> int:
    """The memory that is available on the machine."""
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def cgroup_limits(root: Path) -> Iterable[tuple[int, int]]:
    """Each memory limit of our own and the enclosing cgroups, and what of it is free or cache."""
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                names = ("memory.max", "memory.current", "inactive_file")
                yield from _free_up_from(root / "sys/fs/cgroup", path, *names)
            elif "memory" in controllers.split(","):
                # Version 1, where the plain figures of memory.stat are of this cgroup alone.
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
                yield from _free_up_from(root / "sys/fs/cgroup/memory", path, *names)


def _free_up_from(
    top: Path, path: str, limit_name: str, usage_name: str, cache_name: str
) -> Iterable[tuple[int, int]]:
    """As :func:`cgroup_limits`, of ``path`` and all above it, as far as they are there.

    In a container ``path`` may be the host's, of which only the end, our own group, is mounted at
    ``top``.
    """
    group = top / path.lstrip("/")
    for directory in (group, *group.parents):
        if not directory.is_relative_to(top):
            break
        with contextlib.suppress(OSError, ValueError):
            limit = int((directory / limit_name).read_text())
            usage = int((directory / usage_name).read_text())
            yield limit, max(0, limit - usage + _cache_bytes(directory, cache_name))


def _cache_bytes(group: Path, name: str) -> int:
    for line in (group / "memory.stat").read_text().splitlines():
        found, _, value = line.partition(" ")
        if found == name:
            return int(value)
    return 0
