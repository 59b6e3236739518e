"""What the daemon and its process for a GPU say to each other, over a ``SOCK_SEQPACKET`` pair.

1. process: :class:`Ready`, once; when it says why not, the process then ends.
2. daemon: :class:`AddClient` with the arena's memfd, then requests about that client's rings.
3. process: one :class:`Ended` for each request, by its ``ticket``; requests end in any order.

Clients and tickets are numbers of the daemon's. A process that has ended has forgotten everything.
"""

import socket
from collections.abc import Sequence
from dataclasses import dataclass

from discod.wire.codec import Codec, WireError
from discod.wire.fds import receive_packet, send_packet

NO_EVENT = -1
"""``Copy.event`` of a copy from the arena into the ring."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Process: it has the GPU; or, with a text, why it cannot have it."""

    refusal: str


@dataclass(frozen=True, slots=True)
class AddClient:
    """Daemon: a client; fd: its arena's memfd. Not answered."""

    client: int
    arena_bytes: int


@dataclass(frozen=True, slots=True)
class RemoveClient:
    """Daemon: drop the client's copies, close its rings and unmap its arena; answered then."""

    ticket: int
    client: int


@dataclass(frozen=True, slots=True)
class AddRing:
    """Daemon: open a ring, as :class:`discod.wire.messages.OpenRing` says."""

    ticket: int
    client: int
    ring: int
    handle: bytes
    ring_bytes: int
    events: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class RemoveRing:
    """Daemon: close a ring, after the copies asked for before."""

    ticket: int
    client: int
    ring: int


@dataclass(frozen=True, slots=True)
class Copy:
    """Daemon: copy out of the ring after its event, or with ``NO_EVENT`` into it."""

    ticket: int
    client: int
    ring: int
    offset: int
    slot: int
    length: int
    event: int


@dataclass(frozen=True, slots=True)
class Probe:
    """Daemon: answered at once by a process that is not stuck."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Ended:
    """Process: the request has ended; ``error`` says why it failed, and is empty otherwise."""

    ticket: int
    error: str


RingWork = AddRing | RemoveRing | Copy
ToProcess = AddClient | RemoveClient | RingWork | Probe
ToDaemon = Ready | Ended

_TO_PROCESS = (AddClient, RemoveClient, AddRing, RemoveRing, Copy, Probe)
_TO_DAEMON = (Ready, Ended)
_codec = Codec(dict(enumerate((*_TO_PROCESS, *_TO_DAEMON))))


def send(connection: socket.socket, message: ToProcess | ToDaemon, fds: Sequence[int] = ()) -> None:
    """Send a message with its fds. Raises ``OSError`` as ``sendmsg`` does."""
    send_packet(connection, _codec.encode(message), fds)


def receive_in_process(connection: socket.socket) -> tuple[ToProcess, list[int]]:
    """The daemon's next message and its fds; raises as :func:`receive_packet`, and WireError."""
    data, fds = receive_packet(connection)
    message: ToProcess = _codec.decode(data, _TO_PROCESS)
    return message, fds


def receive_in_daemon(connection: socket.socket) -> ToDaemon:
    """The process's next message; raises as :func:`receive_packet`, and WireError."""
    data, fds = receive_packet(connection)
    if fds:
        raise WireError("fds came from the GPU process")
    message: ToDaemon = _codec.decode(data, _TO_DAEMON)
    return message
