"""One message, and the fds beside it, over a ``SOCK_SEQPACKET`` socket.

A packet is sent and received whole. Received fds are close-on-exec, and are closed here when the
packet turns out to be no use.
"""

import array
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, overload

from discod.wire.codec import MAX_MESSAGE_BYTES, WireError, decode, encode
from discod.wire.messages import Message

MAX_FDS = 64
"""Most fds in one packet: the arena and one scratch file per directory."""

Close = Callable[[Iterable[int]], None]

M = TypeVar("M", bound=Message)
N = TypeVar("N", bound=Message)
P = TypeVar("P", bound=Message)
Q = TypeVar("Q", bound=Message)


def close_all(fds: Iterable[int]) -> None:
    """Close them all."""
    for fd in fds:
        os.close(fd)


def send_message(connection: socket.socket, message: Message, fds: Sequence[int] = ()) -> None:
    """Send ``message`` and ``fds`` as one packet. Raises ``OSError`` as ``sendmsg`` does."""
    send_packet(connection, encode(message), fds)


@overload
def receive_message(
    connection: socket.socket, one: type[M], /, *, close: Close = ...
) -> tuple[M, list[int]]: ...
@overload
def receive_message(
    connection: socket.socket, one: type[M], other: type[N], /, *, close: Close = ...
) -> tuple[M | N, list[int]]: ...
@overload
def receive_message(
    connection: socket.socket,
    one: type[M],
    other: type[N],
    third: type[P],
    /,
    *,
    close: Close = ...,
) -> tuple[M | N | P, list[int]]: ...
@overload
def receive_message(
    connection: socket.socket,
    one: type[M],
    other: type[N],
    third: type[P],
    fourth: type[Q],
    /,
    *,
    close: Close = ...,
) -> tuple[M | N | P | Q, list[int]]: ...
def receive_message(
    connection: socket.socket, /, *expected: type[Any], close: Close = close_all
) -> tuple[Any, list[int]]:
    """The next packet's message, of one of the ``expected`` classes, and its fds (now yours).

    Args:
        connection: Where it comes from.
        expected: What it may be.
        close: Closes the fds of a packet that is no use. Of a peer that is not to be trusted, it
            must not wait for that: the file system of a foreign fd may never answer.

    Raises:
        ConnectionResetError: The peer closed the connection.
        WireError: The packet breaks the protocol; its fds are closed.
        OSError: As ``recvmsg`` raises, ``TimeoutError`` and ``BlockingIOError`` among them.
    """
    data, fds = receive_packet(connection, close)
    try:
        return decode(data, *expected), fds
    except WireError:
        close(fds)
        raise


def receive_alone(connection: socket.socket, one: type[M]) -> M:
    """As :func:`receive_message`, for a message without fds: the kernel drops those that are
    there."""
    data, _, flags, _ = connection.recvmsg(MAX_MESSAGE_BYTES + 1)
    if not data:
        raise ConnectionResetError("the peer closed the connection")
    if flags & socket.MSG_TRUNC:
        raise WireError("packet truncated")
    return decode(data, one)


def send_packet(connection: socket.socket, data: bytes, fds: Sequence[int] = ()) -> None:
    """Send ``data`` and ``fds`` as one packet. Raises ``OSError`` as ``sendmsg`` does."""
    ancillary = []
    if fds:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds).tobytes())]
    connection.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)


def receive_packet(connection: socket.socket, close: Close = close_all) -> tuple[bytes, list[int]]:
    """The next packet and its fds (now yours). Raises as :func:`receive_message` does."""
    space = socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize)
    data, ancillary, flags, _ = connection.recvmsg(
        MAX_MESSAGE_BYTES + 1, space, socket.MSG_CMSG_CLOEXEC
    )
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    try:
        if not data:
            raise ConnectionResetError("the peer closed the connection")
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise WireError("packet or fds truncated")
    except (ConnectionResetError, WireError):
        close(fds)
        raise
    return data, list(fds)
