"""What a service manager is to the daemon: it makes the sockets, and is told of its state."""

import contextlib
import os
import select
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ACTIVATED = str(Path(__file__).parent / "activated.py")


def listening(kind: int, path: Path) -> socket.socket:
    """A unix socket that listens at ``path``."""
    one = socket.socket(socket.AF_UNIX, kind)
    one.bind(str(path))
    one.listen(128)
    return one


class Manager:
    """Sockets as in ``discod.socket``, and the other end of ``NOTIFY_SOCKET``.

    Args:
        directory: For all of them.
        sockets: What to pass instead of the daemon's two.
    """

    def __init__(self, directory: Path, sockets: Sequence[socket.socket] | None = None) -> None:
        self.directory = directory
        if sockets is None:
            sockets = [
                listening(socket.SOCK_SEQPACKET, directory / "attach.sock"),
                listening(socket.SOCK_STREAM, directory / "io.sock"),
            ]
        self._sockets = sockets
        self._notified = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notified.bind(str(directory / "notify.sock"))
        self._notified.settimeout(20)

    def close(self) -> None:
        """Close the sockets; their files stay."""
        for one in (*self._sockets, self._notified):
            one.close()

    @property
    def options(self) -> dict[str, Any]:
        """For ``start_daemon``."""
        fds = [one.fileno() for one in self._sockets]
        return {
            "socket_dir": self.directory,
            "prefix": [sys.executable, ACTIVATED, ",".join(map(str, fds))],
            "pass_fds": fds,
            "env": {"NOTIFY_SOCKET": str(self.directory / "notify.sock")},
        }

    def said(self) -> list[str]:
        """The lines of the next message. Raises ``TimeoutError``."""
        return self._notified.recv(4096).decode().splitlines()

    def silence(self, seconds: float) -> None:
        """Wait so long for a message that has not come by now: ``TimeoutError`` when none does."""
        self._notified.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                self.said()
        self._notified.settimeout(seconds)
        try:
            self.said()
        finally:
            self._notified.settimeout(20)

    def somebody_connects(self) -> None:
        """Until a connection waits in the queue of the attach socket."""
        poll = select.poll()
        poll.register(self._sockets[0], select.POLLIN)
        if not poll.poll(20_000):
            raise TimeoutError("nobody connects")

    def heard(self, line: str) -> None:
        """Until it is told ``line``; what comes before is dropped."""
        while line not in self.said():
            pass


def files(directory: Path) -> dict[str, int]:
    """The sockets' files by their inodes: others in their place would be other sockets."""
    return {name: os.stat(directory / name).st_ino for name in ("attach.sock", "io.sock")}
