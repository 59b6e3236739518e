"""The clients that are attached: how each comes in, and how each ends.

The end of a client
-------------------
1. kernel: the client's process ends; its lifeline reads EOF, and its pidfd becomes readable even
   if a process that it forked holds the lifeline. Or the client says that it detaches.
2. here: no more answers; what is queued is cancelled (:meth:`Tenant.close`).
3. engine: the pieces in flight end; until then they touch the arena and the files.
4. chores: the arena is unmapped and the files are closed (:meth:`Tenant.free`).
5. here: the memory and the quota are free for others.

A client that ends has given up what it has on disk. A client that lives may come back and resume,
whoever has hung up: it does when its I/O connection breaks, or when it has not had the answer to an
attach in time that was decided in its favour. So the files keep their data for as long as it holds
them, unless its process has ended or it has said that it detaches.
"""

import errno
import logging
import os
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from discod.admission import Admission, Admitted, Inode, close_fds, inode
from discod.attach import Handshake, Peer
from discod.chores import Chores
from discod.logs import RateLimited
from discod.loop import Loop
from discod.tenant import Tenant, Who
from discod.wire.codec import WireError
from discod.wire.fds import receive_message, send_message
from discod.wire.messages import IDENTITY_BYTES, Attach, Attached, Detach, Welcome
from discod.wire.sizes import format_size

MAX_HANDSHAKES = 256
"""Connections in the conversation at a time; the others wait in the listener's backlog."""

ACCEPT_PAUSE_SECONDS = 0.5
"""At most, after running out of fds: the listener would wake the loop without end."""

ENDING_SECONDS = 0.1
"""The kernel closes the fds of a process that ends some microseconds before it says that it has."""

_log = logging.getLogger(__name__)
_pauses = RateLimited(_log)


@dataclass(frozen=True, slots=True)
class Client:
    """A tenant and its connection."""

    tenant: Tenant
    identity: bytes
    lifeline: socket.socket
    peer: Peer


