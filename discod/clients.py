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
in time that was decided in its favour. Its files are parked until then (:mod:`discod.parking`), or
until it says on a new connection that it gives them up. What it says on its lifeline counts as long
as it could say it: where the daemon hangs up, it first takes no more, and then reads what is there.
"""

import contextlib
import logging
import os
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from functools import partial

from discod.admission import (
    Admission,
    Admitted,
    Inadmissible,
    inodes_of,
    scratch_inodes,
)
from discod.attach import Handshake, Peer
from discod.chores import Chores
from discod.closer import Closer
from discod.io_connections import Owner
from discod.loop import Loop
from discod.parking import Inode
from discod.permits import Permits
from discod.ranks import Ranks
from discod.reception import Reception, owner_of
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

IO_LOST_SECONDS = 0.2
"""From the end of a client's I/O connection until it is hung up on: when a process ends, its
lifeline may be closed a moment later."""

_log = logging.getLogger(__name__)


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
        given_up: Whether it said, while it was leaving, that it will not come back.
    """

    tenant: Tenant
    identity: bytes
    lifeline: socket.socket
    peer: Peer
    resumed: bool
    io_fd: int | None = None
    given_up: bool = False

    @property
    def owner(self) -> Owner:
        """Its process: pid and uid, as its connections have them."""
        return self.tenant.who.pid, self.tenant.who.uid


class Clients:
    """All that came of the attach listener.

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
        self._left = left
        self.welcome = welcome
        self.status = status
        self.trace = trace
        self._loop = loop
        self._chores = chores
        self._admission = admission
        self._make_tenant = make_tenant
        self._changed = changed
        self._waiting: list[tuple[Handshake, Attach, list[int]]] = []
        self._admitting: dict[Handshake, set[Inode]] = {}
        """Whose admission is not decided yet, or is being undone; and their scratch files."""
        self._clients: dict[bytes, Client] = {}
        self.ranks = Ranks()
        self._reception = Reception(loop, self, most_handshakes, listener)

    @property
    def count(self) -> int:
        """Clients that are attached or about to be."""
        return len(self._clients) + len(self._reception)

    @property
    def awaited(self) -> int:
        """Clients that are gone, and whose files are kept since they may come back."""
        return len(self._admission.parking)

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

    def give_up(self, peer: Peer, fds: list[int]) -> None:
        """A process will not come back for these files (:class:`discod.attach.Host`).

        Wherever they are by now: with a client that is not known to be gone, on the way to the
        parking, there, or about to be let in again.
        """
        try:
            self._forget(scratch_inodes(fds), (peer.pid, peer.uid))
        except (Inadmissible, OSError) as error:
            _log.warning("pid %d (uid %d) gives up no files: %s", peer.pid, peer.uid, error)
        finally:
            self.closer.close(fds, peer.uid)  # until here no other file can have their numbers

    def _forget(self, inodes: set[Inode], owner: Owner) -> None:
        if not inodes:  # as those that attach for the first time have
            return
        coming = [handshake for handshake, its in self._admitting.items() if its == inodes]
        coming += [h for h, attach, fds in self._waiting if inodes_of(attach, fds) == inodes]
        for handshake in coming:
            if owner_of(handshake) == owner:
                handshake.drop()
        for client in list(self._clients.values()):
            its = {file.scratch.inode for file in client.tenant.files}
            if client.owner == owner and its == inodes:
                client.given_up = True
                self._close(client, "it has given up its files", End.GONE)
        lot = self._admission.parking.find(inodes, lent=True)
        if lot is not None and lot.owner == owner:
            self._admission.parking.give_up(lot)

    def hang_up(self, client: Client, reason: str, end: End) -> None:
        """Close a client that is still there, because of ``reason``."""
        self._close(client, reason, end)

    def stop_accepting(self) -> None:
        """Close the listener and drop whoever has not got in yet."""
        self._reception.close()

    def cancel_all(self, quiet: Callable[[], None]) -> None:
        """Cancel all that is queued; ``quiet`` is called whenever nothing of a client runs."""
        for tenant in self.tenants:
            if not tenant.closing:
                tenant.close(quiet)

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
        who = Who(peer.pid, peer.uid, attach.rank, attach.command)
        tenant = self._make_tenant(identity, who, admitted)
        tenant.told.resumed = attach.resume
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
        if end is End.LOST and _has_detached(client.lifeline):
            reason, end = "it detached", End.GONE
        self._loop.remove_reader(client.lifeline.fileno())
        if client.peer.pidfd is not None:
            self._loop.remove_reader(client.peer.pidfd)
        client.lifeline.close()
        client.tenant.close(partial(self._quiet, client, reason, end))
        self._left(client.owner)

    def _quiet(self, client: Client, reason: str, end: End) -> None:
        """Nothing of the client runs any more."""
        if client.given_up:
            end = End.GONE
        free = client.tenant.unmap if end is End.LOST else client.tenant.free
        self._chores.submit(free, partial(self._freed, client, reason, end))

    def _freed(self, client: Client, reason: str, end: End, outcome: Exception | None) -> None:
        tenant = client.tenant
        if outcome is not None:
            _log.error("%s: not all of it could be freed: %s", tenant.who, outcome)
        if end is End.LOST:
            self._admission.released(tenant.arena_bytes, ())
            pidfd = client.peer.give_pidfd()
            lot = self._admission.parking.add(tenant.files, client.owner, pidfd)
            if client.given_up:
                self._admission.parking.give_up(lot)
        else:
            self._admission.released(tenant.arena_bytes, tenant.files)
        client.peer.close()
        del self._clients[client.identity]
        self.ranks.leave(tenant)
        _log.info(
            "%s detached (%s): %s written, %s read",
            tenant.who,
            reason,
            format_size(tenant.traffic.written.size_bytes),
            format_size(tenant.traffic.read.size_bytes),
        )
        self._attach_waiting()
        self._changed()

    def _attach_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for handshake, attach, fds in waiting:
            self.attach(handshake, attach, fds)


def _has_detached(lifeline: socket.socket) -> bool:
    """Whether the client has said that it goes for good; if it says so from now on, it fails."""
    with contextlib.suppress(OSError, WireError):
        lifeline.shutdown(socket.SHUT_RD)
        receive_alone(lifeline, Detach)
        return True
    return False
