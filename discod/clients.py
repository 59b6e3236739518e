"""The clients that are attached: how each comes in, and how each ends.

The end of a client
-------------------
1. kernel: the client's process ends; its lifeline reads EOF, and its pidfd becomes readable even
   if a process that it forked holds the lifeline. Or the client says that it detaches.
2. here: no more answers; what is queued is cancelled (:meth:`Tenant.close`).
3. engine: the pieces in flight end; until then they touch the arena and the files.
4. chores: the arena is unmapped and the files are closed (:meth:`Tenant.free`).
5. here: the memory and the quota are free for others.

What becomes of its files (:class:`End`): A client whose process has ended, or that says that it
detaches, has given up what it has on disk, and one that breaks the protocol loses it: the files are
emptied at once, even if somebody still has fds of them. Any other may come back and resume, whoever
has hung up: it does when its I/O connection breaks, or when it has not had the answer to an attach
in time that was decided in its favour. Its files are parked until then (:mod:`discod.parking`).
"""

import errno
import logging
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from functools import partial

from discod.admission import Admission, Admitted, Inadmissible, inodes_of
from discod.attach import Handshake, Peer
from discod.chores import Chores
from discod.closer import Closer
from discod.io_connections import Owner
from discod.logs import RateLimited
from discod.loop import Loop
from discod.parking import Inode
from discod.permits import Permits
from discod.tenant import Tenant, Who
from discod.wire.codec import WireError
from discod.wire.fds import close_all, receive_alone, send_message
from discod.wire.messages import (
    IDENTITY_BYTES,
    Attach,
    Attached,
    Detach,
    TraceReply,
    TraceRequest,
    Welcome,
)
from discod.wire.sizes import format_size

ACCEPTS_PER_ROUND = 64
"""Then the loop looks after the others, however many are waiting to get in."""

ACCEPT_PAUSE_SECONDS = 0.5
"""At most, after running out of fds: the listener would wake the loop without end."""

IO_LOST_SECONDS = 0.2
"""From the end of a client's I/O connection until it is hung up on: when a process ends, its
lifeline may be closed a moment later."""

_log = logging.getLogger(__name__)
_pauses = RateLimited(_log)


class End(Enum):
    """How a client ends."""

    GONE = "its process has ended, or has hung up"
    BREACH = "it has broken the protocol"
    LOST = "the connection is lost, and it will come back"


@dataclass(slots=True)
class Client:
    """A tenant and its connections.

    Attributes:
        resumed: Whether it was attached to this or an earlier daemon before.
        io_fd: libzmq's fd of its I/O connection, once a message has come.
    """

    tenant: Tenant
    identity: bytes
    lifeline: socket.socket
    peer: Peer
    resumed: bool
    io_fd: int | None = None

    @property
    def owner(self) -> Owner:
        """Its process: pid and uid, as its connections have them."""
        return self.tenant.who.pid, self.tenant.who.uid


