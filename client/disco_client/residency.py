"""Which blobs stay in RAM, which go to disk, what is prefetched: the policy, without any I/O.

Calls and completions go in, instructions come out: the session executes them and reports every
write and read through :meth:`Residency.write_done` and :meth:`Residency.read_done`, exactly once.
Single-threaded, no clock. ``extents.py`` finds the bytes, ``plan.py`` knows what is needed when,
``blobs.py`` has the states.

What makes room, in this order, each farthest next use first: evicting CLEAN blobs, which costs
nothing; writing DIRTY ones. Blobs on loan are never moved or written. A slot or extent is reused
only when nothing in flight touches it any more, whatever became of its blob.
"""

from disco_client.blobs import Blob, Group, Io, Ranking, State
from disco_client.errors import (
    ArenaFull,
    BlobModified,
    BlobTooLarge,
    HandleReleased,
    RoomError,
    ScratchError,
    ScratchFull,
)
from disco_client.extents import ExtentAllocator, ScratchSpace
from disco_client.instructions import (
    Cancel,
    Counters,
    Instruction,
    Promote,
    StartRead,
    StartWrite,
    WriteFailure,
)
from disco_client.plan import Order, staging_bytes
from discod.wire import PAGE_BYTES
from discod.wire.messages import Failure
from discod.wire.sizes import format_size

__all__ = [
    "Cancel",
    "Counters",
    "Group",
    "Instruction",
    "Promote",
    "Residency",
    "StartRead",
    "StartWrite",
    "State",
    "WriteFailure",
]


