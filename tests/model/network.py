"""ZeroMQ as it behaves when peers die, in one thread: DEALERs, a ROUTER, and what is between them.

A message goes from the sender's queue into the connection, and from there to the receiver; each
hop is a step of its own. A connection that ends loses what is in it in the sender's direction. What
the sender has not handed to it yet goes to whoever listens on the address next, under the same
identity. Nobody is told of any of it, except by :meth:`Dealer.get_monitor_socket`.
"""

import contextlib
import itertools
import os
import random
import socket
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

Step = Callable[[], None]


class Connection:
    """One DEALER's, to one ROUTER. ``number``: In place of its fd in the daemon."""

    def __init__(self, dealer: "Dealer", router: "Router", number: int) -> None:
        self.number = number
        self.dealer = dealer
        self.router = router
        self.to_router: deque[bytes] = deque()
        self.to_dealer: deque[bytes] = deque()


class Network:
    """All sockets of one world.

    Args:
        chance: Of what is lost with a connection.
    """

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self.dealers: list[Dealer] = []
        self.routers: list[Router] = []
        self.connections: list[Connection] = []
        self._numbers = itertools.count(1 << 24)  # above any fd
        self.late: list[tuple[Dealer, bytes]] = []
        """Answers of routers that are gone, which still arrive."""

    def steps(self) -> list[Step]:
        """What could happen next."""
        found: list[Step] = []
        for dealer in self.dealers:
            if dealer.connection is None:
                found += [lambda d=dealer, r=r: self._connect(d, r) for r in self.routers]
            elif dealer.unsent:
                found.append(lambda d=dealer: self._transmit(d))
        for connection in self.connections:
            if connection.to_router:
                found.append(lambda c=connection: self._arrive(c))
            if connection.to_dealer:
                found.append(lambda c=connection: c.dealer.deliver(c.to_dealer.popleft()))
        found += [lambda answer=answer: self._arrive_late(answer) for answer in self.late[:1]]
        return found

    def sever(self, connection: Connection) -> None:
        """The connection ends; of what is in it, some still arrives, the first ones."""
        self.connections.remove(connection)
        for body in list(connection.to_router)[: self._chance.randint(0, 3)]:
            connection.router.inbox.append((connection, body))
        connection.router.peers.pop(connection.dealer.identity)
        connection.router.end(connection.number)
        answers = list(connection.to_dealer)
        kept = self._chance.randint(0, len(answers))
        self.late += [(connection.dealer, answer) for answer in answers[:kept]]
        connection.dealer.connection = None
        connection.dealer.sever()

    def forget(self, dealer: "Dealer") -> None:
        """The DEALER is closed: what it had queued is lost."""
        self.dealers.remove(dealer)
        if dealer.connection is not None:
            self.sever(dealer.connection)
        self.late = [(d, body) for d, body in self.late if d is not dealer]

    def _connect(self, dealer: "Dealer", router: "Router") -> None:
        if dealer.identity not in router.peers:
            connection = dealer.connection = Connection(dealer, router, next(self._numbers))
            router.peers[dealer.identity] = connection
            self.connections.append(connection)

    def _transmit(self, dealer: "Dealer") -> None:
        assert dealer.connection is not None
        for _ in range(self._chance.randint(1, len(dealer.unsent))):
            dealer.connection.to_router.append(dealer.unsent.popleft())

    def _arrive(self, connection: Connection) -> None:
        for _ in range(self._chance.randint(1, len(connection.to_router))):
            body = connection.to_router.popleft()
            connection.router.inbox.append((connection, body))

    def _arrive_late(self, answer: "tuple[Dealer, bytes]") -> None:
        self.late.remove(answer)
        answer[0].deliver(answer[1])


