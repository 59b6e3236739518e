"""The I/O connection to one daemon: a ZeroMQ DEALER, and what tells of its end.

ZeroMQ connects again by itself when a connection breaks, and says nothing of the requests and
answers that were in it. They would be awaited for ever, so a connection that broke once is
:attr:`IoConnection.broken` for good; :mod:`disco_client.link` then attaches anew.

All connections of the process have one ZeroMQ context, and :meth:`IoConnection.close` leaves it: a
signal that arrives at its end makes pyzmq forget it with its threads and fds, while sockets, which
end at once, are closed by their collection too, wherever an interrupt lets go of them.
"""

import contextlib
import logging
import os
import select
import threading
import weakref
from pathlib import Path

import zmq

from discod.wire.codec import WireError, decode, encode
from discod.wire.messages import Done, Failed, Reply, Request

# Plain ints: the enums cost microseconds in each call.
_DONTWAIT = int(zmq.DONTWAIT)
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)

_log = logging.getLogger(__name__)

_context: "zmq.Context[zmq.Socket[bytes]] | None" = None
_dealers: "weakref.WeakSet[zmq.Socket[bytes]]" = weakref.WeakSet()
"""Of the context, for as long as anybody has them, and by them their monitors."""
_lock = threading.Lock()
_of_parents: "list[zmq.Context[zmq.Socket[bytes]]]" = []


class IoConnection:
    """A connection that was begun; what is sent waits until it stands.

    Args:
        path: The daemon's I/O socket.
        identity: What the daemon gave for it.

    Attributes:
        fds: To poll; they tell of changes, not of states.
        stirred: Whether something was sent since :meth:`received` has looked. Any call on the
            socket may eat the edge by which its fd tells of an answer, so there may be one.

    Raises:
        OSError: There are no fds left, or no memory.
    """

    def __init__(self, path: Path, identity: bytes) -> None:
        try:
            self._begin(path, identity)
        except zmq.ZMQError as error:  # which is no OSError
            raise OSError(error.errno, f"the I/O connection cannot be made: {error}") from error
        self.stirred = True
        self._broken = False
        self._poll = select.poll()
        for fd in self.fds:
            self._poll.register(fd, select.POLLIN)

    def _begin(self, path: Path, identity: bytes) -> None:
        with contextlib.ExitStack() as failed:
            self._dealer = _new_dealer()
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

    def watch(self, fd: int) -> None:
        """Count what comes on ``fd`` too in :meth:`quiet`; it must stay open as long as this."""
        self._poll.register(fd, select.POLLIN)

    def quiet(self) -> bool:
        """Whether :meth:`received` and :attr:`broken` have nothing new to tell; one system call."""
        return not (self.stirred or self._broken or self._poll.poll(0))

    @property
    def broken(self) -> bool:
        """Whether it stood and broke; what is answered since, and what is not, means nothing."""
        if not self._broken:
            self._broken = bool(int(self._monitor.getsockopt(_EVENTS)) & _POLLIN)
        return self._broken

    def send(self, request: Request) -> None:
        """Send, without waiting."""
        self.stirred = True
        self._dealer.send(encode(request), _DONTWAIT)

    def received(self) -> list[Reply]:
        """The replies that are there."""
        replies: list[Reply] = []
        # Asked first: the exception of an empty socket costs ten times as much.
        while int(self._dealer.getsockopt(_EVENTS)) & _POLLIN:
            try:
                replies.append(decode(self._dealer.recv(_DONTWAIT), Done, Failed))
            except zmq.Again:
                break
            except WireError as error:
                _log.warning("dropped a message of the daemon: %s", error)
        self.stirred = False
        return replies

    def close(self) -> None:
        """Drop what was not sent. Idempotent."""
        if not self._dealer.closed:
            self._dealer.disable_monitor()
            self._monitor.close(linger=0)
            self._dealer.close(linger=0)


def _new_dealer() -> "zmq.Socket[bytes]":
    global _context
    with _lock:
        if _context is None:
            _context = zmq.Context()
        dealer = _context.socket(zmq.DEALER)
        _dealers.add(dealer)
    return dealer


def end_context() -> None:
    """End libzmq's threads and close their fds, if no connection is open.

    Not where a signal may arrive: it would leave both behind.
    """
    global _context
    with _lock:
        if _context is None or not all(dealer.closed for dealer in _dealers):
            return
        context, _context = _context, None
    context.term()


def _after_fork_in_child() -> None:
    """The context is the parent's, whose threads are not here; it must not be collected either."""
    global _context, _dealers, _lock
    if _context is not None:
        _of_parents.append(_context)
    _context, _dealers, _lock = None, weakref.WeakSet(), threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)
