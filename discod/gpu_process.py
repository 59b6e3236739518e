"""A process for a GPU as the daemon sees it: started, spoken to without waiting, killed, reaped.

What is said is in :mod:`discod.gpu_messages`; what it is for, in :mod:`discod.gpus`.
"""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence

from discod.gpu_messages import ToDaemon, ToProcess, receive_in_daemon, send
from discod.loop import Loop
from discod.wire.codec import WireError

MESSAGES_PER_ROUND = 256
"""Then the loop looks after others."""

_log = logging.getLogger(__name__)


class GpuProcess:
    """One process.

    Args:
        loop: The event loop, in whose thread this is made: the process ends with that thread.
        uuid: The GPU's.
        received: Called with each message of it.
        ended: Called once, when it has ended and all that it said was received; with how it ended.

    Raises:
        OSError: It cannot be started.
    """

    def __init__(
        self,
        loop: Loop,
        uuid: bytes,
        received: Callable[[ToDaemon], None],
        ended: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._received = received
        self._ended = ended
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.setblocking(False)
        fd = theirs.fileno()
        command = [sys.executable, "-m", "discod.gpu", str(fd), uuid.hex(), str(os.getpid())]
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, pass_fds=[fd], close_fds=True
                )
            self._pidfd = self._open_pidfd()
        except OSError:
            self._connection.close()
            raise
        self.pid = self._process.pid
        loop.add_reader(self._connection.fileno(), self._readable)
        loop.add_reader(self._pidfd, self._exited)
        self._listening = True

    def send(self, message: ToProcess, fds: Sequence[int] = ()) -> bool:
        """Send; False when there is no room now, or it is about to end."""
        try:
            send(self._connection, message, fds)
        except OSError:
            return False
        return True

    def kill(self) -> None:
        """End it with SIGKILL; ``ended`` is called when the kernel has taken it down."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _open_pidfd(self) -> int:
        try:
            return os.pidfd_open(self._process.pid)
        except OSError:
            self._process.kill()
            self._process.wait()
            raise

    def _readable(self) -> None:
        for _ in range(MESSAGES_PER_ROUND):
            if not self._receive():
                return

    def _receive(self) -> bool:
        """Receive one message; False when there is none now, or never will be."""
        if not self._listening:
            return False
        try:
            message = receive_in_daemon(self._connection)
        except BlockingIOError:
            return False
        except (OSError, WireError) as error:
            if isinstance(error, WireError):
                _log.error("the process of a GPU (pid %d) broke the protocol: %s", self.pid, error)
            self._stop_listening()
            self.kill()
            return False
        self._received(message)
        return True

    def _stop_listening(self) -> None:
        if self._listening:
            self._listening = False
            self._loop.remove_reader(self._connection.fileno())

    def _exited(self) -> None:
        while self._receive():
            pass
        self._stop_listening()
        self._loop.remove_reader(self._pidfd)
        code = self._process.wait()
        self._connection.close()
        os.close(self._pidfd)
        self._ended(signal.strsignal(-code) or f"signal {-code}" if code < 0 else f"exit {code}")
