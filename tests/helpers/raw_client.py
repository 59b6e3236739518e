"""The wire protocol by hand: a client without any of ``disco_client``, for tests of the daemon."""

import contextlib
import fcntl
import mmap
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zmq

from discod.wire import PROTOCOL_VERSION
from discod.wire.codec import decode, encode
from discod.wire.fds import receive_message, send_message
from discod.wire.messages import (
    Attach,
    Attached,
    Detach,
    Done,
    Failed,
    Hello,
    Read,
    Refused,
    Reply,
    Request,
    Welcome,
    Write,
)
from discod.wire.paths import socket_paths

SEAL_SHRINK_GROW = 0x2 | 0x4
MIB = 1 << 20


def make_arena(size_bytes: int, seals: int = SEAL_SHRINK_GROW) -> int:
    """A memfd such as the protocol wants it, or with other seals."""
    fd = os.memfd_create("discod-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_bytes)
    fcntl.fcntl(fd, 1033, seals)  # F_ADD_SEALS
    return fd


def greet(socket_dir: Path, protocol: int = PROTOCOL_VERSION) -> tuple[socket.socket, Any]:
    """Connect and say hello: the lifeline, and the daemon's Welcome or Refused."""
    lifeline = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        lifeline.settimeout(10)
        lifeline.connect(str(socket_paths(socket_dir)[0]))
        send_message(lifeline, Hello(protocol, "test"))
        reply, _ = receive_message(lifeline, Welcome, Refused)
    except OSError:
        lifeline.close()
        raise
    return lifeline, reply


def attach(
    socket_dir: Path,
    arena_bytes: int,
    fds: Sequence[int],
    *,
    resume: bool = False,
    rank: int = -1,
    command: str = "test",
) -> tuple[socket.socket, Any, Any, list[int]]:
    """The whole conversation: lifeline, Welcome, Attached or Refused, and the fds with it."""
    lifeline, welcome = greet(socket_dir)
    send_message(lifeline, Attach(arena_bytes, rank, command, resume), fds)
    reply, received = receive_message(lifeline, Attached, Refused)
    return lifeline, welcome, reply, received


class RawClient:
    """An attached client.

    Args:
        socket_dir: The daemon's.
        arena_bytes: The arena's size.
        rank, command: As in ``Attach``.

    Attributes:
        arena: The arena's bytes, writable.
        files: O_PATH fds of the scratch files.
    """

    def __init__(
        self,
        socket_dir: Path,
        arena_bytes: int = 16 * MIB,
        rank: int = -1,
        command: str = "test",
    ) -> None:
        self.arena_bytes = arena_bytes
        self.arena_fd = make_arena(arena_bytes)
        self.arena = mmap.mmap(self.arena_fd, arena_bytes)
        self.rank = rank
        self.command = command
        self.files: list[int] = []
        self.context = zmq.Context()
        self._seq = 0
        self._replies: dict[int, Reply] = {}
        self.attach(socket_dir)

    def attach(self, socket_dir: Path) -> None:
        """Attach; with the files of an earlier daemon, resume."""
        self.lifeline, self.welcome, reply, files = attach(
            socket_dir,
            self.arena_bytes,
            [self.arena_fd, *self.files],
            resume=bool(self.files),
            rank=self.rank,
            command=self.command,
        )
        assert isinstance(reply, Attached), reply
        self.files = self.files or files
        self.identity = reply.identity
        self.dealer = self.connect(socket_dir, reply.identity)

    def connect(self, socket_dir: Path, identity: bytes) -> zmq.Socket[bytes]:
        """A DEALER with ``identity``."""
        dealer = self.context.socket(zmq.DEALER)
        dealer.set(zmq.IDENTITY, identity)
        dealer.set(zmq.LINGER, 0)
        dealer.set(zmq.SNDHWM, 0)
        dealer.set(zmq.RCVHWM, 0)
        dealer.connect(f"ipc://{socket_paths(socket_dir)[1]}")
        return dealer

    def send(self, verb: type[Request], **fields: Any) -> int:
        """Send a request; returns its seq."""
        self._seq += 1
        message = verb(**{"seq": self._seq, "epoch": self.welcome.epoch} | fields)
        self.dealer.send(encode(message))
        return message.seq

    def answer(self, seq: int, timeout: float = 20.0) -> Any:
        """The answer to ``seq``; those to others are kept for later."""
        while seq not in self._replies:
            reply = self.next_answer(timeout)
            self._replies[reply.seq] = reply
        return self._replies.pop(seq)

    def next_answer(self, timeout: float = 20.0) -> Any:
        """The next message from the daemon."""
        assert self.dealer.poll(int(timeout * 1000)), f"no answer within {timeout} s"
        return decode(self.dealer.recv(), Done, Failed)

    def ask(self, verb: type[Request], **fields: Any) -> Any:
        """Send a request and wait for its answer."""
        return self.answer(self.send(verb, **fields))

    def write(self, offset: int, slot: int, length: int, file: int = 0) -> Any:
        """Write and wait."""
        return self.ask(Write, file=file, offset=offset, slot=slot, length=length)

    def read(
        self,
        offset: int,
        slot: int,
        length: int,
        checksum: bytes = b"",
        *,
        file: int = 0,
        urgent: bool = True,
    ) -> Any:
        """Read and wait."""
        return self.ask(
            Read,
            file=file,
            offset=offset,
            slot=slot,
            length=length,
            checksum=checksum,
            urgent=urgent,
        )

    def detach(self) -> None:
        """Hang up, keeping the arena and the files."""
        self.dealer.close(linger=0)
        self.lifeline.close()

    def close(self) -> None:
        """Say that it will not come back, and close everything; idempotent."""
        if self.arena.closed:
            return
        with contextlib.suppress(OSError):  # the daemon has gone, or was hung up on
            send_message(self.lifeline, Detach())
        self.detach()
        self.context.destroy(linger=0)
        self.arena.close()
        for fd in (self.arena_fd, *self.files):
            os.close(fd)
