"""The limit on fds, and how it is divided, so that nothing fails half way for want of one.

``UNSEEN`` of them are left for I/O connections that libzmq has accepted and nobody has looked at
yet (:mod:`discod.io_connections`). Of the others at most a quarter is I/O connections, an eighth is
unfinished attaches, and attaches are refused once half is in use; the last eighth is for scratch
files that are being opened, and the like.
"""

import os

UNSEEN = 1100
"""More than libzmq's queue of events: what a flood of connections can take before it has to
wait."""

LEAST_LIMIT = 1536
"""Below it a flood of connections to the I/O socket can end the daemon."""

MOST_HANDSHAKES = 256


class NoDescriptors(Exception):
    """So many fds are open that another client might not get all of its own."""


class Descriptors:
    """The process's limit on fds.

    Args:
        limit: ``RLIMIT_NOFILE``.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._usable = limit - (UNSEEN if self.enough else limit // 4)

    @property
    def enough(self) -> bool:
        """Whether no flood of connections can use them all up."""
        return self.limit >= LEAST_LIMIT

    @property
    def most_handshakes(self) -> int:
        """Unfinished attaches, which have two fds each."""
        return max(1, min(MOST_HANDSHAKES, self._usable // 16))

    @property
    def most_io_connections(self) -> int:
        return self._usable // 4

    def check(self) -> None:
        """Raise :class:`NoDescriptors` when another client had better not be let in."""
        used = len(os.listdir("/proc/self/fd"))
        if used > self._usable // 2:
            raise NoDescriptors(
                f"{used} of the {self.limit} fds that the daemon may have are in use, and half of "
                "them are kept for what may come: no more clients until others end, or the daemon "
                "is started with a higher limit (ulimit -n, LimitNOFILE=)"
            )
