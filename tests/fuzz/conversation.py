"""The attach conversation under any packets: it ends, it answers, and no fd is left."""

import array
import contextlib
import logging
import os
import socket
from collections.abc import Callable
from typing import Any, cast

from discod.attach import Handshake, Peer
from discod.closer import Closer
from discod.loop import Loop
from discod.permits import Permits
from discod.wire import PROTOCOL_VERSION
from discod.wire.codec import encode
from discod.wire.messages import (
    Attach,
    GiveUp,
    Hello,
    Message,
    Ping,
    Records,
    StatusRequest,
    TraceReply,
    TraceRequest,
    Welcome,
)
from tests.fuzz.source import Source

MESSAGES: tuple[Message, ...] = (
    Hello(PROTOCOL_VERSION, "x"),
    Hello(PROTOCOL_VERSION + 1, "x"),
    Attach(4096, 0, "x", False),
    Attach(-1, -1, "", True),
    StatusRequest(),
    GiveUp(),
    Ping(1, 1),
    TraceRequest(0, 0),
    TraceRequest(1 << 40, -1),
)
PACKETS = tuple(map(encode, MESSAGES))
MOST_PACKETS = 6


class StillLoop:
    """In place of the event loop: what is readable, the target calls by itself."""

    def __init__(self) -> None:
        self.readers: dict[int, Callable[[], None]] = {}

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Any:
        return self

    def cancel(self) -> None:
        """As of a timer."""

    def add_reader(self, fd: int, callback: Callable[[], None]) -> None:
        self.readers[fd] = callback

    def remove_reader(self, fd: int) -> None:
        del self.readers[fd]


class Server:
    """In place of the daemon: it refuses some, and lets others wait."""

    permits = Permits()
    closer = Closer()

    def __init__(self, decide: bool) -> None:
        self.decide = decide
        self.attaches = 0

    def welcome(self) -> Welcome:
        return Welcome(PROTOCOL_VERSION, "x", 1, 1, 1, 1, 1, ("/s",))

    def status(self) -> str:
        return "{}"

    def give_up(self, peer: Peer, fds: list[int]) -> None:
        """Nobody has anything."""
        for fd in fds:
            os.close(fd)

    def trace(self, request: TraceRequest) -> TraceReply:
        return TraceReply(0, 0, Records(b""), ("/s",), 1)

    def attach(self, handshake: Handshake, attach: Attach, fds: list[int]) -> None:
        self.attaches += 1
        for fd in fds:
            os.close(fd)
        if self.decide:
            handshake.refuse("no")


def packets(data: bytes) -> None:
    """Send what ``data`` says, with fds, and see that the conversation keeps to its steps."""
    source = Source(data)
    logging.disable()
    first_free = os.dup(0)
    os.close(first_free)
    loop, server = StillLoop(), Server(decide=bool(source.number() % 2))
    client, accepted = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    memfd = os.memfd_create("fuzz")
    ended: list[Handshake] = []
    try:
        client.setblocking(False)
        handshake = Handshake(cast(Loop, loop), server, accepted, ended.append)
        for _ in range(MOST_PACKETS):
            if source.ended or not handshake.open:
                break
            send(client, source, memfd)
            loop.readers[accepted.fileno()]()
            assert handshake.open == (not ended)
            assert server.attaches <= 1
        client.close()
        for _ in range(MOST_PACKETS + 1):
            if handshake.open:
                loop.readers[accepted.fileno()]()
        assert not handshake.open, "it outlives its client"
        assert ended == [handshake]
        assert not loop.readers
    finally:
        client.close()
        accepted.close()
        os.close(memfd)
        logging.disable(logging.NOTSET)
    after = os.dup(0)
    os.close(after)
    assert after == first_free, "an fd is left"


def send(client: socket.socket, source: Source, memfd: int) -> None:
    """One packet: a message, one that is cut short or has other bytes, or garbage."""
    kind = source.number()
    packet = source.block() if kind % 8 == 7 else PACKETS[kind % len(PACKETS)]
    change = source.number()
    if change % 4 == 1:
        packet = packet[: change // 4] or b"\0"
    elif change % 4 == 2:
        at = source.number() % (len(packet) + 1)
        packet = packet[:at] + source.take(2) + packet[at + 1 :]
    fds = array.array("i", [memfd] * (source.number() % 4))
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds.tobytes())] if fds else []
    with contextlib.suppress(OSError):
        client.sendmsg([packet or b"\0"], rights)
