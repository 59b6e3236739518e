"""The copies of one tensor through a device ring, out and in, and what ends them.

The steps of a copy off the GPU:

1. trainer: an extent of the ring and a free event are taken; the tensor is copied to the extent by
   the calling thread's stream, and the event recorded there. What comes later on that stream may
   change or free the tensor.
2. trainer: ``CopyOut`` names extent, slot and event.
3. GPU process: when the event is done, its stream copies from the extent to the slot.
4. daemon: the answer. The extent and the event are free, and the tensor has landed.

Of a copy back to it:

1. trainer: the memory is allocated; an extent is taken; ``CopyIn`` names slot and extent.
2. GPU process: copies from the slot to the extent; the daemon answers.
3. trainer: a stream of the ring's waits for the memory to be free, and copies the extent to it.
4. When that has ended, the extent is free, and the tensor has landed.

A tensor larger than a chunk goes in several copies. What the daemon fails to copy is copied here.
Which device these belong to, and when it gives up on the daemon, is in :mod:`disco_client.ipc`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from disco_client.arena import Arena
from disco_client.devices.streamed import StreamTicket
from disco_client.ring import Ring
from disco_client.session import Session
from discod.wire.messages import CopyIn, CopyOut, Failed, Reply


@dataclass(frozen=True, slots=True)
class Lane:
    """All that the copies of one GPU share.

    Attributes:
        session: Whose daemon copies.
        arena: The session's.
        ring: The GPU's.
        module: As for :class:`disco_client.devices.streamed.Streamed`.
        stream: Where this process copies out of the ring.
        failed: Told what the daemon says when it cannot copy.
    """

    session: Session
    arena: Arena
    ring: Ring
    module: Any
    stream: Any
    failed: Callable[[str], None]

    def copy_by_itself(self, target: int, source: int, nbytes: int) -> None:
        """What the daemon did not do: between the arena and the GPU, on ``stream``."""
        with self.ring.driver.on(self.ring.ordinal):
            self.ring.driver.copy_async(target, source, nbytes, self.stream.cuda_stream)


@dataclass(slots=True)
class _Piece:
    """One copy: ``nbytes`` of the tensor at ``start``, through the ring at ``offset``.

    Attributes:
        event: Out, the interprocess event's number; in, the torch event after the copy out of it.
        failed: The daemon could not copy it.
    """

    start: int
    nbytes: int
    offset: int
    event: Any = None
    answered: bool = False
    failed: bool = False


class OutCopies:
    """The copies of one tensor off the GPU. See :class:`disco_client.devices.interface.Ticket`.

    Args:
        lane: The GPU's.
        slot: Where in the arena.
    """

    needs_daemon = True

    def __init__(self, lane: Lane, slot: int) -> None:
        self._lane = lane
        self._slot = slot
        self._pieces: list[_Piece] = []

    def start(self, flat: torch.Tensor) -> None:
        """Steps 1 and 2 for all of ``flat``. Waits for room in the ring."""
        lane, ring = self._lane, self._lane.ring
        stream = lane.module.current_stream(flat.device).cuda_stream
        for start in range(0, flat.nbytes, ring.chunk_bytes):
            nbytes = min(ring.chunk_bytes, flat.nbytes - start)
            piece = lane.session.wait_for(partial(self._take, start, nbytes))
            try:
                with ring.driver.on(ring.ordinal):
                    target, source = ring.address + piece.offset, flat.data_ptr() + start
                    ring.driver.copy_async(target, source, nbytes, stream)
                    ring.driver.event_record(ring.events[piece.event], stream)
            except BaseException:
                lane.session.wait_for(partial(self._give, piece))
                raise
            lane.session.wait_for(partial(self._send, piece))

    def done(self) -> bool:
        """As :meth:`interface.Ticket.done`."""
        for piece in [piece for piece in self._pieces if piece.answered]:
            if piece.failed:
                self._rescue(piece)
            self._give(piece)
            self._pieces.remove(piece)
        return not self._pieces

    def wait(self) -> None:
        """As :meth:`interface.Ticket.wait`: nothing needs the tensor, or what was its memory."""

    def join(self, flat: torch.Tensor) -> None:
        """As :meth:`interface.Ticket.join`: the tensor was copied in its stream's order."""

    def _take(self, start: int, nbytes: int) -> _Piece | None:
        self.done()
        ring = self._lane.ring
        offset = ring.take(nbytes)
        event = None if offset is None else ring.take_event()
        if offset is None:
            return None
        if event is None:
            ring.give(offset, nbytes)
            return None
        return _Piece(start, nbytes, offset, event)

    def _send(self, piece: _Piece) -> bool:
        self._pieces.append(piece)
        make = partial(
            CopyOut,
            ring=self._lane.ring.number,
            offset=piece.offset,
            slot=self._slot + piece.start,
            length=piece.nbytes,
            event=piece.event,
        )
        self._lane.session.link.request(make, partial(self._answered, piece))
        return True

    def _answered(self, piece: _Piece, reply: Reply) -> None:
        piece.answered = True
        if isinstance(reply, Failed):
            piece.failed = True
            self._lane.failed(reply.text)

    def _give(self, piece: _Piece) -> bool:
        self._lane.ring.give(piece.offset, piece.nbytes)
        self._lane.ring.give_event(piece.event)
        return True

    def _rescue(self, piece: _Piece) -> None:
        lane = self._lane
        target = lane.arena.address + self._slot + piece.start
        with lane.ring.driver.on(lane.ring.ordinal):
            event = lane.ring.events[piece.event]
            lane.ring.driver.stream_wait_event(lane.stream.cuda_stream, event)
        lane.copy_by_itself(target, lane.ring.address + piece.offset, piece.nbytes)
        lane.stream.synchronize()


