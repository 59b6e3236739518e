"""One daemon per directory: a lock on the directory itself, which leaves nothing behind.

The kernel drops the lock when the process ends, however it ends.
"""

import contextlib
import fcntl
import os
import time
from pathlib import Path

RETRY_SECONDS = 1.0
"""A daemon that was just killed keeps its lock until its I/O in flight has ended."""


class Locked(Exception):
    """Another process has the lock. ``pid`` is None when it is not visible from here."""

    def __init__(self, pid: int | None) -> None:
        super().__init__(f"locked by pid {pid}")
        self.pid = pid

    @property
    def holder(self) -> str:
        return "a process that is not visible here" if self.pid is None else f"pid {self.pid}"


def lock_directory(path: Path) -> int:
    """Open and lock the directory; returns the fd that holds the lock.

    Raises:
        Locked: Another process has had it for ``RETRY_SECONDS``.
        OSError: It cannot be opened, or its file system has no locks.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    deadline = time.monotonic() + RETRY_SECONDS
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except BlockingIOError:
            if time.monotonic() > deadline:
                pid = holder_of(fd)
                os.close(fd)
                raise Locked(pid) from None
            time.sleep(0.02)
        except OSError:
            os.close(fd)
            raise


def holder_of(fd: int) -> int | None:
    """The pid that /proc/locks shows for the flock on a directory (proc_locks(5)).

    None: nobody has it, or a process that is not visible from here.
    """
    status = os.fstat(fd)
    wanted = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            if words[1] == "FLOCK" and words[5] == wanted and int(words[4]) > 0:
                return int(words[4])
    return None
