"""One client in the process of a GPU: its arena, its rings, and its copies in each direction.

No stream waits for another process
-----------------------------------
A copy is given to its stream only once the client's event is done. The stream is then told to wait
for that event as well, so that it sees what the client's stream wrote, but it never really waits.
So a client that hangs or dies with an event that is never done holds nothing up: what is in a
stream ends within milliseconds, and the calls that wait for the whole GPU (closing memory,
unpinning, copies of memory that is not pinned) do not wait for any client's training.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from discod.cuda_driver import CudaError, Driver
from discod.gpu_arena import GpuArena
from discod.gpu_messages import NO_EVENT, AddRing, Copy, RemoveRing

DEPTH = 4
"""Copies in a stream at a time: enough to keep the copy engine busy, few enough to end soon."""


@dataclass(frozen=True, slots=True)
class _Ring:
    handle: bytes
    address: int
    events: tuple[int, ...]


@dataclass(slots=True)
class _Running:
    copy: Copy
    event: int
    error: str


class _Lane:
    """The copies of one direction: in order, through a stream of their own."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.stream = driver.stream_create()
        self.waiting: deque[Copy] = deque()
        self.running: deque[_Running] = deque()
        self._spare_events: list[int] = []

    def run(self, copy: Copy, error: str) -> None:
        """Account for a copy that was given to the stream, or as much of it as ``error`` let."""
        event = self._spare_events.pop() if self._spare_events else self._new_event()
        self._driver.event_record(event, self.stream)
        self.running.append(_Running(copy, event, error))

    def ended(self) -> Iterator[_Running]:
        """The copies that have ended since."""
        while self.running and self._driver.event_query(self.running[0].event):
            running = self.running.popleft()
            self._spare_events.append(running.event)
            yield running

    def uses(self, ring: int) -> bool:
        """Whether a copy of the ring is waiting or running."""
        return any(copy.ring == ring for copy in self.waiting) or any(
            running.copy.ring == ring for running in self.running
        )

    def close(self) -> None:
        """Give the stream and the events back; nothing may be running."""
        for event in self._spare_events:
            self._driver.event_destroy(event)
        self._driver.stream_destroy(self.stream)

    def _new_event(self) -> int:
        return self._driver.event_create(interprocess=False)


class GpuClient:
    """A client.

    Args:
        driver: CUDA, with a current context.
        arena: Its arena, closed with the client.
        ended: Told the ticket of each request that has ended, and why it failed, or "".

    Attributes:
        left: Nothing of it is left; it must not be used any more.

    Notes:
        Requests of it that fail are told; a ``CudaError`` raised here means that the process is of
        no use any more.
    """

    def __init__(self, driver: Driver, arena: GpuArena, ended: Callable[[int, str], None]) -> None:
        self._driver = driver
        self._arena = arena
        self._ended = ended
        self._rings: dict[int, _Ring] = {}
        self._closing_rings: deque[RemoveRing] = deque()
        self._out = _Lane(driver)
        self._in = _Lane(driver)
        self._leave_ticket: int | None = None
        self.left = False

    @property
    def busy(self) -> bool:
        """Whether :meth:`advance` has something to wait for."""
        lanes = any(lane.waiting or lane.running for lane in (self._out, self._in))
        return lanes or bool(self._closing_rings) or self._leave_ticket is not None

    def add_ring(self, request: AddRing) -> None:
        """Open a ring. Of one that is open already, nothing but the same again."""
        known = self._rings.get(request.ring)
        if known is None:
            try:
                self._rings[request.ring] = self._open(request)
            except (CudaError, ValueError) as error:
                self._ended(request.ticket, str(error))
                return
        elif known.handle != request.handle:
            self._ended(request.ticket, f"ring {request.ring} is open with other memory")
            return
        self._ended(request.ticket, "")

    def remove_ring(self, request: RemoveRing) -> None:
        """Close a ring once its copies have ended."""
        self._closing_rings.append(request)

    def copy(self, request: Copy) -> None:
        """Queue a copy."""
        lane = self._in if request.event == NO_EVENT else self._out
        lane.waiting.append(request)

    def leave(self, ticket: int) -> None:
        """Drop what has not begun, and close everything in the course of :meth:`advance`."""
        self._leave_ticket = ticket
        for lane in (self._out, self._in):
            lane.waiting.clear()

    def advance(self) -> bool:
        """Do what can be done without waiting. True when something was."""
        progress = False
        for lane in (self._out, self._in):
            for running in lane.ended():
                progress = True
                self._ended(running.copy.ticket, running.error)
            while lane.waiting and len(lane.running) < DEPTH and self._may_begin(lane.waiting[0]):
                progress = True
                self._begin(lane, lane.waiting.popleft())
        while self._closing_rings and not self._uses(self._closing_rings[0].ring):
            progress = True
            request = self._closing_rings.popleft()
            self._close_ring(request.ring)
            self._ended(request.ticket, "")
        return self._leave_some() or progress

    def _leave_some(self) -> bool:
        """Do a part of the leaving, in a few milliseconds. True when something was done."""
        if self._leave_ticket is None or self._out.running or self._in.running:
            return False
        if self._arena.unpin_some():
            return True
        for ring in list(self._rings):
            self._close_ring(ring)
        for lane in (self._out, self._in):
            lane.close()
        self._arena.close()
        self._ended(self._leave_ticket, "")
        self.left = True
        return True

    def _open(self, request: AddRing) -> _Ring:
        driver = self._driver
        address = driver.ipc_open_mem(request.handle)
        events: list[int] = []
        try:
            base, size_bytes = driver.address_range(address)
            if address + request.ring_bytes > base + size_bytes:
                raise ValueError(f"the ring's memory has less than {request.ring_bytes} bytes")
            for handle in request.events:
                events.append(driver.ipc_open_event(handle))
        except (CudaError, ValueError):
            for event in events:
                driver.event_destroy(event)
            driver.ipc_close_mem(address)
            raise
        return _Ring(request.handle, address, tuple(events))

    def _close_ring(self, number: int) -> None:
        ring = self._rings.pop(number, None)
        if ring is not None:
            for event in ring.events:
                self._driver.event_destroy(event)
            self._driver.ipc_close_mem(ring.address)

    def _uses(self, ring: int) -> bool:
        return self._out.uses(ring) or self._in.uses(ring)

    def _may_begin(self, copy: Copy) -> bool:
        """See "No stream waits for another process" above. What can only fail may begin."""
        ring = self._rings.get(copy.ring)
        return (
            ring is None
            or copy.event == NO_EVENT
            or self._driver.event_query(ring.events[copy.event])
        )

    def _begin(self, lane: _Lane, copy: Copy) -> None:
        ring = self._rings.get(copy.ring)
        if ring is None:
            self._ended(copy.ticket, f"ring {copy.ring} is not open")
            return
        error = ""
        try:
            if copy.event != NO_EVENT:
                self._driver.stream_wait_event(lane.stream, ring.events[copy.event])
            address = ring.address + copy.offset
            for arena_address, length in self._arena.pieces(copy.slot, copy.length):
                ends = (arena_address, address) if lane is self._out else (address, arena_address)
                self._driver.copy_async(*ends, length, lane.stream)
                address += length
        except CudaError as failure:
            # Parts of it may be under way: it has ended when the stream has come to here.
            error = str(failure)
        lane.run(copy, error)
