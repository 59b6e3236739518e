"""Messages with fds over a SOCK_SEQPACKET socket: whole, in order, and no fd is ever leaked."""

import os
import socket
from collections.abc import Iterator

import pytest

from discod.wire.codec import MAX_MESSAGE_BYTES, WireError, encode
from discod.wire.fds import MAX_FDS, receive_message, send_message
from discod.wire.messages import Attach, Hello, Ping

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Two connected sockets; the test fails when fds are left open by it."""
    before = set(os.listdir("/proc/self/fd"))
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with left, right:
        yield left, right
    assert set(os.listdir("/proc/self/fd")) == before


def test_message_and_fds(pair: Pair) -> None:
    """The fds would not arrive, or not in order, or would leak into child processes."""
    fds = [os.memfd_create(f"test-{i}") for i in range(MAX_FDS)]
    send_message(pair[0], Attach(4096, 3, "x", True), fds)
    message, received = receive_message(pair[1], Attach)
    assert message == Attach(4096, 3, "x", True)
    assert [os.fstat(fd).st_ino for fd in received] == [os.fstat(fd).st_ino for fd in fds]
    assert not any(os.get_inheritable(fd) for fd in received)
    for fd in (*fds, *received):
        os.close(fd)


def test_end_of_the_peer(pair: Pair) -> None:
    """A peer that has gone would look like one that sent an empty message."""
    pair[0].shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionResetError):
        receive_message(pair[1], Hello)


@pytest.mark.parametrize("data", [b"garbage", encode(Ping(1, 1))])
def test_fds_of_a_bad_packet_are_closed(pair: Pair, data: bytes) -> None:
    """A hostile client could use up all of the daemon's fds."""
    fd = os.memfd_create("test")
    socket.send_fds(pair[0], [data], [fd, fd])
    os.close(fd)
    with pytest.raises(WireError):
        receive_message(pair[1], Hello)


def test_too_many_fds(pair: Pair) -> None:
    """Fds beyond the limit would be dropped in silence."""
    fd = os.memfd_create("test")
    socket.send_fds(pair[0], [encode(Hello(1, "x"))], [fd] * (MAX_FDS + 10))
    os.close(fd)
    with pytest.raises(WireError, match="truncated"):
        receive_message(pair[1], Hello)


def test_too_large_a_packet(pair: Pair) -> None:
    """The rest of a packet would be cut off in silence."""
    pair[0].send(bytes(MAX_MESSAGE_BYTES + 2))
    with pytest.raises(WireError, match="truncated"):
        receive_message(pair[1], Hello)


def test_nothing_there(pair: Pair) -> None:
    """The daemon's event loop would wait for a client."""
    pair[1].setblocking(False)
    with pytest.raises(BlockingIOError):
        receive_message(pair[1], Hello)
