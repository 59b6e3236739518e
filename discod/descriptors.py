"""The limit on fds, and how it is divided, so that nothing fails half way for want of one.

Of the limit, a quarter at most is connections to the I/O socket (:mod:`discod.io_connections`), an
eighth is unfinished attaches, and attaches are refused from half of it on. What is left is for
scratch files that are being opened, and for connections that nobody has looked at yet.
"""

import os

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

    @property
    def most_handshakes(self) -> int:
        """Unfinished attaches, which have two fds each."""
        return max(1, min(MOST_HANDSHAKES, self.limit // 16))

    def check(self) -> None:
        """Raise :class:`NoDescriptors` when another client had better not be let in."""
        used = len(os.listdir("/proc/self/fd"))
        if used > self.limit // 2:
            raise NoDescriptors(
                f"{used} of the {self.limit} fds that the daemon may have are in use: no more "
                "clients until others end, or the daemon is started with a higher limit "
                "(ulimit -n, LimitNOFILE=)"
            )
