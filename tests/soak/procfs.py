"""What the kernel says of a process: memory of its own, fds, threads, mappings."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Sample:
    """One process at one moment.

    Attributes:
        seconds: Since the soak began.
        anon_bytes: Resident memory of its own (``RssAnon``): where a leak of objects would show;
            of a trainer, what it says of the last moment at which it held nothing.
        shared_bytes: Resident shared memory (``RssShmem``): arenas, each once a process.
    """

    seconds: float
    anon_bytes: int
    shared_bytes: int
    fds: int
    threads: int
    maps: int


def sample(pid: int, seconds: float) -> Sample:
    """Raises ``OSError`` when the process has ended."""
    process = Path(f"/proc/{pid}")
    status = dict(
        line.split(":", 1) for line in (process / "status").read_text().splitlines() if ":" in line
    )

    def kib(name: str) -> int:
        return int(status[name].split()[0]) << 10

    return Sample(
        seconds,
        kib("RssAnon"),
        kib("RssShmem"),
        len(os.listdir(process / "fd")),
        int(status["Threads"]),
        (process / "maps").read_bytes().count(b"\n"),
    )
