"""Whether this process may open as many fds as an attachment needs, seen before it needs them.

libzmq ends the process when it can make no epoll instance for its threads. It is not asked, then.
Another thread may still open the last ones in the moment between the look and the use.
"""

import errno
import os
import resource
import select

from disco_client.errors import NoDescriptors

NEEDED = 24
"""libzmq takes 6 once and 9 for a connection, and closes those of one before some time after it was
left; the lifeline, the arena and the wake-up are one each. The rest is for what other threads do
meanwhile."""


def require(files: int = 0) -> None:
    """See that there are fds for an attachment with so many scratch files.

    Raises:
        NoDescriptors: There are not; none is taken.
    """
    needed = NEEDED + files
    probes: list[select.epoll] = []  # which are closed when they are collected, come what may
    try:
        for _ in range(needed):
            probes.append(select.epoll())
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        free = len(probes)
        probes.clear()
        raise NoDescriptors(_text(needed, free, error)) from None


def _text(needed: int, free: int, error: OSError) -> str:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fact = f"attaching to the daemon takes {needed} file descriptors, and "
    if error.errno == errno.ENFILE:
        return (
            f"{fact}the node has only {free} left (fs.file-max), so it was not tried. End what "
            "holds so many, or raise that limit"
        )
    # Listing them takes one more.
    used = len(os.listdir("/proc/self/fd")) - 1 if free else soft
    return (
        f"{fact}this process may open only {free} more ({used} are open; its limit is {soft}, and "
        f"may be raised to {hard}), so it was not tried. Raise it with 'ulimit -n', or "
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({hard}, {hard})), or close some"
    )
