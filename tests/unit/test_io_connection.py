"""The client's I/O connection over a real socket: when it may be taken for quiet, and when not."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from disco_client.io_connection import IoConnection
from discod.wire.codec import encode
from discod.wire.messages import Done, Ping
from tests.helpers.daemon import eventually

IDENTITY = bytes(range(16))


class Peer:
    """The daemon's end."""

    def __init__(self, path: Path) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.bind(f"ipc://{path}")

    def take(self) -> None:
        assert self.socket.poll(5000)
        self.socket.recv_multipart()

    def answer(self, seq: int) -> None:
        self.socket.send_multipart([IDENTITY, encode(Done(seq, 1, b""))])

    def close(self) -> None:
        self.socket.close()
        self.context.term()


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    peer = Peer(tmp_path / "io")
    yield peer
    peer.close()


@pytest.fixture
def connection(peer: Peer, tmp_path: Path) -> Iterator[IoConnection]:
    connection = IoConnection(tmp_path / "io", IDENTITY)
    yield connection
    connection.close()


def settle(connection: IoConnection, peer: Peer) -> None:
    """Until it stands, and nothing more comes of that."""
    connection.send(Ping(0, 1))
    peer.take()
    peer.answer(0)
    eventually(lambda: len(connection.received()) == 1)
    eventually(lambda: connection.received() == [] and connection.quiet())


def test_quiet_until_an_answer_comes(connection: IoConnection, peer: Peer) -> None:
    """A call would go on without having seen that a write is done; or look in vain each time."""
    settle(connection, peer)
    peer.answer(1)
    eventually(lambda: not connection.quiet())
    assert [reply.seq for reply in connection.received()] == [1]
    eventually(lambda: connection.received() == [] and connection.quiet())


@pytest.mark.parametrize("sends", [0, 1, 5, 20])
def test_never_quiet_with_an_answer_there(connection: IoConnection, peer: Peer, sends: int) -> None:
    """A send eats the edge that tells of an answer: it would be seen a second later, or never."""
    settle(connection, peer)
    peer.answer(1)
    for seq in range(2, 2 + sends):
        connection.send(Ping(seq, 1))
    assert connection.stirred is (sends > 0)
    seen = []

    def look() -> bool:
        if not connection.quiet():
            seen.extend(connection.received())
        return bool(seen)

    eventually(look)
    assert [reply.seq for reply in seen] == [1]


def test_never_quiet_once_it_broke(connection: IoConnection, peer: Peer) -> None:
    """What was under way is lost; it would be awaited for ever."""
    settle(connection, peer)
    peer.socket.close()
    eventually(lambda: not connection.quiet())
    eventually(lambda: connection.broken)
    assert connection.received() == []
    assert not connection.quiet(), "though the event was taken in"
    assert connection.broken


def test_not_quiet_when_the_lifeline_ends(connection: IoConnection, peer: Peer) -> None:
    """A daemon that is gone would be found out by a call that waits, and by no other."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.watch(ours.fileno())
    settle(connection, peer)
    theirs.close()
    assert not connection.quiet()
    ours.close()


def test_looking_costs_no_fd(connection: IoConnection, peer: Peer) -> None:
    """A look in each call of a training would run out of them."""
    settle(connection, peer)
    fds = len(os.listdir("/proc/self/fd"))
    for _ in range(100):
        assert connection.quiet()
    assert len(os.listdir("/proc/self/fd")) == fds
