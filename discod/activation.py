"""Sockets that the service manager has made and passed on: sd_listen_fds(3) without libsystemd.

They outlive the daemon: a client that connects while it restarts waits in the socket's queue for
the next one. So a daemon that was given them neither makes, nor changes, nor removes their files.
"""

import contextlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from discod.exits import Exit, StartupError
from discod.wire.paths import ATTACH_SOCKET, IO_SOCKET

FIRST_FD = 3
"""Of those that are passed (sd_listen_fds(3))."""


@dataclass(frozen=True, slots=True)
class Passed:
    """The two sockets, listening.

    Attributes:
        directory: Where both are.
        attach: For attaches.
        io: For ZeroMQ, which takes it by its fd.
    """

    directory: Path
    attach: socket.socket
    io: socket.socket


def passed_sockets() -> Passed | None:
    """What was passed to this process; None: nothing was.

    The variables that tell of it are removed: it is of this process only, not of its children.

    Raises:
        StartupError: It is not the daemon's two sockets.
    """
    count, pid = os.environ.pop("LISTEN_FDS", ""), os.environ.pop("LISTEN_PID", "")
    os.environ.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()) or not count.isdecimal() or count == "0":
        return None
    found: dict[str, socket.socket] = {}
    directories = set()
    for fd in range(FIRST_FD, FIRST_FD + int(count)):
        one = _listening(fd)
        path = Path(one.getsockname())
        found[path.name] = one
        directories.add(path.parent)
    kinds = {ATTACH_SOCKET: socket.SOCK_SEQPACKET, IO_SOCKET: socket.SOCK_STREAM}
    if {name: one.type for name, one in found.items()} != kinds or len(directories) != 1:
        names = ", ".join(sorted(str(one.getsockname()) for one in found.values()))
        raise _unusable(
            f"they are {names}, and not ListenSequentialPacket=DIR/{ATTACH_SOCKET} with "
            f"ListenStream=DIR/{IO_SOCKET}"
        )
    return Passed(directories.pop(), found[ATTACH_SOCKET], found[IO_SOCKET])


def _listening(fd: int) -> socket.socket:
    """The unix socket that listens on ``fd``; it will not be blocking, nor inherited."""
    try:
        one = socket.socket(fileno=fd)
    except OSError as error:
        raise _unusable(f"fd {fd} is no socket ({error.strerror})") from error
    with contextlib.suppress(OSError):
        if one.family == socket.AF_UNIX and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            one.setblocking(False)
            os.set_inheritable(fd, False)
            if one.getsockname():
                return one
    raise _unusable(f"fd {fd} is no unix socket that listens at a path")


def _unusable(why: str) -> StartupError:
    return StartupError(
        Exit.ACTIVATION_UNUSABLE,
        f"the sockets that were passed to this process (LISTEN_FDS) cannot be used: {why}; not "
        "started; use discod.socket as it is delivered, or start discod without passing sockets",
    )
