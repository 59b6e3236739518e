"""A client's device rings: its requests about them are checked here, and given to the GPUs.

The client is a tenant (:mod:`discod.tenant`); the GPUs are those of :mod:`discod.gpus`.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from uuid import UUID

from discod.bounds import Refusal, check_pages, check_range
from discod.gpu_messages import NO_EVENT
from discod.gpu_seat import Seat
from discod.gpus import Gpus
from discod.logs import RateLimited
from discod.wire import MAX_ARENA_BYTES
from discod.wire.messages import (
    CloseRing,
    CopyIn,
    CopyOut,
    Done,
    Failed,
    Failure,
    OpenRing,
    Reply,
    RingRequest,
)

MAX_RINGS = 64
"""Of one client: a few for each GPU of the largest node."""
MAX_RING_BYTES = MAX_ARENA_BYTES
"""Above any GPU's memory; what it really has is checked when it is opened."""
MAX_EVENTS = 256
"""Of one ring: as many as the codec lets through."""
_UUID_BYTES = 16
_HANDLE_BYTES = 64

_failures = RateLimited(logging.getLogger(__name__))


@dataclass(slots=True)
class _Ring:
    request: OpenRing
    seat: Seat
    closing: bool = False

    def same(self, request: OpenRing) -> bool:
        """Whether it asks for what is there already."""
        known = self.request
        return (known.uuid, known.handle, known.ring_bytes, known.events) == (
            request.uuid,
            request.handle,
            request.ring_bytes,
            request.events,
        )


class Rings:
    """The rings of one client.

    Args:
        who: The client, for the log.
        gpus: The GPUs.
        arena_fd: The arena's memfd, open until :meth:`close` has called back.
        arena_bytes: Its size.
        answer: Sends a reply to the client.
    """

    def __init__(
        self,
        who: object,
        gpus: Gpus,
        arena_fd: int,
        arena_bytes: int,
        answer: Callable[[Reply], None],
    ) -> None:
        self._who = who
        self._gpus = gpus
        self._arena_fd = arena_fd
        self._arena_bytes = arena_bytes
        self._answer = answer
        self._rings: dict[int, _Ring] = {}
        self._seats: dict[bytes, Seat] = {}
        self._leaving = 0
        self._closing = False
        self._closed: Callable[[], None] | None = None
        self.unanswered: set[int] = set()

    @property
    def closed(self) -> bool:
        """Whether no GPU has anything of the client, for good."""
        return self._closing and not self._seats and not self._leaving

    def handle(self, request: RingRequest) -> None:
        """Start or answer a request; raises :class:`Refusal`."""
        match request:
            case OpenRing():
                self._open(request)
            case CloseRing():
                self._close(request)
            case CopyOut():
                self._copy(request, request.event)
            case CopyIn():
                self._copy(request, NO_EVENT)

    def close(self, closed: Callable[[], None]) -> None:
        """Give no more answers; call ``closed`` when no GPU has anything of the client's."""
        self._closing = True
        self.unanswered.clear()
        self._rings.clear()
        for uuid in list(self._seats):
            self._leave(uuid)
        self._closed = closed
        if self.closed:
            closed()

    def _open(self, request: OpenRing) -> None:
        if not 0 <= request.ring < MAX_RINGS:
            raise Refusal(f"ring {request.ring}: their numbers are below {MAX_RINGS}")
        if len(request.uuid) != _UUID_BYTES:
            raise Refusal(f"a UUID of {len(request.uuid)} bytes, not {_UUID_BYTES}")
        if any(len(handle) != _HANDLE_BYTES for handle in (request.handle, *request.events)):
            raise Refusal(f"an IPC handle that has not {_HANDLE_BYTES} bytes")
        if len(request.events) > MAX_EVENTS:
            raise Refusal(f"{len(request.events)} events: {MAX_EVENTS} are the most")
        check_pages(ring_bytes=request.ring_bytes)
        if not 0 < request.ring_bytes <= MAX_RING_BYTES:
            raise Refusal(f"a ring of {request.ring_bytes} bytes")
        known = self._rings.get(request.ring)
        if known is not None and (known.closing or not known.same(request)):
            raise Refusal(f"ring {request.ring} is open with other memory; close it first")
        seat = self._seats.get(request.uuid)
        if seat is None:
            seat = self._gpus.seat(request.uuid, self._arena_fd, self._arena_bytes)
            self._seats[request.uuid] = seat
        ring = self._rings[request.ring] = known or _Ring(request, seat)
        self.unanswered.add(request.seq)
        seat.open(
            request.ring,
            request.handle,
            request.ring_bytes,
            request.events,
            partial(self._opened, request, ring),
        )

    def _opened(self, request: OpenRing, ring: _Ring, error: str) -> None:
        if error and self._rings.get(request.ring) is ring and not ring.closing:
            self._forget(ring)
        self._ended(request, request.uuid, error)

    def _close(self, request: CloseRing) -> None:
        ring = self._rings.get(request.ring)
        if ring is None:
            self._answer(Done(request.seq, request.epoch, b""))
            return
        ring.closing = True
        self.unanswered.add(request.seq)
        ring.seat.close(request.ring, partial(self._ring_closed, request, ring))

    def _ring_closed(self, request: CloseRing, ring: _Ring, error: str) -> None:
        if self._rings.get(request.ring) is ring:
            self._forget(ring)
        self._ended(request, ring.request.uuid, error)

    def _copy(self, request: CopyOut | CopyIn, event: int) -> None:
        ring = self._rings.get(request.ring)
        if ring is None or ring.closing:
            raise Refusal(f"ring {request.ring} is not open")
        check_pages(offset=request.offset, slot=request.slot)
        check_range(request.slot, request.length, self._arena_bytes, "its arena")
        check_range(request.offset, request.length, ring.request.ring_bytes, "the ring")
        if isinstance(request, CopyOut) and not 0 <= event < len(ring.request.events):
            raise Refusal(f"event {event} of the ring's {len(ring.request.events)}")
        self.unanswered.add(request.seq)
        ring.seat.copy(
            request.ring,
            request.offset,
            request.slot,
            request.length,
            event,
            partial(self._ended, request, ring.request.uuid),
        )

    def _forget(self, ring: _Ring) -> None:
        """The ring is no more; with the last one on its GPU, the client leaves that."""
        del self._rings[ring.request.ring]
        if all(other.seat is not ring.seat for other in self._rings.values()):
            self._leave(ring.request.uuid)

    def _leave(self, uuid: bytes) -> None:
        self._leaving += 1
        self._seats.pop(uuid).leave(self._left)

    def _left(self) -> None:
        self._leaving -= 1
        if self._closed is not None and self.closed:
            self._closed()

    def _ended(self, request: RingRequest, uuid: bytes, error: str) -> None:
        if self._closing:
            return
        self.unanswered.discard(request.seq)
        if not error:
            self._answer(Done(request.seq, request.epoch, b""))
            return
        text = f"{type(request).__name__} on GPU-{UUID(bytes=uuid)} failed: {error}"
        _failures.warning("%s: %s", self._who, text)
        self._answer(Failed(request.seq, request.epoch, Failure.GPU, 0, text))