class Router:
    """In place of :class:`discod.router.Router`."""

    def __init__(self, network: Network, path: Path) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as name:
            name.bind(str(path))
        self.peers: dict[bytes, Connection] = {}
        self.inbox: deque[tuple[Connection, bytes]] = deque()
        self.ended: deque[int] = deque()
        flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK
        self.fds = os.eventfd(0, flags), os.eventfd(0, flags)
        self._source = -1
        self._network = network
        network.routers.append(self)

    def receive(self, handle: Callable[[bytes, bytes], None], most: int) -> bool:
        """As the real one's."""
        for _ in range(min(most, len(self.inbox))):
            connection, body = self.inbox.popleft()
            self._source = connection.number
            handle(connection.dealer.identity, body)
        return bool(self.inbox)

    def end(self, number: int) -> None:
        """A connection has ended, of which the second fd tells."""
        self.ended.append(number)
        if self in self._network.routers:
            os.eventfd_write(self.fds[1], 1)

    def source_fd(self) -> int:
        """As the real one's."""
        return self._source

    def take_connections(
        self, accepted: Callable[[int], None], ended: Callable[[int], None], most: int
    ) -> bool:
        """As the real one's, for those that have ended; there are no others than clients'."""
        _eat_edge(self.fds[1])
        for _ in range(min(most, len(self.ended))):
            ended(self.ended.popleft())
        return bool(self.ended)

    def send(self, identity: bytes, body: bytes) -> bool:
        """As the real one's."""
        if identity not in self.peers:
            return False
        self.peers[identity].to_dealer.append(body)
        return True

    def close(self) -> None:
        """Gone, with all connections; idempotent."""
        if self in self._network.routers:
            self._network.routers.remove(self)
            for connection in list(self.peers.values()):
                self._network.sever(connection)
            for fd in self.fds:
                os.close(fd)


class Monitor:
    """The events of one DEALER: whether it has lost its connection. ``FD`` tells of changes."""

    def __init__(self, dealer: "Dealer") -> None:
        self._dealer = dealer
        self.FD = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def getsockopt(self, option: int) -> int:
        """EVENTS."""
        _eat_edge(self.FD)
        return zmq.POLLIN if self._dealer.severed else 0

    def close(self, linger: int | None = None) -> None:
        """Idempotent."""
        if self.FD >= 0:
            os.close(self.FD)
            self.FD = -1


class Dealer:
    """In place of a zmq socket of the client's. ``FD`` tells of changes: any call eats the edge."""

    def __init__(self, network: Network) -> None:
        self.identity = b""
        self.unsent: deque[bytes] = deque()
        self.received: deque[bytes] = deque()
        self.connection: Connection | None = None
        self.severed = False
        self.FD = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._monitor = Monitor(self)
        self._network = network

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self.FD < 0

    def set(self, option: int, value: Any) -> None:
        """IDENTITY counts."""
        if option == zmq.IDENTITY:
            self.identity = value

    def connect(self, address: str) -> None:
        """From now on it connects, and connects again."""
        self._network.dealers.append(self)

    def get_monitor_socket(self, events: int) -> Monitor:
        """Its events."""
        return self._monitor

    def disable_monitor(self) -> None:
        """Nothing is told any more."""

    def deliver(self, body: bytes) -> None:
        """A message arrives."""
        self.received.append(body)
        os.eventfd_write(self.FD, 1)

    def sever(self) -> None:
        """The connection has ended."""
        self.severed = True
        if self._monitor.FD >= 0:
            os.eventfd_write(self._monitor.FD, 1)

    def send(self, body: bytes, flags: int) -> None:
        """Never waits."""
        _eat_edge(self.FD)
        self.unsent.append(body)

    def getsockopt(self, option: int) -> int:
        """EVENTS."""
        _eat_edge(self.FD)
        return zmq.POLLIN if self.received else 0

    def recv(self, flags: int) -> bytes:
        """The next message, which is there."""
        return self.received.popleft()

    def close(self, linger: int | None = None) -> None:
        """Idempotent."""
        self._monitor.close()
        if self in self._network.dealers:
            self._network.forget(self)
        if self.FD >= 0:
            os.close(self.FD)
            self.FD = -1


def _eat_edge(fd: int) -> None:
    with contextlib.suppress(BlockingIOError):
        os.eventfd_read(fd)


class Context:
    """In place of ``zmq.Context`` in the client."""

    def __init__(self, network: Network) -> None:
        self._network = network

    def socket(self, kind: int) -> Dealer:
        """A DEALER."""
        return Dealer(self._network)

    def term(self) -> None:
        """Nothing is open."""
