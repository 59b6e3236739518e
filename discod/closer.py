"""Lets go of fds that clients sent, without ever waiting for the file systems that they are on.

close(2) of a file on FUSE or a dead NFS server asks that server, and may never return. So does
fstat(2). Fds that cannot ask anybody are closed at once: memfds, and ``O_PATH`` fds, which have no
file operations. All others are closed in a thread, one for each user, that may hang without harm to
anybody else. A user whose fds do not close is refused before he can send more of them: all that can
hang is that one thread, with ``MOST_PENDING`` fds and those of one packet.
"""

import fcntl
import logging
import os
import queue
import threading
from collections.abc import Iterable

from discod.syscalls import is_memfd

MOST_PENDING = 64
"""Fds of a user that are to be closed; the next one who brings some is refused until there are
less."""

_log = logging.getLogger(__name__)


class Closer:
    """Closes foreign fds. Not thread-safe: for the event loop alone."""

    def __init__(self) -> None:
        self._threads: dict[int, _Thread] = {}

    def close(self, fds: Iterable[int], uid: int) -> None:
        """Close fds that came from a process of this user, now or as soon as possible."""
        for fd in fds:
            if cannot_hang(fd):
                os.close(fd)
            else:
                self._thread(uid).close(fd)

    def overdue(self, uid: int) -> bool:
        """Whether this user must not hand over any more fds for now."""
        thread = self._threads.get(uid)
        return thread is not None and thread.pending >= MOST_PENDING

    def _thread(self, uid: int) -> "_Thread":
        thread = self._threads.get(uid)
        if thread is None:
            thread = self._threads[uid] = _Thread(uid)
        return thread


def cannot_hang(fd: int) -> bool:
    """Whether neither close(2) nor fstat(2) of it asks anybody but this kernel."""
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_PATH) or is_memfd(fd)


class _Thread:
    """One user's, for as long as the process lives: users are few, and it sleeps."""

    def __init__(self, uid: int) -> None:
        self._queue: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._closed = 0
        self._given = 0
        threading.Thread(target=self._serve, name=f"close-{uid}", daemon=True).start()

    @property
    def pending(self) -> int:
        return self._given - self._closed

    def close(self, fd: int) -> None:
        self._given += 1
        self._queue.put(fd)

    def _serve(self) -> None:
        while True:
            fd = self._queue.get()
            try:
                os.close(fd)
            except OSError as error:  # what a file system has to say about a file that is not ours
                _log.debug("close of a foreign fd: %s", error)
            self._closed += 1
