"""The I/O socket: a ZeroMQ ROUTER. The only module of the daemon that knows ZeroMQ."""

import os
from collections.abc import Callable
from pathlib import Path

import zmq

from discod.wire.codec import MAX_MESSAGE_BYTES

FLUSH_MILLISECONDS = 300
"""Most time at the end for answers to clients that do not read them."""

# As plain ints: enums, exceptions and recv_multipart cost 20 microseconds a message.
_EVENTS = int(zmq.EVENTS)
_READABLE = int(zmq.POLLIN)
_NO_WAIT = int(zmq.DONTWAIT)
_MORE_TO_COME = int(zmq.DONTWAIT | zmq.SNDMORE)


class Router:
    """Receives messages from clients and sends them answers, without ever blocking.

    Args:
        path: The socket; a file there is replaced.

    Raises:
        OSError: The path cannot be bound.
    """

    def __init__(self, path: Path) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.LINGER, 0)
        # What is over the codec's limit must arrive to be answered, but not what fills the memory.
        self._socket.set(zmq.MAXMSGSIZE, 4 * MAX_MESSAGE_BYTES)
        umask = os.umask(0o177)
        try:
            self._socket.bind(f"ipc://{path}")
        except zmq.ZMQError as error:
            self._socket.close()
            self._context.term()
            raise OSError(error.errno, os.strerror(error.errno or 0)) from error
        finally:
            os.umask(umask)

    @property
    def fd(self) -> int:
        """Readable, once, when something may have come: call :meth:`receive` until it is done."""
        return int(self._socket.get(zmq.FD))

    def receive(self, handle: Callable[[bytes, bytes], None], most: int) -> bool:
        """Hand over up to ``most`` messages: identity and body. True when there may be more.

        A message that is not of two parts is handed over with an empty body.
        """
        for _ in range(most):
            if not int(self._socket.get(_EVENTS)) & _READABLE:
                return False
            identity = self._socket.recv(_NO_WAIT)
            part = self._socket.recv(_NO_WAIT, copy=False)
            body = part.bytes
            while part.more:
                part, body = self._socket.recv(_NO_WAIT, copy=False), b""
            handle(identity, body)
        return True

    def send(self, identity: bytes, body: bytes) -> bool:
        """Send ``body``; False when that client's connection is gone."""
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
        self._socket.close(linger=FLUSH_MILLISECONDS)
        self._context.term()
