"""A client's seat at a GPU: what it asks of it, and what is not answered yet.

How requests get to the GPU's process and back is in :mod:`discod.gpu_host`.
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol

from discod.gpu_messages import AddRing, Copy, RemoveRing, RingWork
from discod.loop import Timer

Outcome = Callable[[str], None]
"""Called once on the event loop: with why it failed, or ""."""


class Work:
    """A request that is not answered.

    Args:
        message: The request.
        outcome: Told how it ended.
        again: Opens a ring that was open in the process before this one.
    """

    __slots__ = ("again", "message", "outcome")

    def __init__(self, message: RingWork, outcome: Outcome, *, again: bool = False) -> None:
        self.message = message
        self.outcome = outcome
        self.again = again

    def fail(self, error: str) -> None:
        """End it without a process, in which nothing is open then."""
        self.outcome("" if isinstance(self.message, RemoveRing) else error)


class Host(Protocol):
    """What a seat asks its GPU."""

    def ticket(self) -> int:
        """A number for a request."""

    def submit(self, seat: "Seat", message: RingWork, outcome: Outcome) -> None:
        """Queue a request."""

    def remove(self, seat: "Seat", left: Callable[[], None]) -> None:
        """The client leaves."""


class Seat:
    """A client at one GPU. Made by :meth:`discod.gpus.Gpus.seat`.

    Args:
        gpu: The GPU.
        number: The client's, for the process.
        arena_fd: Its arena's memfd, open until the client has left.
        arena_bytes: Its size.

    Attributes:
        added: Whether the GPU's present process knows the client.
        rings: Those that are open, to be opened again in the next process.
        queue: Requests that the process has not been sent.
        sent: Those that it has, by ticket.
        left: Set while the client is leaving.
        late: What happens when that takes too long.
        lost: Why the rings are closed that were open, or "".
    """

    def __init__(self, gpu: Host, number: int, arena_fd: int, arena_bytes: int) -> None:
        self.number = number
        self.arena_fd = arena_fd
        self.arena_bytes = arena_bytes
        self.added = False
        self.rings: dict[int, AddRing] = {}
        self.queue: deque[Work] = deque()
        self.sent: dict[int, Work] = {}
        self.left: Callable[[], None] | None = None
        self.late: Timer | None = None
        self.lost = ""
        self._gpu = gpu

    def take_all(self) -> list[Work]:
        """What is unanswered, in order; the seat has nothing of it any more."""
        works = [*self.sent.values(), *self.queue]
        self.sent.clear()
        self.queue.clear()
        return works

    def open(
        self, ring: int, handle: bytes, ring_bytes: int, events: tuple[bytes, ...], outcome: Outcome
    ) -> None:
        """Open a ring; once it is, it stays open over restarts of the process."""
        self.lost = ""
        ticket = self._gpu.ticket()
        message = AddRing(ticket, self.number, ring, handle, ring_bytes, events)
        self._gpu.submit(self, message, outcome)

    def close(self, ring: int, outcome: Outcome) -> None:
        """Close a ring; it never fails, and when it is answered nothing has the ring open."""
        self._gpu.submit(self, RemoveRing(self._gpu.ticket(), self.number, ring), outcome)

    def copy(
        self, ring: int, offset: int, slot: int, length: int, event: int, outcome: Outcome
    ) -> None:
        """Copy, as :class:`discod.gpu_messages.Copy` says; the bounds have been checked."""
        if self.lost:
            outcome(self.lost)
            return
        ticket = self._gpu.ticket()
        message = Copy(ticket, self.number, ring, offset, slot, length, event)
        self._gpu.submit(self, message, outcome)

    def leave(self, left: Callable[[], None]) -> None:
        """Fail all that is unanswered; ``left`` is called when nothing has the arena mapped."""
        self._gpu.remove(self, left)
