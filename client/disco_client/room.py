"""How room is made in the arena, and when to give up.

In this order, each farthest next use first: evicting CLEAN blobs, which costs nothing; writing
DIRTY ones, whose slots can be had when that is done. Blobs on loan are left alone.
"""

from disco_client.blobs import State
from disco_client.errors import ArenaFull, RoomError, ScratchError, ScratchFull
from disco_client.holdings import Holdings
from disco_client.plan import staging_bytes
from discod.wire.sizes import format_size


class Room:
    """Finds slots in the arena of ``held``, and keeps it from filling up."""

    def __init__(self, held: Holdings) -> None:
        self._held = held
        self._retried = False

    def need(self, size_bytes: int) -> int | None:
        """A slot, or None: wait. When it raises, there are no instructions.

        A disk that is full or out of use is tried once more before that, since others may have
        made room, and not again until a write worked, a slot was found, or this has raised: a full
        disk neither hangs nor spins.

        Raises:
            ArenaFull, ScratchFull, ScratchError: Nothing is in flight, so waiting is pointless.
        """
        held = self._held
        slot = self.make(size_bytes)
        if slot is not None:
            self._retried = False
            return slot
        if held.in_flight:
            return None
        for blob in list(held.waiting.values()):
            # Read for a load that was not called again. It may yet be, so it goes last.
            if blob.state is State.CLEAN and not blob.pins:
                held.evict(blob)
                slot = held.arena.allocate(size_bytes)
                if slot is not None:
                    return slot
        if held.avoided_files and len(held.dirty) and not self._retried:
            self._retried = True
            held.retry_files()
            slot = self.make(size_bytes)
            if slot is not None or held.in_flight:
                return slot
        self._retried = False
        raise self._no_room(size_bytes)

    def make(self, size_bytes: int) -> int | None:
        """A slot, evicting as needed; or None, and writes are under way if any can be."""
        arena = self._held.arena
        slot = arena.allocate(size_bytes)
        while slot is None and (victim := self._held.clean.first()) is not None:
            self._held.evict(victim)
            slot = arena.allocate(size_bytes)
        if slot is None:
            free = arena.free_bytes
            # Enough is free, but in pieces: what to write to join them is not known beforehand,
            # so as much as is needed is kept on its way until it fits.
            self._write_until(size_bytes - free if free < size_bytes else size_bytes)
        return slot

    def keep_watermark(self, largest_bytes: int) -> None:
        """Begin to write before the arena is full; ``largest_bytes``: of any blob seen."""
        held = self._held
        staying = held.arena.used_bytes - held.clean.total_bytes - held.leaving_bytes
        capacity = held.capacity_bytes
        excess = staying - (capacity - staging_bytes(capacity, largest_bytes))
        if excess > 0:
            self._write_until(held.leaving_bytes + excess)

    def forget_retry(self) -> None:
        """A write completed, or a cycle ended: a disk that is full again is worth another try."""
        self._retried = False

    def _write_until(self, leaving_bytes: int) -> None:
        """Start writes, farthest next use first, until that many bytes leave the arena."""
        held = self._held
        refused = []
        files = held.scratch.files
        while held.leaving_bytes < leaving_bytes and len(held.avoided_files) < files:
            blob = held.dirty.first()
            if blob is None:
                break
            held.want_write(blob)
            if not blob.leaving:
                refused.append(blob)
                held.dirty.discard(blob)
        for blob in refused:
            held.settle(blob)

    def _no_room(self, size_bytes: int) -> RoomError | ScratchError:
        held = self._held
        fact = (
            f"no room for a tensor of {format_size(size_bytes)}: "
            f"{format_size(held.arena.used_bytes)} of the arena's "
            f"{format_size(held.capacity_bytes)} are used and the largest free piece has "
            f"{format_size(held.arena.largest_free_bytes)}"
        )
        if len(held.dirty) and held.full_files:
            others = f" (and {held.failed_text})" if held.out_files else ""
            return ScratchFull(
                f"{fact}. Nor can the disk take any of it: {held.full_text}{others}. Or give the "
                "arena more with DISCOD_ARENA or connect(arena=)"
            )
        refused = any(blob.save_error and not blob.pins for blob in held.blobs.values())
        if refused or len(held.dirty):
            return ScratchError(
                f"{fact}; every scratch file refuses writes: {held.failed_text}; tensors saved "
                "before are safe in RAM; give the daemon a --scratch that works"
            )
        return ArenaFull(
            f"{fact}; what is used is held by loaded tensors that are still alive; drop some of "
            "them, or give the arena more with DISCOD_ARENA or connect(arena=)"
        )
