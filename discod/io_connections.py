"""Who may hold connections to the I/O socket, and how many: libzmq accepts whatever comes.

Why this must be
----------------
libzmq 4.3.5 aborts the process when accept(2) on a unix socket fails with EMFILE
(ipc_listener.cpp), and it has no limit on connections. So every connection that it accepts is
looked at here, at once, and those without an attached client behind them are shut down (not closed:
the fd is libzmq's, which sees the end of its peer and closes it).

Why it holds: libzmq tells of each connection that it accepts through a queue of some 1,000 events,
and its thread waits while that queue is full. So it is never more than these ahead of the loop,
which takes from the queue in each of its rounds, and so many fds are kept free
(:mod:`discod.descriptors`).

ZeroMQ itself is known to :mod:`discod.router` alone.
"""

import contextlib
import logging
import os
import socket
import struct
from collections import Counter
from collections.abc import Callable

from discod.logs import RateLimited

SPARE = 4
"""Connections of a process beyond two for each client: of one that is just coming back."""

_warnings = RateLimited(logging.getLogger(__name__))

Owner = tuple[int, int]
"""A peer's pid and uid, as the kernel says. The pid is 0 in another pid namespace."""


class IoConnections:
    """The connections that libzmq has accepted, by their process.

    Args:
        clients: How many clients are attached that are this process's.
        most: Connections of all processes.
    """

    def __init__(self, clients: Callable[[Owner], int], most: int) -> None:
        self._clients = clients
        self._most = most
        self._owners: dict[int, Owner] = {}
        self._counts: Counter[Owner] = Counter()

    def __len__(self) -> int:
        return len(self._owners)

    def accepted(self, fd: int) -> None:
        """libzmq has accepted a connection with this number; it may have closed it again."""
        self.ended(fd)  # were its end not told
        owner = _owner(fd)
        if owner is None:
            return
        clients = self._clients(owner)
        allowed = 2 * clients + SPARE if clients else 0
        if self._counts[owner] >= allowed or len(self._owners) >= self._most:
            _warnings.warning(
                "I/O connection of pid %d (uid %d) dropped: it has %d of the %d that its %d "
                "clients may have, all have %d of %d",
                *(*owner, self._counts[owner], allowed, clients, len(self._owners), self._most),
            )
            _shut_down(fd, owner)
            if not self._counts[owner]:
                del self._counts[owner]
            return
        self._owners[fd] = owner
        self._counts[owner] += 1

    def ended(self, fd: int) -> None:
        """libzmq closes the connection with this number, if it is one that was let be."""
        owner = self._owners.pop(fd, None)
        if owner is not None:
            self._counts[owner] -= 1
            if not self._counts[owner]:
                del self._counts[owner]

    def client_gone(self, owner: Owner) -> None:
        """A client has ended: without another one its process has no business here any more."""
        if self._counts[owner] and not self._clients(owner):
            for fd in [fd for fd, other in self._owners.items() if other == owner]:
                _shut_down(fd, owner)


def _owner(fd: int) -> Owner | None:
    """Who connected; None when the fd is no such connection any more."""
    try:
        connection = socket.socket(fileno=fd)
    except OSError:
        return None
    try:
        return _peer(connection)
    finally:
        connection.detach()


def _peer(connection: socket.socket) -> Owner | None:
    with contextlib.suppress(OSError):
        if (connection.family, connection.type) == (socket.AF_UNIX, socket.SOCK_STREAM):
            size = struct.calcsize("3i")
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
            pid, uid, _ = struct.unpack("3i", credentials)
            return pid, uid
    return None


def _shut_down(fd: int, owner: Owner) -> None:
    """Shut the connection down if it still is that peer's; libzmq may close it meanwhile."""
    if _owner(fd) != owner:
        return
    with contextlib.suppress(OSError):
        connection = socket.socket(fileno=os.dup(fd))
        try:
            if _peer(connection) == owner:
                connection.shutdown(socket.SHUT_RDWR)
        finally:
            connection.close()
