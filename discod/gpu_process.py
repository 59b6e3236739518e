"""A process for a GPU as the daemon sees it: started, spoken to without waiting, killed, reaped.

It is killed when it is silent for too long, although it is probed. What is said is in
:mod:`discod.gpu_messages`; what it is for, in :mod:`discod.gpu_host`.
"""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence

from discod.gpu_messages import (
    PROBE_TICKET,
    Ended,
    Probe,
    Ready,
    ToProcess,
    receive_in_daemon,
    send,
)
from discod.loop import Loop
from discod.wire.codec import WireError

MESSAGES_PER_ROUND = 256
"""Then the loop looks after others."""

TICK_SECONDS = 1.0
STUCK_TICKS = 10
"""Ticks in which it says nothing. The calls of a process that is well take up to a second, when
they pin memory; a driver that is resetting a GPU, or has lost it, may never return from one. Ticks
are counted, not seconds: a daemon that was stopped blames nobody for the time."""
START_TICKS = 60
"""Until it is ready: the driver starts within some seconds even on nodes with many GPUs."""

_log = logging.getLogger(__name__)


class GpuProcess:
    """One process.

    Args:
        loop: The event loop, in whose thread this is made: the process ends with that thread.
        uuid: The GPU's.
        name: The GPU's for people.
        ready: Called once it has the GPU, or with why it cannot have it; then it ends.
        answered: Called with each answer to a request.
        ended: Called once, when it has ended and all that it said was received; with how it ended.

    Raises:
        OSError: It cannot be started.
    """

    def __init__(
        self,
        loop: Loop,
        uuid: bytes,
        name: str,
        ready: Callable[[str], None],
        answered: Callable[[Ended], None],
        ended: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._name = name
        self._ready = ready
        self._answered = answered
        self._ended = ended
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.setblocking(False)
        fd = theirs.fileno()
        # The daemon's own modules: -m alone would look into the working directory first.
        command = [sys.executable, "-P", "-m", "discod.gpu", str(fd), uuid.hex(), str(os.getpid())]
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    pass_fds=[fd],
                    close_fds=True,
                    env=os.environ | {"PYTHONPATH": path},
                )
            self._pidfd = self._open_pidfd()
        except OSError:
            self._connection.close()
            raise
        self.pid = self._process.pid
        loop.add_reader(self._connection.fileno(), self._readable)
        loop.add_reader(self._pidfd, self._exited)
        self._listening = True
        self._silent_ticks = 0
        self._is_ready = False
        self._timer = loop.call_later(TICK_SECONDS, self._tick)

    def send(self, message: ToProcess, fds: Sequence[int] = ()) -> bool:
        """Send; False when there is no room now, or it is about to end."""
        try:
            send(self._connection, message, fds)
        except OSError:
            return False
        return True

    def kill(self, reason: str = "") -> None:
        """End it with SIGKILL; ``ended`` is called when the kernel has taken it down.

        ``reason``: What is wrong with it, for the log.
        """
        if reason:
            _log.warning("the process of %s (pid %d) is killed: %s", self._name, self.pid, reason)
        with contextlib.suppress(ProcessLookupError):  # it has ended, and is about to be reaped
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
            self._stop_listening()
            self.kill(f"it broke the protocol: {error}" if isinstance(error, WireError) else "")
            return False
        self._silent_ticks = 0
        self._received(message)
        return True

    def _received(self, message: Ready | Ended) -> None:
        if isinstance(message, Ready):
            self._is_ready = True
            self._ready(message.refusal)
            if message.refusal:
                self.kill()
        elif message.ticket != PROBE_TICKET:
            self._answered(message)

    def _tick(self) -> None:
        self._timer = self._loop.call_later(TICK_SECONDS, self._tick)
        self._silent_ticks += 1
        limit = STUCK_TICKS if self._is_ready else START_TICKS
        if self._silent_ticks > limit:
            self.kill(f"it has not answered for {limit * TICK_SECONDS:.3g} s")
        elif self._is_ready:
            # Where there is no room for a probe, there is something else for it to answer.
            self.send(Probe())

    def _stop_listening(self) -> None:
        if self._listening:
            self._listening = False
            self._loop.remove_reader(self._connection.fileno())

    def _exited(self) -> None:
        while self._receive():
            pass
        self._stop_listening()
        self._timer.cancel()
        self._loop.remove_reader(self._pidfd)
        code = self._process.wait()
        self._connection.close()
        os.close(self._pidfd)
        self._ended(signal.strsignal(-code) or f"signal {-code}" if code < 0 else f"exit {code}")