class Clients:
    """The attach listener and all that came of it.

    Args:
        loop: The event loop.
        chores: For slow calls.
        admission: Decides what a client is given.
        permits: Who is served.
        closer: Closes what clients handed over.
        most_handshakes: Connections in the conversation at a time.
        listener: The attach socket.
        welcome: Makes the greeting.
        status: Makes the status as JSON.
        trace: Gives what was recorded.
        make_tenant: Makes the tenant with this identity.
        changed: Called when a client has attached, and when one is gone.
        left: Called with the pid and uid of a client that has begun to leave.
    """

    def __init__(
        self,
        loop: Loop,
        chores: Chores,
        admission: Admission,
        permits: Permits,
        closer: Closer,
        most_handshakes: int,
        listener: socket.socket,
        welcome: Callable[[], Welcome],
        status: Callable[[], str],
        trace: Callable[[TraceRequest], TraceReply],
        make_tenant: Callable[[bytes, Who, Admitted], Tenant],
        changed: Callable[[], None],
        left: Callable[[Owner], None],
    ) -> None:
        self.permits = permits
        self.closer = closer
        self._most_handshakes = most_handshakes
        self._left = left
        self.welcome = welcome
        self.status = status
        self.trace = trace
        self._loop = loop
        self._chores = chores
        self._admission = admission
        self._listener = listener
        self._make_tenant = make_tenant
        self._changed = changed
        self._handshakes: dict[Handshake, None] = {}  # in the order in which they came
        self._waiting: list[tuple[Handshake, Attach, list[int]]] = []
        self._admitting: dict[Handshake, set[Inode]] = {}
        """Whose admission is not decided yet, or is being undone; and their scratch files."""
        self._clients: dict[bytes, Client] = {}
        self._accepting = True
        self._paused = False
        loop.add_reader(listener.fileno(), self._accept)

    @property
    def count(self) -> int:
        """Clients that are attached or about to be."""
        return len(self._clients) + len(self._handshakes)

    @property
    def in_flight(self) -> int:
        """Requests of all clients that are not answered."""
        return sum(client.tenant.in_flight for client in self._clients.values())

    @property
    def tenants(self) -> Iterable[Tenant]:
        return (client.tenant for client in self._clients.values())

    def find(self, identity: bytes) -> Client | None:
        """The client whose messages carry ``identity``."""
        return self._clients.get(identity)

    def count_of(self, owner: Owner) -> int:
        """Clients of the process with this pid and uid that have not begun to leave."""
        return sum(
            client.owner == owner and not client.tenant.closing for client in self._clients.values()
        )

    def io_ended(self, fd: int) -> None:
        """The I/O connection with this fd has ended; its client has too, or must come back."""
        for client in self._clients.values():
            if client.io_fd == fd and not client.tenant.closing:
                client.io_fd = -1
                # Where the process has just ended or detached, that is seen within moments.
                lost = partial(self._close, client, "its I/O connection is gone", End.LOST)
                self._loop.call_later(IO_LOST_SECONDS, lost)

    def attach(self, handshake: Handshake, attach: Attach, fds: list[int]) -> None:
        """A client asks to be let in (:class:`discod.attach.Host`)."""
        try:
            inodes = inodes_of(attach, fds)
        except (Inadmissible, OSError) as error:
            self.closer.close(fds, handshake.peer.uid)
            handshake.refuse(f"not attached: {error}")
            return
        leaving = {f.scratch.inode for t in self.tenants if t.closing for f in t.files}
        for earlier, its_inodes in self._admitting.items():
            leaving |= set() if earlier.open else its_inodes
        if inodes & leaving:
            # It is back before its I/O in flight has ended, or before it was let in.
            self._waiting.append((handshake, attach, fds))
        else:
            self._admit(handshake, attach, fds)

    def hang_up(self, client: Client, reason: str, end: End) -> None:
        """Close a client that is still there, because of ``reason``."""
        self._close(client, reason, end)

    def stop_accepting(self) -> None:
        """Close the listener and drop whoever has not got in yet."""
        if self._accepting:
            self._accepting = False
            if not self._paused:
                self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
            for handshake in list(self._handshakes):
                handshake.drop()

    def cancel_all(self, quiet: Callable[[], None]) -> None:
        """Cancel all that is queued; ``quiet`` is called whenever nothing of a client runs."""
        for tenant in self.tenants:
            if not tenant.closing:
                tenant.close(quiet)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_ROUND):
            if len(self._handshakes) >= self._most_handshakes and not self._evict():
                self._pause(f"{self._most_handshakes} others are attaching")
                return
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                    self._pause(str(error))
                    return
                continue  # that connection was gone already
            try:
                handshake = Handshake(self._loop, self, connection, self._handshake_ended)
            except OSError as error:
                connection.close()
                self._pause(str(error))
                return
            self._handshakes[handshake] = None

    def _evict(self) -> bool:
        """Drop the oldest unfinished conversation of the process that has most of them.

        An honest client is through with its own in milliseconds, and has one. So whoever opens
        connections and leaves them unfinished only gets in his own way.
        """
        unfinished = [handshake for handshake in self._handshakes if not handshake.asked]
        if not unfinished:
            return False
        (owner, _), *_ = Counter(map(_owner, unfinished)).most_common(1)
        oldest = next(handshake for handshake in unfinished if _owner(handshake) == owner)
        oldest.refuse(f"{len(self._handshakes)} attaches are unfinished, most of yours; try again")
        return True

    def _pause(self, reason: str) -> None:
        """Accept nobody until a connection ends or some time has passed."""
        _pauses.warning("attaches wait: %s", reason)
        self._paused = True
        self._loop.remove_reader(self._listener.fileno())
        self._loop.call_later(ACCEPT_PAUSE_SECONDS, self._go_on)

    def _go_on(self) -> None:
        if self._paused and self._accepting:
            self._paused = False
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _handshake_ended(self, handshake: Handshake) -> None:
        self._handshakes.pop(handshake, None)
        if self._paused:
            self._loop.post(self._go_on)  # when its fd is closed

    def _admit(self, handshake: Handshake, attach: Attach, fds: list[int]) -> None:
        if handshake.open:
            self._admitting[handshake] = inodes_of(attach, fds)
            decided = partial(self._decided, handshake, attach)
            self._admission.admit(attach, fds, handshake.peer.uid, self.tenants, decided)
        else:
            self.closer.close(fds, handshake.peer.uid)

    def _decided(self, handshake: Handshake, attach: Attach, outcome: Admitted | Exception) -> None:
        if isinstance(outcome, Exception):
            handshake.refuse(f"not attached: {outcome}")
            self._admitted(handshake)
        elif handshake.open:
            self._admission.let_in(outcome)
            self._let_in(handshake, attach, outcome)
            self._admitted(handshake)
        else:
            self._admission.not_let_in(outcome, partial(self._admitted, handshake))

    def _admitted(self, handshake: Handshake) -> None:
        """It is decided, and what was opened for nobody is closed."""
        del self._admitting[handshake]
        self._attach_waiting()

    def _let_in(self, handshake: Handshake, attach: Attach, admitted: Admitted) -> None:
        lifeline, peer = handshake.accept()
        # ZeroMQ takes no identity that begins with a zero byte.
        identity = b"\x01" + os.urandom(IDENTITY_BYTES - 1)
        who = Who(peer.pid, peer.uid, attach.rank)
        tenant = self._make_tenant(identity, who, admitted)
        self._clients[identity] = client = Client(tenant, identity, lifeline, peer, attach.resume)
        self._loop.add_reader(lifeline.fileno(), partial(self._lifeline_readable, client))
        if peer.pidfd is not None:
            ended = partial(self._close, client, "its process ended", End.GONE)
            self._loop.add_reader(peer.pidfd, ended)
        _log.info(
            "%s %s, arena %s: %.80r",
            who,
            "resumed" if attach.resume else "attached",
            format_size(attach.arena_bytes),
            attach.command,
        )
        try:
            send_message(lifeline, Attached(identity), admitted.path_fds)
        except OSError as error:
            self._hung_up(client, f"it did not await the answer: {error}")
        close_all(admitted.path_fds)
        self._changed()

    def _lifeline_readable(self, client: Client) -> None:
        try:
            receive_alone(client.lifeline, Detach)
        except BlockingIOError:
            return
        except WireError:
            self._close(client, "it spoke on its lifeline, against the protocol", End.BREACH)
        except OSError:
            self._hung_up(client, "it hung up")
        else:
            self._close(client, "it detached", End.GONE)

    def _hung_up(self, client: Client, reason: str) -> None:
        """Its end of the lifeline is closed, and it has not said that it is leaving."""
        used = client.io_fd is not None
        if client.peer.pidfd is not None:
            # If its process has ended, that is seen at once; and what was never used has nothing.
            lives = used or client.resumed
        else:
            # Nothing else tells of a process's end. Only one that resumes gives up waiting for our
            # answer after a moment, and then tries again.
            lives = client.resumed and not used
        self._close(client, reason, End.LOST if lives else End.GONE)

    def _close(self, client: Client, reason: str, end: End) -> None:
        if client.tenant.closing:
            return
        self._loop.remove_reader(client.lifeline.fileno())
        if client.peer.pidfd is not None:
            self._loop.remove_reader(client.peer.pidfd)
        client.lifeline.close()
        client.tenant.close(partial(self._quiet, client, reason, end))
        self._left(client.owner)

    def _quiet(self, client: Client, reason: str, end: End) -> None:
        """Nothing of the client runs any more."""
        free = client.tenant.unmap if end is End.LOST else client.tenant.free
        self._chores.submit(free, partial(self._freed, client, reason, end))

    def _freed(self, client: Client, reason: str, end: End, outcome: Exception | None) -> None:
        tenant = client.tenant
        if outcome is not None:
            _log.error("%s: not all of it could be freed: %s", tenant.who, outcome)
        if end is End.LOST:
            self._admission.released(tenant.arena_bytes, ())
            self._admission.parking.add(tenant.files, client.owner, client.peer.give_pidfd())
        else:
            self._admission.released(tenant.arena_bytes, tenant.files)
        client.peer.close()
        del self._clients[client.identity]
        _log.info(
            "%s detached (%s): %s written, %s read",
            tenant.who,
            reason,
            format_size(tenant.written_bytes),
            format_size(tenant.read_bytes),
        )
        self._attach_waiting()
        self._changed()

    def _attach_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for handshake, attach, fds in waiting:
            self.attach(handshake, attach, fds)


def _owner(handshake: Handshake) -> Owner:
    return handshake.peer.pid, handshake.peer.uid