class InCopies:
    """The copies of one tensor back to the GPU. See :class:`disco_client.devices.interface.Ticket`.

    Args:
        lane: The GPU's.
        slot: Where in the arena.
        flat: The memory to fill, just allocated on the calling thread's stream.
    """

    needs_daemon = True

    def __init__(self, lane: Lane, slot: int, flat: torch.Tensor) -> None:
        self._lane = lane
        self._slot = slot
        self._address = flat.data_ptr()
        self._nbytes = flat.nbytes
        self._pieces: list[_Piece] = []
        self._started = 0
        self._queued = 0
        self._allocated = lane.module.current_stream(flat.device).record_event()
        self._last: Any = self._allocated
        self._abandoned = False

    def start(self) -> None:
        """Steps 1 and 2 for all of it. Waits for room in the ring."""
        chunk = self._lane.ring.chunk_bytes
        for start in range(0, self._nbytes, chunk):
            nbytes = min(chunk, self._nbytes - start)
            self._lane.session.wait_for(partial(self._send, start, nbytes), look=True)

    def done(self) -> bool:
        """As :meth:`interface.Ticket.done`: steps 3 and 4, as far as they can be made."""
        for piece in list(self._pieces):
            if piece.answered and piece.event is None:
                self._queue(piece)
            if piece.event is not None and piece.event.query():
                self._lane.ring.give(piece.offset, piece.nbytes)
                self._pieces.remove(piece)
        return not self._pieces and self._started == self._nbytes

    def wait(self) -> None:
        """As :meth:`interface.Ticket.wait`: what is not in the memory yet will not be put there."""
        self._abandoned = True
        self._last.synchronize()
        for piece in self._pieces:
            if piece.answered:
                self._lane.ring.leave(piece.offset, piece.nbytes)

    def join(self, flat: torch.Tensor) -> None:
        """As :meth:`interface.Ticket.join`."""
        self._lane.session.wait_for(self._all_queued)
        StreamTicket(self._lane.module, self._last, lent=True).join(flat)

    def _all_queued(self) -> bool:
        self.done()
        return self._queued == self._nbytes

    def _send(self, start: int, nbytes: int) -> bool:
        """Whether there was room in the ring."""
        self.done()
        offset = self._lane.ring.take(nbytes)
        if offset is None:
            return False
        piece = _Piece(start, nbytes, offset)
        self._pieces.append(piece)
        self._started += nbytes
        make = partial(
            CopyIn,
            ring=self._lane.ring.number,
            offset=offset,
            slot=self._slot + start,
            length=nbytes,
        )
        self._lane.session.link.request(make, partial(self._answered, piece))
        return True

    def _answered(self, piece: _Piece, reply: Reply) -> None:
        if self._abandoned:
            self._lane.ring.give(piece.offset, piece.nbytes)
            return
        piece.answered = True
        if isinstance(reply, Failed):
            piece.failed = True
            self._lane.failed(reply.text)

    def _queue(self, piece: _Piece) -> None:
        lane = self._lane
        source = lane.ring.address + piece.offset
        if piece.failed:
            source = lane.arena.address + self._slot + piece.start
        lane.stream.wait_event(self._allocated)
        lane.copy_by_itself(self._address + piece.start, source, piece.nbytes)
        piece.event = self._last = lane.stream.record_event()
        self._queued += piece.nbytes
