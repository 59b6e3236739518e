"""What is read back, and when: for loads that wait, and ahead of those to come."""

from disco_client.blobs import Blob, State
from disco_client.errors import RoomError, ScratchError, afresh
from disco_client.holdings import Holdings
from disco_client.instructions import Promote
from disco_client.plan import Order
from disco_client.room import Room


class Reader:
    """Starts reads into the arena of ``held``, urgent ones first."""

    def __init__(self, held: Holdings, room: Room, order: Order) -> None:
        self._held = held
        self._room = room
        self._order = order

    def wait_for(self, blob: Blob) -> bool:
        """A load found the blob DISK or READING: see that it is read, urgently.

        Returns:
            Whether this is the load's first call.

        Raises:
            ArenaFull, ScratchFull, ScratchError: As :meth:`Room.need`; nothing waits then.
            Exception: What the last read failed with; the next call reads again.
        """
        waiting = self._held.waiting
        if blob.read_error is not None:
            error, blob.read_error = blob.read_error, None
            waiting.pop(blob.id, None)
            self._held.settle(blob)
            raise afresh(error)
        first = blob.id not in waiting
        waiting[blob.id] = blob
        self._held.settle(blob)
        if blob.state is State.READING:
            if not blob.urgent:
                blob.urgent = True
                self._held.tell(Promote(blob.id))
            return first
        try:
            slot = self._room.need(blob.size_bytes)
        except (RoomError, ScratchError):
            del waiting[blob.id]
            self._held.settle(blob)
            raise
        if slot is not None:
            self._held.start_read(blob, slot, urgent=True)
        return first

    def serve_waiting(self) -> bool:
        """Start the reads that loads wait for; False when there is no room for one."""
        for blob in list(self._held.waiting.values()):
            if blob.state is State.DISK and blob.read_error is None:
                slot = self._room.make(blob.size_bytes)
                if slot is None:
                    return False
                self._held.start_read(blob, slot, urgent=True)
        return True

    def fetch_ahead(self, limit: int | None, heed_plan: bool) -> None:
        """Start prefetch reads, soonest next use first, until one has no place.

        Args:
            limit: Most reads to start; None for no limit.
            heed_plan: Leave room for what the plan has yet to be saved before a blob is needed.
        """
        started = 0
        while limit is None or started < limit:
            candidates = [
                blob
                for members in self._held.groups.values()
                if members.may_prefetch and (blob := members.on_disk.first()) is not None
            ]
            if not candidates:
                return
            blob = min(candidates, key=self._held.next_use)
            if heed_plan and blob.index < 0:
                return  # kept from an earlier cycle: nothing says that it is needed in this one
            slot = self._room_ahead(blob, heed_plan)
            if slot is None:
                return
            self._held.start_read(blob, slot, urgent=False)
            started += 1

    def _room_ahead(self, blob: Blob, heed_plan: bool) -> int | None:
        """A slot that costs nothing which is needed sooner than ``blob``."""
        held = self._held
        obtainable = held.arena.free_bytes + held.clean.total_bytes
        if obtainable < blob.size_bytes:
            return None
        if heed_plan:
            planned = self._order.bytes_before_use(blob.index)
            if obtainable + held.leaving_bytes - blob.size_bytes < planned:
                return None
        slot = held.arena.allocate(blob.size_bytes)
        while slot is None:
            victim = held.clean.first()
            if victim is None or held.next_use(victim) <= held.next_use(blob):
                return None
            if not self._order.follows and not victim.used:
                return None  # newest first is a guess, and not worth a blob that is there
            held.evict(victim)
            slot = held.arena.allocate(blob.size_bytes)
        return slot