class Clients:
    """The attach listener and all that came of it.

    Args:
        loop: The event loop.
        chores: For slow calls.
        admission: Decides who is let in.
        listener: The attach socket.
        welcome: Makes the greeting.
        status: Makes the status as JSON.
        make_tenant: Makes the tenant with this identity.
        changed: Called when a client has attached, and when one is gone.
    """

    def __init__(
        self,
        loop: Loop,
        chores: Chores,
        admission: Admission,
        listener: socket.socket,
        welcome: Callable[[], Welcome],
        status: Callable[[], str],
        make_tenant: Callable[[bytes, Who, Admitted], Tenant],
        changed: Callable[[], None],
    ) -> None:
        self.welcome = welcome
        self.status = status
        self._loop = loop
        self._chores = chores
        self._admission = admission
        self._listener = listener
        self._make_tenant = make_tenant
        self._changed = changed
        self._handshakes: set[Handshake] = set()
        self._waiting: list[tuple[Handshake, Attach, list[int]]] = []
        self._admitting: dict[Handshake, set[Inode]] = {}
        """Whose admission is not decided yet, or is being undone; and their scratch files."""
        self._clients: dict[bytes, Client] = {}
        self._undecided: dict[bytes, Callable[[], None]] = {}
        """Who has hung up and may have ended; called when it turns out to be alive."""
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

    def attach(self, handshake: Handshake, attach: Attach, fds: list[int]) -> None:
        """A client asks to be let in (:class:`discod.attach.Host`)."""
        inodes = {inode(fd) for fd in fds[1:]}
        leaving = {f.scratch.inode for t in self.tenants if t.closing for f in t.files}
        for earlier, its_inodes in self._admitting.items():
            leaving |= set() if earlier.open else its_inodes
        if inodes & leaving:
            # It is back before its I/O in flight has ended, or before it was let in.
            self._waiting.append((handshake, attach, fds))
            for identity, lives_on in list(self._undecided.items()):
                files = self._clients[identity].tenant.files
                if any(file.scratch.inode in inodes for file in files):
                    lives_on()
        else:
            self._admit(handshake, attach, fds)

    def hang_up(self, client: Client, reason: str) -> None:
        """Close a client that is still there, because of ``reason``."""
        self._close(client, reason, gone=False)

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
        while True:
            if len(self._handshakes) >= MAX_HANDSHAKES:
                self._pause(f"{MAX_HANDSHAKES} others are attaching")
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
            self._handshakes.add(handshake)

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
        self._handshakes.discard(handshake)
        if self._paused:
            self._loop.post(self._go_on)  # when its fd is closed

    def _admit(self, handshake: Handshake, attach: Attach, fds: list[int]) -> None:
        if handshake.open:
            self._admitting[handshake] = {inode(fd) for fd in fds[1:]}
            decided = partial(self._decided, handshake, attach)
            self._admission.admit(attach, fds, self.tenants, decided)
        else:
            close_fds(fds)

    def _decided(self, handshake: Handshake, attach: Attach, outcome: Admitted | Exception) -> None:
        if isinstance(outcome, Exception):
            handshake.refuse(f"not attached: {outcome}")
            self._admitted(handshake)
        elif handshake.open:
            self._let_in(handshake, attach, outcome)
            self._admitted(handshake)
        else:
            released = partial(self._admission.released, attach.arena_bytes, outcome.files)

            def freed(_: Exception | None) -> None:
                released()
                self._admitted(handshake)

            self._chores.submit(outcome.free, freed)

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
        self._clients[identity] = client = Client(tenant, identity, lifeline, peer)
        self._loop.add_reader(lifeline.fileno(), partial(self._lifeline_readable, client))
        if peer.pidfd is not None:
            ended = partial(self._close, client, "its process ended", gone=True)
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
            self._close(client, f"it did not await the answer: {error}", gone=False)
        close_fds(admitted.path_fds)
        self._changed()

    def _lifeline_readable(self, client: Client) -> None:
        try:
            _, fds = receive_message(client.lifeline, Detach)
            close_fds(fds)
        except BlockingIOError:
            return
        except WireError:
            self._close(client, "it spoke on its lifeline, against the protocol", gone=False)
        except OSError:
            self._close(client, "it hung up", gone=False)
        else:
            self._close(client, "it detached", gone=True)

    def _close(self, client: Client, reason: str, *, gone: bool) -> None:
        if client.tenant.closing:
            return
        self._loop.remove_reader(client.lifeline.fileno())
        if client.peer.pidfd is not None:
            self._loop.remove_reader(client.peer.pidfd)
        client.lifeline.close()
        client.tenant.close(partial(self._quiet, client, reason, gone=gone))

    def _quiet(self, client: Client, reason: str, *, gone: bool) -> None:
        """Nothing of the client runs any more."""
        pidfd = client.peer.pidfd
        if gone or pidfd is None:
            self._free(client, reason, discard=gone)
            return

        def decide(*, ended: bool) -> None:
            timer.cancel()
            del self._undecided[client.identity]
            self._loop.remove_reader(pidfd)
            self._free(client, reason, discard=ended)

        self._undecided[client.identity] = partial(decide, ended=False)
        timer = self._loop.call_later(ENDING_SECONDS, partial(decide, ended=False))
        self._loop.add_reader(pidfd, partial(decide, ended=True))

    def _free(self, client: Client, reason: str, *, discard: bool) -> None:
        free = partial(client.tenant.free, discard=discard)
        self._chores.submit(free, partial(self._freed, client, reason))

    def _freed(self, client: Client, reason: str, outcome: Exception | None) -> None:
        tenant = client.tenant
        client.peer.close()
        if outcome is not None:
            _log.error("%s: not all of it could be freed: %s", tenant.who, outcome)
        self._admission.released(tenant.arena_bytes, tenant.files)
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
