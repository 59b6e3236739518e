"""A conversation with the daemon that ends without an attach, for the commands that ask it."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

from discod import __version__
from discod.wire import PROTOCOL_VERSION
from discod.wire.fds import receive_message, send_message
from discod.wire.messages import Hello, Refused, Welcome
from discod.wire.paths import socket_paths

TIMEOUT_SECONDS = 3.0
"""A daemon answers in a millisecond; a frozen one must not freeze the command."""


class NoAnswer(Exception):
    """There is no answer to be had; the text says why."""


class NotListening(NoAnswer):
    """No daemon listens there."""


class DaemonRefuses(NoAnswer):
    """A daemon is there, and refuses to talk."""


@contextlib.contextmanager
def conversation(
    socket_dir: Path, what: str, timeout: float = TIMEOUT_SECONDS
) -> Iterator[tuple[socket.socket, Welcome]]:
    """A connection to the daemon on which it has said who it is.

    Args:
        socket_dir: The daemon's.
        what: What is asked for, for the text of errors.
        timeout: Of each packet, in seconds.

    Raises:
        NoAnswer: None listens there, it refuses, or what is done in the block fails with an
            ``OSError`` or breaks the protocol.
        SocketPathTooLong: The socket's path is over the limit.
    """
    path, _ = socket_paths(socket_dir)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(timeout)
            connection.connect(str(path))
            send_message(connection, Hello(PROTOCOL_VERSION, __version__))
            greeting, _ = receive_message(connection, Welcome, Refused)
            if isinstance(greeting, Refused):
                raise DaemonRefuses(f"the daemon on {path} refuses: {greeting.text}")
            yield connection, greeting
    except (FileNotFoundError, ConnectionRefusedError) as error:
        raise NotListening(
            f"no discod daemon listens on {path} ({error.strerror}); start one with "
            f"'discod --scratch DIR --socket-dir {path.parent}'"
        ) from error
    except (OSError, ValueError) as error:
        raise NoAnswer(f"the daemon on {path} gives no {what}: {error}") from error
