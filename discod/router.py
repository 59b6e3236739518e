"""The I/O socket: a ZeroMQ ROUTER. The only module of the daemon that knows ZeroMQ.

What one connection can take of the daemon's memory
---------------------------------------------------
- *Received and not handled:* ``RECEIVE_QUEUE`` messages of at most twice ``MAX_REQUEST_BYTES``
  each, 16 MiB. Then libzmq stops reading from that connection: the rest waits in the client's own
  queue, which has no limit, and nobody else's messages wait for it.
- *Answered and not read:* ``SEND_QUEUE`` messages of some 100 bytes, up to 500 with an error's
  text: 32 MiB at the very most. It is twice what a client can have unanswered, so that one that is
  stopped for a time loses nothing. When it is full the client is hung up on; it attaches again and
  resends.

How many connections a process may have is in :mod:`discod.io_connections`.
"""

import contextlib
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import zmq

from discod.tenant import MAX_UNANSWERED
from discod.wire.codec import MAX_BYTES_FIELD, MAX_LIST_ITEMS

FLUSH_MILLISECONDS = 300
"""Most time at the end for answers to clients that do not read them."""

MAX_REQUEST_BYTES = 1 << 15
"""32 KiB: a request has about 100 bytes, and an ``OpenRing`` with all of its events fits in."""

RECEIVE_QUEUE = 256
SEND_QUEUE = 2 * MAX_UNANSWERED

EVENTS_AT_THE_END = 100_000
"""All that are there, and an end."""

SILENT_MILLISECONDS = 2000
"""A peer that has connected and says nothing is dropped by then."""

# As plain ints: enums, exceptions and recv_multipart cost 20 microseconds a message.
_EVENTS = int(zmq.EVENTS)
_READABLE = int(zmq.POLLIN)
_NO_WAIT = int(zmq.DONTWAIT)
_MORE_TO_COME = int(zmq.DONTWAIT | zmq.SNDMORE)
_ACCEPTED = int(zmq.EVENT_ACCEPTED)
_SOURCE_FD = int(zmq.SRCFD)

if (MAX_BYTES_FIELD + 2) * MAX_LIST_ITEMS + 512 > MAX_REQUEST_BYTES:
    raise RuntimeError("an OpenRing with all of its events would not fit into MAX_REQUEST_BYTES")


class Router:
    """Receives messages from clients and sends them answers, without ever blocking.

    Args:
        path: The socket; a file there is replaced. Its mode is the caller's to set.
        passed: A socket that listens there already: it is used, and its file left as it is.

    Raises:
        OSError: The path cannot be bound.
    """

    def __init__(self, path: Path, passed: socket.socket | None = None) -> None:
        self._endpoint = f"ipc://{path}"
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._part: zmq.Frame | None = None
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        self._socket.set(zmq.SNDHWM, SEND_QUEUE)
        self._socket.set(zmq.RCVHWM, RECEIVE_QUEUE)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.HANDSHAKE_IVL, SILENT_MILLISECONDS)
        # libzmq drops a connection for a larger message, without a word.
        self._socket.set(zmq.MAXMSGSIZE, 2 * MAX_REQUEST_BYTES)
        events = f"inproc://connections-{id(self)}"
        self._socket.monitor(events, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._monitor = self._context.socket(zmq.PAIR)
        self._monitor.set(zmq.RCVHWM, 1)  # added to the 1,000 that libzmq has on its side
        self._monitor.connect(events)
        if passed is not None:
            self._socket.set(zmq.USE_FD, passed.detach())  # libzmq's from now on, file excepted
        umask = os.umask(0o177)
        try:
            self._socket.bind(self._endpoint)
        except zmq.ZMQError as error:
            self._close(linger=0)
            raise OSError(error.errno, os.strerror(error.errno or 0)) from error
        finally:
            os.umask(umask)

    @property
    def fds(self) -> tuple[int, int]:
        """Readable, once, when something may have come: call :meth:`receive` until it is done.

        And the same for :meth:`take_connections`.
        """
        return int(self._socket.get(zmq.FD)), int(self._monitor.get(zmq.FD))

    def take_connections(
        self, accepted: Callable[[int], None], ended: Callable[[int], None], most: int
    ) -> bool:
        """Tell of up to ``most`` connections, by their fds, that were accepted or have ended.

        True when there may be more.

        libzmq's thread waits while some 1,000 of them have not been taken.
        """
        for _ in range(most):
            if not int(self._monitor.get(_EVENTS)) & _READABLE:
                return False
            event, fd = struct.unpack("=Hi", self._monitor.recv_multipart(_NO_WAIT)[0])
            (accepted if event == _ACCEPTED else ended)(fd)
        return True

    def receive(self, handle: Callable[[bytes, bytes], None], most: int) -> bool:
        """Hand over up to ``most`` messages: identity and body. True when there may be more.

        A message that is not of two parts is handed over with an empty body.
        """
        for number in range(most):
            try:
                # Asking costs 4 us each time, the exception at the end of a burst 8 us once.
                if number < 2 and not int(self._socket.get(_EVENTS)) & _READABLE:
                    return False
                identity = self._socket.recv(_NO_WAIT)
            except zmq.Again:
                return False
            self._part = part = self._socket.recv(_NO_WAIT, copy=False)
            body = part.bytes
            while part.more:
                part, body = self._socket.recv(_NO_WAIT, copy=False), b""
            handle(identity, body)
        return True

    def source_fd(self) -> int:
        """The connection, by its fd, that the message which is being handled came through."""
        return -1 if self._part is None else int(self._part.get(_SOURCE_FD))

    def send(self, identity: bytes, body: bytes) -> bool:
        """Send ``body``; False when that client's connection is gone, or it reads no answers."""
        try:
            self._socket.send(identity, _MORE_TO_COME)
            self._socket.send(body, _NO_WAIT)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True

    def close(self) -> None:
        """Send out what was sent, within ``FLUSH_MILLISECONDS``, and close."""
        with contextlib.suppress(zmq.ZMQError):
            self._socket.unbind(self._endpoint)  # so that no more events come
        self._close(FLUSH_MILLISECONDS)

    def _close(self, linger: int) -> None:
        # Nobody takes events any more, and libzmq's thread must not wait for anybody.
        self.take_connections(lambda fd: None, lambda fd: None, EVENTS_AT_THE_END)
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close(linger=linger)
        self._context.term()
