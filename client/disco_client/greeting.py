"""The attach conversation, from the client's side: find the daemon, agree, hand over the fds.

The steps are those of :mod:`discod.wire.messages`; each failure is an error that says what to do.
What happens on an attached connection is in :mod:`disco_client.link`.
"""

import contextlib
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from disco_client.descriptors import require
from disco_client.errors import (
    AttachRefused,
    DaemonError,
    DaemonLost,
    DaemonNotRunning,
    SocketForbidden,
    UsageError,
    VersionMismatch,
)
from disco_client.trust import check_path, check_peer, describe_refusal
from discod.wire import PROTOCOL_VERSION
from discod.wire.codec import WireError
from discod.wire.fds import receive_message, send_message
from discod.wire.messages import Attach, Attached, GiveUp, Hello, Refused, Welcome
from discod.wire.paths import SocketPathTooLong, socket_paths

HANDSHAKE_SECONDS = 3.0
"""Most time for one attach message; a daemon answers in well under a millisecond."""


def client_version() -> str:
    """The installed distribution's version, for messages alone."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("discod")
    except PackageNotFoundError:
        return "unknown"


class Call:
    """A connection to the daemon on which this process has introduced itself, and no more.

    Args:
        socket_dir: The daemon's socket directory.
        timeout: Seconds that each message may take.

    Raises:
        DaemonNotRunning, SocketForbidden, DaemonLost: As :class:`Greeting`.
    """

    def __init__(self, socket_dir: Path, timeout: float) -> None:
        try:
            self.path, self.io_path = socket_paths(socket_dir)
        except SocketPathTooLong as error:
            raise UsageError(str(error)) from None
        self._timeout = timeout
        self._lifeline = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            self._lifeline.settimeout(timeout)
            self._connect()
            hello = Hello(protocol=PROTOCOL_VERSION, version=client_version())
            send_message(self._lifeline, hello)
        except BaseException as error:
            self._fail(error)
            raise

    def give_up(self, scratch_fds: Sequence[int]) -> None:
        """Say that a client that had these files will not come back, and hang up.

        The daemon reads it when it can, though it be stopped now. It may be dead as well: it is not
        waited for, and nothing is raised.
        """
        with self._lifeline, contextlib.suppress(OSError):
            # What it says meanwhile would be unread at the close, which then takes ours with it.
            self._lifeline.shutdown(socket.SHUT_RD)
            send_message(self._lifeline, GiveUp(), scratch_fds)
            while self._lifeline.recv(1 << 16):
                pass

    def close(self) -> None:
        """Hang up instead of attaching."""
        self._lifeline.close()

    def _fail(self, error: BaseException) -> None:
        """Hang up; an error of the connection is raised as what it means."""
        self._lifeline.close()
        if isinstance(error, OSError) and not isinstance(error, DaemonError):
            raise self._silent(error) from error

    def _connect(self) -> None:
        try:
            owner = check_path(self.path)
            self._lifeline.connect(str(self.path))
            check_peer(self._lifeline, self.path, owner)
        except SocketForbidden:
            raise
        except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError) as error:
            raise DaemonNotRunning(
                f"no discod daemon listens on {self.path} ({error.strerror}): nothing can be "
                "offloaded. Start one with 'discod --scratch DIR --socket-dir "
                f"{self.path.parent}', or let this process start one with "
                "connect(scratch=DIR) or DISCOD_SCRATCH=DIR"
            ) from None
        except PermissionError:
            raise SocketForbidden(
                f"no permission for socket {self.path} (uid {os.geteuid()}): "
                f"{describe_refusal(self.path)}. Run the trainer as the daemon's user, start the "
                "daemon with --allow-group and a group that this user is in, or start a daemon of "
                "your own with connect(scratch=DIR)"
            ) from None

    def _silent(self, error: BaseException) -> DaemonLost:
        return DaemonLost(
            f"the daemon on {self.path} did not complete the attach within "
            f"{self._timeout:g} s ({error}); see its log, and 'discod status'"
        )


class Greeting(Call):
    """An open lifeline on which the daemon has introduced itself, not yet attached.

    Args:
        socket_dir: The daemon's socket directory.
        timeout: Seconds that each message of the daemon may take.

    Raises:
        DaemonNotRunning: Nothing listens there.
        SocketForbidden: The socket's mode or owner keeps this process out.
        VersionMismatch: Another protocol version.
        AttachRefused: The daemon refuses this user, or is shutting down.
        DaemonLost: It listens but does not answer.
        NoDescriptors: It was not asked: there are too few fds left for what comes of it.
    """

    def __init__(self, socket_dir: Path, timeout: float = HANDSHAKE_SECONDS) -> None:
        require()
        super().__init__(socket_dir, timeout)
        try:
            self.welcome = self._receive_welcome()
        except BaseException as error:
            self._fail(error)
            raise

    def attach(
        self, arena_fd: int, arena_bytes: int, scratch_fds: Sequence[int]
    ) -> tuple[socket.socket, bytes, list[int]]:
        """Attach, or resume when ``scratch_fds`` are given: lifeline, identity, scratch fds.

        The scratch fds returned are new ones of the daemon's files, or those given.
        """
        attach = Attach(
            arena_bytes=arena_bytes,
            rank=_rank(),
            command=" ".join(sys.argv)[:200],
            resume=bool(scratch_fds),
        )
        try:
            if not scratch_fds:
                require(len(self.welcome.directories))
            send_message(self._lifeline, attach, [arena_fd, *scratch_fds])
            reply, fds = receive_message(self._lifeline, Attached, Refused)
        except (OSError, WireError) as error:
            self._lifeline.close()
            raise self._silent(error) from error
        except BaseException:
            self._lifeline.close()
            raise
        if isinstance(reply, Refused):
            self._lifeline.close()
            raise AttachRefused(reply.text)
        self._lifeline.setblocking(False)
        return self._lifeline, reply.identity, fds or list(scratch_fds)

    def _receive_welcome(self) -> Welcome:
        try:
            reply, _ = receive_message(self._lifeline, Welcome, Refused)
        except WireError as error:
            raise VersionMismatch(
                f"the daemon on {self.path} does not speak protocol {PROTOCOL_VERSION} ({error}); "
                f"run the same version of discod on both sides (this is {client_version()})"
            ) from error
        if isinstance(reply, Refused):
            raise AttachRefused(reply.text)
        if reply.protocol != PROTOCOL_VERSION:
            raise VersionMismatch(
                f"the daemon on {self.path} is discod {reply.version} with protocol "
                f"{reply.protocol}, this client is {client_version()} with protocol "
                f"{PROTOCOL_VERSION}; run the same version on both sides"
            )
        return reply


def _rank() -> int:
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() and len(rank) < 10 else -1
