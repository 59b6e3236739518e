"""The attach conversation, the daemon's side: from an accepted connection to a tenant.

The steps are those of :mod:`discod.wire.messages`. A connection that does not get through them
within ``HANDSHAKE_SECONDS`` is dropped. What a client is given is the server's to decide.
"""

import contextlib
import logging
import os
import socket
import struct
from collections.abc import Callable
from functools import partial
from typing import Protocol

from discod import __version__
from discod.closer import Closer
from discod.logs import RateLimited
from discod.loop import Loop
from discod.permits import Permits
from discod.wire import PROTOCOL_VERSION
from discod.wire.codec import WireError
from discod.wire.fds import receive_alone, receive_message, send_message
from discod.wire.messages import (
    Attach,
    GiveUp,
    Hello,
    Message,
    Refused,
    StatusReply,
    StatusRequest,
    TraceReply,
    TraceRequest,
    Welcome,
)

HANDSHAKE_SECONDS = 5.0
"""A client needs milliseconds; one that is stopped in between must not hold anything for long."""

MOST_TRACE_REQUESTS = 256
"""Of one connection: more than all records take."""

_SO_PEERPIDFD = 77  # Linux 6.5

_warnings = RateLimited(logging.getLogger(__name__))


class Peer:
    """The process at the other end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        credentials = connection.getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
        )
        self.pid, self.uid, self.gid = struct.unpack("3i", credentials)
        self.pidfd = _pidfd(connection, self.pid)

    def close(self) -> None:
        """Close the pidfd."""
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None

    def give_pidfd(self) -> int | None:
        """The pidfd, from now on the caller's."""
        pidfd, self.pidfd = self.pidfd, None
        return pidfd


def _pidfd(connection: socket.socket, pid: int) -> int | None:
    """A pidfd of the peer; None where there is none, and EOF alone tells of its end."""
    with contextlib.suppress(OSError):
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    if pid:
        with contextlib.suppress(OSError):
            return os.pidfd_open(pid)
    return None


class Host(Protocol):
    """What the conversation asks the server.

    Attributes:
        permits: Who is served.
        closer: Closes what clients sent.
    """

    permits: Permits
    closer: Closer

    def welcome(self) -> Welcome:
        """What to greet with."""

    def status(self) -> str:
        """The status as JSON."""

    def trace(self, request: TraceRequest) -> TraceReply:
        """What was recorded."""

    def attach(self, handshake: "Handshake", attach: Attach, fds: list[int]) -> None:
        """Decide about a client. Calls ``accept`` or ``refuse`` in the end; owns ``fds``."""

    def give_up(self, peer: "Peer", fds: list[int]) -> None:
        """A client that had these scratch files will not come back; owns ``fds``."""


class Handshake:
    """One connection in the conversation.

    Args:
        loop: The event loop.
        host: The server.
        connection: Accepted; owned by the handshake until :meth:`accept` hands it over.
        ended: Called once, with this, when the conversation has ended, however.

    Attributes:
        peer: Who it is with.
        asked: Whether all that the client has to say is said, and it awaits the decision.
    """

    def __init__(
        self,
        loop: Loop,
        host: Host,
        connection: socket.socket,
        ended: Callable[["Handshake"], None],
    ) -> None:
        self._loop = loop
        self._host = host
        self._connection = connection
        self._ended = ended
        connection.setblocking(False)
        self.peer = Peer(connection)
        self.open = True
        self._greeted = False
        self.asked = False
        self._traced = 0
        self._timer = loop.call_later(HANDSHAKE_SECONDS, self._late)
        loop.add_reader(connection.fileno(), self._readable)

    def refuse(self, text: str) -> None:
        """Send the refusal and close."""
        if self.open:
            _warnings.warning("refused pid %d (uid %d): %s", self.peer.pid, self.peer.uid, text)
            self._send(Refused(text))
            self.drop()

    def accept(self) -> tuple[socket.socket, Peer]:
        """End the conversation and hand the connection and the peer over."""
        self._stop()
        return self._connection, self.peer

    def drop(self) -> None:
        """Close the connection."""
        if self.open:
            self._stop()
            self._connection.close()
            self.peer.close()

    def _stop(self) -> None:
        self.open = False
        self._timer.cancel()
        self._loop.remove_reader(self._connection.fileno())
        self._ended(self)

    def _late(self) -> None:
        self.refuse(f"the attach took over {HANDSHAKE_SECONDS:.0f} s; try again")

    def _send(self, message: Message) -> None:
        # The packets are small and the peer awaits them: a full buffer is a peer gone mad.
        with contextlib.suppress(OSError):
            send_message(self._connection, message)

    def _readable(self) -> None:
        try:
            if self.asked:
                # Nothing but its end is expected of a client that awaits the decision.
                self._connection.recv(1)
                self.drop()
            elif self._greeted:
                if self._host.closer.overdue(self.peer.uid):
                    self._connection.recv(1)  # the kernel drops its fds
                    self.refuse(
                        f"fds that uid {self.peer.uid} sent before do not close, because their "
                        "file system does not answer; end what hangs there and try again"
                    )
                    return
                close = partial(self._host.closer.close, uid=self.peer.uid)
                request, fds = receive_message(
                    self._connection, Attach, StatusRequest, GiveUp, TraceRequest, close=close
                )
                self._request(request, fds)
            else:
                self._hello(receive_alone(self._connection, Hello))
        except BlockingIOError:
            return
        except WireError as error:
            self.refuse(f"not discod's protocol: {error}")
        except OSError:
            self.drop()

    def _hello(self, hello: Hello) -> None:
        peer = self.peer
        if not self._host.permits.may_ask(self._connection, peer.uid, peer.gid):
            self.refuse(self._not_allowed())
        elif hello.protocol != PROTOCOL_VERSION:
            self.refuse(
                f"the daemon is discod {__version__} with protocol {PROTOCOL_VERSION}, the client "
                f"is {hello.version[:40]!r} with protocol {hello.protocol}; run the same version "
                "of discod on both sides"
            )
        else:
            self._greeted = True
            self._send(self._host.welcome())

    def _request(
        self, request: Attach | StatusRequest | GiveUp | TraceRequest, fds: list[int]
    ) -> None:
        peer = self.peer
        if isinstance(request, GiveUp):
            self._host.give_up(peer, fds)  # only of what is this very process's
            self.drop()
        elif isinstance(request, TraceRequest):
            self._host.closer.close(fds, peer.uid)
            self._send(self._host.trace(request))
            self._traced += 1
            if self._traced == MOST_TRACE_REQUESTS:
                self.drop()
        elif isinstance(request, StatusRequest):
            self._host.closer.close(fds, peer.uid)
            self._send(StatusReply(self._host.status()))
            self.drop()
        elif self._host.permits.may_attach(self._connection, peer.uid, peer.gid):
            self.asked = True
            self._host.attach(self, request, fds)
        else:
            self._host.closer.close(fds, peer.uid)
            self.refuse(self._not_allowed())

    def _not_allowed(self) -> str:
        uid = self.peer.uid
        return (
            f"the daemon serves {self._host.permits.who()}, not uid {uid} (gid {self.peer.gid}): "
            f"start a daemon as uid {uid} with its own --socket-dir, or this one with "
            "--allow-group and a group that uid is in"
        )