class Residency:
    """All blobs of a process: their states, their places, and what to do next.

    Methods that return instructions must have them executed in order. A method that raises has
    none to execute, and has changed nothing that the caller would have to undo.

    Args:
        capacity_bytes: Size of the arena; a positive multiple of ``PAGE_BYTES``.
        files: Number of scratch files, at least 1.

    Raises:
        ValueError: Either is out of its range.
    """

    def __init__(self, capacity_bytes: int, files: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.arena = ExtentAllocator(capacity_bytes)
        """Slots; to look at only."""
        self.scratch = ScratchSpace(files)
        """Extents; to look at only."""
        self.live_blobs = 0
        """Blobs that are not freed."""
        self.saved_bytes = 0
        self.written_bytes = 0
        self.elided_bytes = 0
        self.read_bytes = 0
        self.prefetch_hits = 0
        self.prefetch_misses = 0
        self.last_cycle = Counters()
        """What the last finished cycle added to the counters."""
        self._cycle_start = Counters()
        self._blobs: dict[int, Blob] = {}
        self._next_id = 0
        self._order = Order(capacity_bytes)
        self._turned = False
        self._groups: dict[Group, None] = {}
        self._clean = Ranking(farthest_first=True)
        self._dirty = Ranking(farthest_first=True)
        self._waiting: dict[int, Blob] = {}
        self._leaving_bytes = 0
        self._in_flight = 0
        self._largest_bytes = 0
        self._full_files: set[int] = set()
        self._full_text = ""
        self._retried_full = False
        self._failed_blobs = 0
        self._failed_text = ""

    # Saving

    def try_place(self, size_bytes: int, group: Group) -> tuple[int | None, list[Instruction]]:
        """A new blob in state FILLING, or None: call again after a completion or an unpin.

        With None, what makes room has been started or was in flight.

        Raises:
            ValueError: The size is not a positive multiple of ``PAGE_BYTES``.
            BlobTooLarge: It is larger than the arena.
            ArenaFull: Nothing is in flight and all of the arena is on loan.
            ScratchFull: Nothing is in flight, and what could be written has no room on disk.
            ScratchError: Nothing is in flight, and the scratch files refuse every write.
        """
        if size_bytes <= 0 or size_bytes % PAGE_BYTES:
            raise ValueError(f"{size_bytes} bytes is not a positive multiple of {PAGE_BYTES}")
        if size_bytes > self.capacity_bytes:
            raise BlobTooLarge(
                f"a tensor of {format_size(size_bytes)} does not fit in the arena of "
                f"{format_size(self.capacity_bytes)}; it must be kept in RAM while it is written, "
                "so give the arena more with DISCOD_ARENA or connect(arena=)"
            )
        self._turned = False
        if self._order.expect_save(size_bytes):
            self._rank_all()
        instructions: list[Instruction] = []
        slot = self._need_room(size_bytes, instructions)
        if slot is None:
            return None, instructions
        blob = Blob(self._next_id, size_bytes, group, self._order.save(size_bytes), slot)
        self._next_id += 1
        self._blobs[blob.id] = blob
        self._groups[group] = None
        group.live += 1
        self.live_blobs += 1
        self._in_flight += 1
        self._largest_bytes = max(self._largest_bytes, size_bytes)
        return blob.id, instructions

    def filled(self, blob: int) -> list[Instruction]:
        """The copy into the slot has landed; due also for a blob that was freed meanwhile."""
        record = self._filling(blob)
        record.filling = False
        self._in_flight -= 1
        instructions: list[Instruction] = []
        if record.state is State.FREED:
            self._release(record)
        else:
            record.move(State.DIRTY)
            self.saved_bytes += record.size_bytes
            self._settle(record)
            if self._order.writes_at_once(record.index):
                self._want_write(record, instructions)
            elif not self._order.follows and not self._turned:
                self._keep_watermark(instructions)
        self._advance(instructions)
        return instructions

    def abandon(self, blob: int) -> list[Instruction]:
        """The copy into the slot failed and is over: the blob is freed, if it was not already."""
        record = self._filling(blob)
        record.filling = False
        self._in_flight -= 1
        if record.state is State.FREED:
            self._release(record)
        else:
            self._order.spoil()
            self._end(record)
        instructions: list[Instruction] = []
        self._advance(instructions)
        return instructions

    def saved(self, blob: int) -> bool:
        """Whether nothing is under way for saving it: no copy, no write, none wanted."""
        record = self._live(blob)
        return not record.wanted and record.state not in (State.FILLING, State.WRITING)

    def save_error(self, blob: int) -> ScratchError | None:
        """Why the blob could not be written to any file; it stays in RAM and can be loaded."""
        return self._live(blob).save_error

    # Loading

    def load(self, blob: int) -> tuple[bool, list[Instruction]]:
        """True: the data is in its slot, on loan until :meth:`unpin`; loans are counted.

        False: a copy or read is in flight, or room for the read is being made. Call again after a
        completion, or an unpin.

        Raises:
            HandleReleased: No such blob, or it is freed.
            BlobModified: A borrower changed the only copy, or the one that is still on loan.
            ArenaFull, ScratchFull, ScratchError: As in :meth:`try_place`, for the read's slot. The
                data is safe on disk, and the load may be tried again.
            Exception: What the failed read was reported with; a further load reads again.
        """
        record = self._live(blob)
        if record.lost or record.stale:
            raise BlobModified(
                f"blob {blob} was changed in place by a borrower of its "
                f"{format_size(record.size_bytes)}"
                + (
                    ", and was not on disk when the loan began, so that its data is gone; "
                    if record.lost
                    else ", and is still on loan; drop the changed tensor and load again, and "
                )
                + "do not write to loaded tensors, or clone() them first"
            )
        self._turned = True
        if not record.asked:
            record.asked = True
            if self._order.load(record.index):
                self._rank_all()
        if record.state is State.FILLING:
            return False, []
        if record.state in (State.DISK, State.READING):
            return False, self._await_read(record)
        instructions: list[Instruction] = []
        self._drop_want(record)
        if record.io is Io.WRITE and not record.cancelling:
            self._cancel(record, instructions)
        waited = self._waiting.pop(blob, None) is not None
        if record.prefetched:
            self.prefetch_hits += not waited
            self._set_prefetched(record, False)
        if record.pins == 0:
            record.clean_loan = record.state is State.CLEAN
        record.pins += 1
        record.used = True
        self._settle(record)
        self._advance(instructions)
        return True, instructions

    def unpin(self, blob: int, modified: bool = False) -> list[Instruction]:
        """A loan ended; works on freed blobs too.

        ``modified``: the borrower changed the bytes in place. The RAM copy is then dropped if the
        disk copy was complete before the loan, else the blob is lost: it is not written any more,
        and loading it raises ``BlobModified``.

        Raises:
            ValueError: The blob has no loan.
        """
        record = self._blobs.get(blob)
        if record is None or record.pins == 0:
            raise ValueError(f"blob {blob} has no loan that could end")
        instructions: list[Instruction] = []
        record.pins -= 1
        if record.state is State.FREED:
            if record.pins == 0 and record.io is not None:
                self._set_leaving(record, True)
            self._release(record)
        else:
            if modified and record.clean_loan:
                record.stale = True
            elif modified:
                record.lost = True
            if record.pins == 0 and record.stale:
                record.stale = False
                self._evict(record)
            self._settle(record)
        self._advance(instructions)
        return instructions

    def prefetch(self, n: int | None) -> list[Instruction]:
        """Start up to ``n`` prefetch reads now; None: as many as limits and arena allow."""
        instructions: list[Instruction] = []
        self._fetch_ahead(instructions, n, explicit=True)
        return instructions

    # The end of a blob

    def free(self, blob: int) -> list[Instruction]:
        """The blob's handle is gone. Its slot and extents stay taken while anything uses them.

        A blob that is being filled still needs its :meth:`filled` or :meth:`abandon`, one on loan
        its :meth:`unpin`, one in flight its completion.

        Raises:
            HandleReleased: No such blob, or it is freed.
        """
        record = self._live(blob)
        instructions: list[Instruction] = []
        if record.io is not None and not record.cancelling:
            self._cancel(record, instructions)
        if record.state is State.FILLING:
            self.saved_bytes += record.size_bytes
        if not record.written and record.io is not Io.WRITE:
            self.elided_bytes += record.size_bytes
        self._end(record)
        self._advance(instructions)
        return instructions

    # Completions

    def write_done(self, blob: int, failure: WriteFailure | None = None) -> list[Instruction]:
        """The blob's write is over, whether it was cancelled or not.

        Raises:
            ValueError: The blob has no write in flight.
        """
        record = self._completed(blob, Io.WRITE)
        group = record.group
        group.writing -= 1
        self._set_leaving(record, False)
        instructions: list[Instruction] = []
        if failure is None:
            record.written = True
            self.written_bytes += record.size_bytes
            self._retried_full = False
        else:
            self._note_failure(record, failure)
        if record.state is State.FREED:
            if failure is not None:
                self.elided_bytes += record.size_bytes
            self._release(record)
        elif failure is None:
            record.move(State.CLEAN)
            self._settle(record)
        else:
            record.move(State.DIRTY)
            self.scratch.free(record.pieces)
            record.pieces = ()
            self._settle(record)
            if failure.kind is not Failure.CANCELLED and record.ranking is self._dirty:
                self._want_write(record, instructions)
        self._start_wanted(group, instructions)
        self._advance(instructions)
        return instructions

    def read_done(
        self, blob: int, error: Exception | None = None, cancelled: bool = False
    ) -> list[Instruction]:
        """The blob's read is over. ``error`` is kept for the next load to raise.

        Raises:
            ValueError: The blob has no read in flight.
        """
        record = self._completed(blob, Io.READ)
        instructions: list[Instruction] = []
        self._set_leaving(record, False)
        failed = cancelled or error is not None
        if not failed:
            self.read_bytes += record.size_bytes
        if record.state is State.FREED:
            self._release(record)
        elif failed:
            record.move(State.DISK)
            self._free_slot(record)
            self._set_prefetched(record, False)
            record.read_error = error
            self._settle(record)
        else:
            record.move(State.CLEAN)
            self._settle(record)
        self._advance(instructions)
        return instructions

    def retry_disk(self) -> None:
        """Forget that the disk was full: there may be room again."""
        self._full_files.clear()

    # What is known

    def slot(self, blob: int) -> int:
        """The arena offset of the blob's slot.

        Raises:
            HandleReleased: No such blob.
            ValueError: The blob is not in RAM.
        """
        record = self._known(blob)
        if record.slot is None:
            raise ValueError(f"blob {blob} has no slot; it is {record.state}")
        return record.slot

    def state(self, blob: int) -> State:
        """The blob's state; FREED also when nothing is known of it any more."""
        record = self._blobs.get(blob)
        return State.FREED if record is None else record.state

    def size(self, blob: int) -> int:
        """Bytes of the blob's slot. Raises ``HandleReleased`` when there is no such blob."""
        return self._known(blob).size_bytes

    @property
    def arena_used_bytes(self) -> int:
        """Bytes of all slots."""
        return self.arena.used_bytes

    @property
    def totals(self) -> Counters:
        """All counters, since the start."""
        return Counters(
            saved_bytes=self.saved_bytes,
            written_bytes=self.written_bytes,
            elided_bytes=self.elided_bytes,
            read_bytes=self.read_bytes,
            prefetch_hits=self.prefetch_hits,
            prefetch_misses=self.prefetch_misses,
        )

    # Looking up

    def _known(self, blob: int) -> Blob:
        record = self._blobs.get(blob)
        if record is None:
            raise HandleReleased(f"blob {blob} is not known, or no longer")
        return record

    def _live(self, blob: int) -> Blob:
        record = self._known(blob)
        if record.state is State.FREED:
            raise HandleReleased(f"blob {blob} was freed")
        return record

    def _filling(self, blob: int) -> Blob:
        record = self._blobs.get(blob)
        if record is None or not record.filling:
            raise ValueError(f"blob {blob} is not being filled; it is {self.state(blob)}")
        return record

    def _completed(self, blob: int, io: Io) -> Blob:
        record = self._blobs.get(blob)
        if record is None or record.io is not io:
            raise ValueError(f"blob {blob} has no {io} in flight; it is {self.state(blob)}")
        record.io = None
        record.cancelling = False
        self._in_flight -= 1
        return record

    # Rankings

    def _settle(self, blob: Blob) -> None:
        """Put the blob into the ranking that its condition asks for, and out of any other."""
        ranking = self._ranking_for(blob)
        if blob.ranking is not None and blob.ranking is not ranking:
            blob.ranking.discard(blob)
        blob.ranking = ranking
        if ranking is not None:
            ranking.add(blob, self._order.next_use(blob.index, blob.used))

    def _ranking_for(self, blob: Blob) -> Ranking | None:
        if blob.pins or blob.id in self._waiting:
            return None
        match blob.state:
            case State.CLEAN:
                return self._clean
            case State.DIRTY if blob.wanted:
                return blob.group.wanted
            case State.DIRTY if not blob.lost and blob.save_error is None:
                return self._dirty
            case State.DISK if not blob.used and not blob.lost and blob.read_error is None:
                return blob.group.on_disk
        return None

    def _rank_all(self) -> None:
        """The order of the cycle has changed: rank every blob anew."""
        for ranking in (self._clean, self._dirty):
            for blob in ranking:
                self._settle(blob)
        for group in self._groups:
            for blob in (*group.on_disk, *group.wanted):
                self._settle(blob)

    def _set_leaving(self, blob: Blob, leaving: bool) -> None:
        self._leaving_bytes += (leaving - blob.leaving) * blob.size_bytes
        blob.leaving = leaving

    def _set_prefetched(self, blob: Blob, prefetched: bool) -> None:
        blob.group.prefetched += prefetched - blob.prefetched
        blob.prefetched = prefetched

    # Room

    def _need_room(self, size_bytes: int, instructions: list[Instruction]) -> int | None:
        """A slot, or None: wait. Raises when waiting is pointless; there are no instructions then.

        A full disk is tried once more before that, since others may have made room, and not again
        until a write completed or this has raised: a full disk neither hangs nor spins.
        """
        slot = self._make_room(size_bytes, instructions)
        if slot is not None or self._in_flight:
            return slot
        for blob in list(self._waiting.values()):
            # Read for a load that was not called again. It may yet be, so it goes last.
            if blob.state is State.CLEAN and blob.pins == 0:
                self._evict(blob)
                slot = self.arena.allocate(size_bytes)
                if slot is not None:
                    return slot
        if self._full_files and len(self._dirty) and not self._retried_full:
            self._retried_full = True
            self._full_files.clear()
            slot = self._make_room(size_bytes, instructions)
            if slot is not None or self._in_flight:
                return slot
        self._retried_full = False
        raise self._no_room(size_bytes)

    def _no_room(self, size_bytes: int) -> RoomError | ScratchError:
        used, capacity = format_size(self.arena.used_bytes), format_size(self.capacity_bytes)
        fact = (
            f"no room for a tensor of {format_size(size_bytes)}: {used} of the arena's {capacity} "
            "are used, "
        )
        if len(self._dirty):
            return ScratchFull(
                f"{fact}and the scratch is full: {self._full_text}; free disk space, raise the "
                "daemon's --disk, or give the arena more with DISCOD_ARENA or connect(arena=)"
            )
        if self._failed_blobs:
            return ScratchError(
                f"{fact}and every scratch file refuses writes: {self._failed_text}; the tensors "
                "saved before are safe in RAM; give the daemon a --scratch that works"
            )
        return ArenaFull(
            f"{fact}all by loaded tensors that are still alive; drop some of them, or give the "
            "arena more with DISCOD_ARENA or connect(arena=)"
        )

    def _make_room(self, size_bytes: int, instructions: list[Instruction]) -> int | None:
        """A slot, evicting as needed; or None, and writes are under way if any can be."""
        slot = self.arena.allocate(size_bytes)
        while slot is None and (victim := self._clean.first()) is not None:
            self._evict(victim)
            slot = self.arena.allocate(size_bytes)
        if slot is None:
            free = self.arena.free_bytes
            # Enough is free, but in pieces: what to write to join them is not known beforehand,
            # so as much as is needed is kept on its way until it fits.
            self._write_until(size_bytes - free if free < size_bytes else size_bytes, instructions)
        return slot

    def _write_until(self, leaving_bytes: int, instructions: list[Instruction]) -> None:
        """Start writes, farthest next use first, until that many bytes leave the arena."""
        refused = []
        while self._leaving_bytes < leaving_bytes and len(self._full_files) < self.scratch.files:
            blob = self._dirty.first()
            if blob is None:
                break
            self._want_write(blob, instructions)
            if not blob.leaving:
                refused.append(blob)
                self._dirty.discard(blob)
        for blob in refused:
            self._settle(blob)

    def _keep_watermark(self, instructions: list[Instruction]) -> None:
        """Without a plan: begin to write before the arena is full."""
        watermark = staging_bytes(self.capacity_bytes, self._largest_bytes)
        staying = self.arena.used_bytes - self._clean.total_bytes - self._leaving_bytes
        excess = staying - (self.capacity_bytes - watermark)
        if excess > 0:
            self._write_until(self._leaving_bytes + excess, instructions)

    def _evict(self, blob: Blob) -> None:
        blob.move(State.DISK)
        self._free_slot(blob)
        self._set_prefetched(blob, False)
        self._settle(blob)

    def _free_slot(self, blob: Blob) -> None:
        if blob.slot is not None:
            self.arena.free(blob.slot, blob.size_bytes)
            blob.slot = None

    # Writing

    def _want_write(self, blob: Blob, instructions: list[Instruction]) -> None:
        """Start the blob's write, now or when its group may; or not, where no file takes it."""
        if not blob.group.may_write:
            blob.wanted = True
            self._set_leaving(blob, True)
            self._settle(blob)
            return
        pieces = self.scratch.allocate(blob.size_bytes, blob.bad_files | self._full_files)
        if pieces is None or blob.slot is None:
            return
        blob.pieces = pieces
        blob.move(State.WRITING)
        blob.io = Io.WRITE
        blob.group.writing += 1
        self._in_flight += 1
        self._set_leaving(blob, True)
        self._settle(blob)
        instructions.append(StartWrite(blob.id, blob.slot, blob.size_bytes, pieces))

    def _drop_want(self, blob: Blob) -> None:
        if blob.wanted:
            blob.wanted = False
            self._set_leaving(blob, False)

    def _start_wanted(self, group: Group, instructions: list[Instruction]) -> None:
        while group.may_write and (blob := group.wanted.first()) is not None:
            self._drop_want(blob)
            self._settle(blob)
            self._want_write(blob, instructions)

    def _cancel(self, blob: Blob, instructions: list[Instruction]) -> None:
        blob.cancelling = True
        self._set_leaving(blob, False)
        instructions.append(Cancel(blob.id))

    def _note_failure(self, blob: Blob, failure: WriteFailure) -> None:
        if failure.kind is Failure.CANCELLED:
            return
        if failure.kind is Failure.DISK_FULL:
            self._full_files |= failure.files or frozenset(range(self.scratch.files))
            self._full_text = failure.text
            return
        blob.bad_files |= failure.files or {piece.file for piece in blob.pieces}
        self._failed_text = failure.text
        if blob.state is not State.FREED and len(blob.bad_files) >= self.scratch.files:
            blob.save_error = ScratchError(
                f"blob {blob.id} could not be written to any scratch file and stays in RAM; the "
                f"last failure: {failure.text}"
            )
            self._failed_blobs += 1

    # Reading

    def _await_read(self, blob: Blob) -> list[Instruction]:
        """A load of a blob that is not in RAM: see that it is read, urgently."""
        instructions: list[Instruction] = []
        if blob.read_error is not None:
            error, blob.read_error = blob.read_error, None
            self._waiting.pop(blob.id, None)
            self._settle(blob)
            raise error
        if blob.id not in self._waiting:
            self._waiting[blob.id] = blob
            self.prefetch_misses += 1
            self._settle(blob)
        if blob.state is State.READING:
            if not blob.urgent:
                blob.urgent = True
                instructions.append(Promote(blob.id))
            return instructions
        try:
            slot = self._need_room(blob.size_bytes, instructions)
        except (RoomError, ScratchError):
            del self._waiting[blob.id]
            self._settle(blob)
            raise
        if slot is not None:
            self._start_read(blob, slot, True, instructions)
        return instructions

    def _start_read(
        self, blob: Blob, slot: int, urgent: bool, instructions: list[Instruction]
    ) -> None:
        blob.slot = slot
        blob.move(State.READING)
        blob.io = Io.READ
        blob.urgent = urgent
        self._in_flight += 1
        self._set_prefetched(blob, not urgent)
        self._settle(blob)
        instructions.append(StartRead(blob.id, slot, blob.size_bytes, blob.pieces, urgent))

    def _advance(self, instructions: list[Instruction]) -> None:
        """Go on after room was freed, a load ended, or a phase began: waiting loads, prefetch."""
        for blob in list(self._waiting.values()):
            if blob.state is State.DISK and blob.read_error is None:
                slot = self._make_room(blob.size_bytes, instructions)
                if slot is None:
                    return
                self._start_read(blob, slot, True, instructions)
        if self._turned or self._order.all_saved:
            self._fetch_ahead(instructions, None, explicit=False)

    def _fetch_ahead(
        self, instructions: list[Instruction], limit: int | None, explicit: bool
    ) -> None:
        """Start prefetch reads, soonest next use first, until one has no place."""
        started = 0
        while limit is None or started < limit:
            candidates = [
                blob
                for group in self._groups
                if group.may_prefetch and (blob := group.on_disk.first()) is not None
            ]
            if not candidates:
                return
            blob = min(candidates, key=lambda b: self._order.next_use(b.index, b.used))
            slot = self._room_ahead(blob, explicit)
            if slot is None:
                return
            self._start_read(blob, slot, False, instructions)
            started += 1

    def _room_ahead(self, blob: Blob, explicit: bool) -> int | None:
        """A slot that costs nothing needed sooner than ``blob``, planned saves among that."""
        obtainable = self.arena.free_bytes + self._clean.total_bytes
        if obtainable < blob.size_bytes:
            return None
        if not explicit:
            planned = self._order.bytes_before_use(blob.index)
            if obtainable + self._leaving_bytes - blob.size_bytes < planned:
                return None
        next_use = self._order.next_use(blob.index, blob.used)
        slot = self.arena.allocate(blob.size_bytes)
        while slot is None:
            victim = self._clean.first()
            if victim is None or self._order.next_use(victim.index, victim.used) <= next_use:
                return None
            self._evict(victim)
            slot = self.arena.allocate(blob.size_bytes)
        return slot

    # Ending

    def _end(self, blob: Blob) -> None:
        """Free a live blob, and end the cycle with the last one."""
        self._drop_want(blob)
        self._waiting.pop(blob.id, None)
        self._set_prefetched(blob, False)
        self._failed_blobs -= blob.save_error is not None
        blob.move(State.FREED)
        if blob.io is not None and blob.pins == 0:
            self._set_leaving(blob, True)
        self._settle(blob)
        self._release(blob)
        self._order.free(blob.index)
        blob.group.live -= 1
        if blob.group.live == 0:
            del self._groups[blob.group]
        self.live_blobs -= 1
        if self.live_blobs == 0:
            self._end_cycle()

    def _release(self, blob: Blob) -> None:
        """Give back what of a freed blob's slot and extents nothing uses any more."""
        if blob.io is not None or blob.filling:
            return
        if blob.pieces:
            self.scratch.free(blob.pieces)
            blob.pieces = ()
            if blob.written:
                self._full_files.clear()
        if blob.pins == 0:
            self._free_slot(blob)
            del self._blobs[blob.id]

    def _end_cycle(self) -> None:
        counted = self.totals
        self.last_cycle = counted.since(self._cycle_start)
        self._cycle_start = counted
        self._order.end_cycle()
        self._turned = False
        self._full_files.clear()
        self._retried_full = False
