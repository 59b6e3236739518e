"""The I/O connection to one daemon: a ZeroMQ DEALER, and what tells of its end.

ZeroMQ connects again by itself when a connection breaks, and says nothing of the requests and
answers that were in it. They would be awaited for ever, so a connection that broke once is
:attr:`IoConnection.broken` for good; :mod:`disco_client.link` then attaches anew.
"""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import zmq

from discod.wire.codec import WireError, decode, encode
from discod.wire.messages import Done, Failed, Reply, Request

# Plain ints: the enums cost microseconds in each call.
_DONTWAIT = int(zmq.DONTWAIT)
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)

_log = logging.getLogger(__name__)


class IoConnection:
    """A connection that was begun; what is sent waits until it stands.

    Args:
        path: The daemon's I/O socket.
        identity: What the daemon gave for it.

    Attributes:
        fds: To poll; they tell of changes, not of states.

    Raises:
        zmq.ZMQError: There are no fds left, or no memory.
    """

    def __init__(self, path: Path, identity: bytes) -> None:
        self._context = zmq.Context()
        with contextlib.ExitStack() as failed:
            failed.callback(self._context.term)
            self._dealer = self._context.socket(zmq.DEALER)
            failed.callback(self._dealer.close, linger=0)
            failed.callback(self._dealer.disable_monitor)
            self._dealer.set(zmq.IDENTITY, identity)
            self._dealer.set(zmq.LINGER, 0)
            self._dealer.set(zmq.SNDHWM, 0)
            self._dealer.set(zmq.RCVHWM, 0)
            self._monitor = self._dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            self._dealer.connect(f"ipc://{path}")
            self.fds: tuple[int, int] = self._dealer.FD, self._monitor.FD
            # The fds tell only of what comes after somebody has looked and found nothing.
            for one in (self._dealer, self._monitor):
                one.getsockopt(_EVENTS)
            failed.pop_all()

    @property
    def broken(self) -> bool:
        """Whether it stood and broke; what is answered since, and what is not, means nothing."""
        return bool(int(self._monitor.getsockopt(_EVENTS)) & _POLLIN)

    def send(self, request: Request) -> None:
        """Send, without waiting."""
        self._dealer.send(encode(request), _DONTWAIT)

    def received(self) -> Iterator[Reply]:
        """The replies that are there."""
        # Asked first: the exception of an empty socket costs ten times as much.
        while int(self._dealer.getsockopt(_EVENTS)) & _POLLIN:
            try:
                yield decode(self._dealer.recv(_DONTWAIT), Done, Failed)
            except zmq.Again:
                return
            except WireError as error:
                _log.warning("dropped a message of the daemon: %s", error)

    def close(self) -> None:
        """Drop what was not sent."""
        self._dealer.disable_monitor()
        self._monitor.close(linger=0)
        self._dealer.close(linger=0)
        self._context.term()
