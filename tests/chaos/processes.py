"""What a process holds, as /proc tells: fds, mappings, threads, memory."""

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

NAMELESS = "nameless file"


@dataclass(frozen=True, slots=True)
class Holdings:
    """Of one process.

    Attributes:
        fds: How many of each kind: arenas, nameless files, sockets and so on.
        arenas: Mappings of arenas.
        shm: Mappings of files in /dev/shm.
        threads: How many.
        own_bytes: Memory that is neither file nor shared: what can leak.
    """

    fds: Counter[str]
    arenas: int
    shm: int
    threads: int
    own_bytes: int


def holdings(pid: int) -> Holdings:
    """What process ``pid`` holds now; raises ``OSError`` when it has ended."""
    process = Path(f"/proc/{pid}")
    fds: Counter[str] = Counter()
    for fd in os.listdir(process / "fd"):
        try:
            fds[_kind(os.readlink(process / "fd" / fd))] += 1
        except FileNotFoundError:
            continue  # closed since
    maps = (process / "maps").read_text().splitlines()
    status = dict(
        line.split(":", 1) for line in (process / "status").read_text().splitlines() if ":" in line
    )
    return Holdings(
        fds,
        sum("/memfd:discod" in line for line in maps),
        sum("/dev/shm/" in line for line in maps),
        int(status["Threads"]),
        int(status["RssAnon"].split()[0]) * 1024,
    )


def nameless_files(pid: int) -> dict[tuple[int, int], int]:
    """The nameless files that ``pid`` has fds of: by device and inode, the bytes they occupy."""
    occupied = {}
    folder = f"/proc/{pid}/fd"
    for fd in os.listdir(folder):
        try:
            if _kind(os.readlink(f"{folder}/{fd}")) == NAMELESS:
                status = os.stat(f"{folder}/{fd}")
                occupied[status.st_dev, status.st_ino] = status.st_blocks * 512
        except FileNotFoundError:
            continue
    return occupied


def _kind(target: str) -> str:
    """What a fd is of."""
    if target.startswith("/memfd:discod"):
        return "arena"
    if target.endswith(" (deleted)"):
        return NAMELESS
    if target.startswith(("socket:", "pipe:")):
        return target.partition(":")[0]
    if target.startswith("anon_inode:"):
        return target
    return "file"
