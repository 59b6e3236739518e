"""A hostile process: ``python -m tests.helpers.crowd KIND SOCKET_DIR COUNT``.

It does its worst, prints ``done``, and holds what it has until its standard input is closed. It
imports little, so that it is there at once.
"""

import contextlib
import resource
import socket
import sys
import time
from pathlib import Path


def io_connects(directory: Path, count: int) -> list[object]:
    """Connections to the I/O socket that say nothing."""
    held: list[object] = []
    for _ in range(count):
        connection = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(OSError):
            connection.connect(str(directory / "io.sock"))
        held.append(connection)
    return held


def attached_io_connects(directory: Path, count: int) -> list[object]:
    """As :func:`io_connects`, by a process that is attached."""
    from tests.helpers.raw_client import MIB, RawClient

    return [RawClient(directory, MIB), *io_connects(directory, count)]


def dealers(directory: Path, count: int) -> list[object]:
    """ZeroMQ peers whose identities are no client's, each with a message that is none."""
    import os

    import zmq

    from tests.helpers.raw_client import MIB, RawClient

    client = RawClient(directory, MIB)
    held: list[object] = [client]
    for _ in range(count):
        dealer = client.context.socket(zmq.DEALER)
        dealer.set(zmq.IDENTITY, b"\x01" + os.urandom(15))
        dealer.connect(f"ipc://{directory / 'io.sock'}")
        dealer.send(b"garbage", zmq.DONTWAIT)
        held.append(dealer)
    return held


def silent_attaches(directory: Path, count: int) -> list[object]:
    """Connections to the attach socket that say nothing, and are made again when they are
    dropped."""
    held: list[object] = []
    for _ in range(count):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.suppress(OSError):
            connection.connect(str(directory / "attach.sock"))
        held.append(connection)
    return held


def half_said(directory: Path, count: int) -> list[object]:
    """Conversations that stop after the greeting, or in the midst of it."""
    from discod.wire import PROTOCOL_VERSION
    from discod.wire.codec import encode
    from discod.wire.messages import Attach, Hello

    hello, attach = encode(Hello(PROTOCOL_VERSION, "x")), encode(Attach(4096, 0, "x", False))
    held = silent_attaches(directory, count)
    for number, connection in enumerate(held):
        if isinstance(connection, socket.socket):
            with contextlib.suppress(OSError):
                connection.send(hello[: len(hello) // (1 + number % 2)])
                if number % 3 == 0:
                    connection.send(attach)
    return held


def storm(directory: Path, count: int) -> list[object]:
    """Connections to both sockets that are closed at once."""
    for _ in range(count // 2):
        for name, kind in (("attach.sock", socket.SOCK_SEQPACKET), ("io.sock", socket.SOCK_STREAM)):
            with socket.socket(socket.AF_UNIX, kind) as connection, contextlib.suppress(OSError):
                connection.connect(str(directory / name))
    return []


def flood(directory: Path, count: int) -> list[object]:
    """Attached: as many writes as may be unanswered, and pings without end, for ``count`` ms."""
    from discod.wire.codec import encode
    from discod.wire.messages import Ping, Write
    from tests.helpers.raw_client import MIB, RawClient

    client = RawClient(directory, 16 * MIB)
    for _ in range(32_768):
        client.send(Write, file=0, offset=0, slot=0, length=4 * MIB)
    strangers = [client.connect(directory, bytes([1, number]) * 8) for number in range(3)]
    ping = encode(Ping(1 << 40, client.welcome.epoch))
    print("begun", flush=True)
    end = time.monotonic() + count / 1000
    while time.monotonic() < end:
        for _ in range(100):
            client.dealer.send(ping)
            for stranger in strangers:
                stranger.send(ping)
        while client.dealer.poll(0):
            client.dealer.recv()
    return [client, *strangers]


KINDS = {
    function.__name__: function
    for function in (
        *(io_connects, attached_io_connects, dealers, silent_attaches, half_said, storm),
        flood,
    )
}


def main() -> None:
    kind, directory, count = sys.argv[1:]
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    held = KINDS[kind](Path(directory), int(count))
    print("done", flush=True)
    sys.stdin.read()
    del held


if __name__ == "__main__":
    main()
