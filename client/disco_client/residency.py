"""Which blobs stay in RAM, which go to disk, what is prefetched: the policy, without any I/O.

Calls and completions go in, instructions come out: the session executes them and reports every
write and read through :meth:`Residency.write_done` and :meth:`Residency.read_done`, exactly once.
No threads, no clock.

``blobs.py`` has the states, ``holdings.py`` makes the moves and keeps the accounts, ``extents.py``
finds the bytes, ``plan.py`` knows what is needed when, ``room.py`` makes room, ``reader.py`` reads,
``loans.py`` lends, ``ahead.py`` knows what a device may want back soon, ``records.py`` finds a blob
by its id.

*Why nothing is overwritten too early.* Blobs on loan are never moved or written. A slot or extent
is free only when nothing in flight touches it any more, whatever became of its blob
(:meth:`Holdings.release`).
"""

from disco_client.blobs import Blob, Group, Io, Members, State
from disco_client.errors import BlobTooLarge, ScratchError
from disco_client.holdings import Holdings
from disco_client.instructions import (
    Cancel,
    Counters,
    Instruction,
    Promote,
    StartRead,
    StartWrite,
    WriteFailure,
)
from disco_client.loans import Loans
from disco_client.plan import Order
from disco_client.reader import Reader
from disco_client.records import Records
from disco_client.room import Room
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


class Residency(Records):
    """All blobs of a process: their states, their places, and what to do next.

    The instructions that a method returns are to be executed in their order. A method that raises
    leaves nothing that the caller would have to undo.

    Args:
        capacity_bytes: Size of the arena; a positive multiple of ``PAGE_BYTES``.
        files: Number of scratch files, at least 1.

    Raises:
        ValueError: Either is out of its range.
    """

    def __init__(self, capacity_bytes: int, files: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.live_blobs = 0
        """Blobs that are not freed."""
        self.saved_blobs = 0
        self.saved_bytes = 0
        self.written_bytes = 0
        self.elided_bytes = 0
        self.read_bytes = 0
        self.prefetch_hits = 0
        self.prefetch_misses = 0
        self.device_hits = 0
        self.cycles = 0
        """How many have finished."""
        self.last_cycle = Counters()
        """What the last finished cycle added to the counters."""
        self._cycle_start = Counters()
        self._order = Order(capacity_bytes)
        super().__init__(Holdings(capacity_bytes, files, self._order))
        self._loans = Loans(self._held)
        self._room = Room(self._held)
        self._reader = Reader(self._held, self._room, self._order)
        self._next_id = 0
        self._largest_bytes = 0
        self._turned = False
        """Whether loads have begun since the last save, which is when prefetch is worth it."""

    # Saving

    def try_place(self, size_bytes: int, group: Group) -> tuple[int | None, list[Instruction]]:
        """A new blob in state FILLING, or None: call again after a completion or an unpin.

        With None, what makes room has been started or was in flight. "In flight" includes blobs
        that are being filled.

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
        if self._turned and self._order.overdue:
            self._end_cycle()
        self._turned = False
        if self._order.expect_save(size_bytes):
            self._held.settle_all()
        slot = self._room.need(size_bytes)
        if slot is None:
            return None, self._held.take_instructions()
        members = self._held.groups.get(group)
        if members is None:
            members = self._held.groups[group] = Members(group)
        blob = Blob(self._next_id, size_bytes, members, self._order.save(size_bytes), slot)
        self._next_id += 1
        self._held.blobs[blob.id] = blob
        self._held.in_flight += 1
        members.live += 1
        self.live_blobs += 1
        self._largest_bytes = max(self._largest_bytes, size_bytes)
        return blob.id, self._held.take_instructions()

    def filled(self, blob: int, spoilt: bool = False) -> list[Instruction]:
        """The copy into the slot has landed; due also for a blob that was freed meanwhile.

        Args:
            blob: A blob that is being filled.
            spoilt: The source was changed before the copy had landed: the blob is kept nowhere,
                and loading it raises ``BlobModified``.

        Raises:
            ValueError: The blob is not being filled.
        """
        record = self._filling(blob)
        if record.state is State.FREED:
            self._held.release(record)
        else:
            record.move(State.DIRTY)
            self._count_saved(record)
            self._held.settle(record)
            if spoilt:
                record.lost = record.spoilt = True
                self._held.lose(record)
            elif not record.used and self._order.writes_at_once(record.index):
                self._held.want_write(record)
            elif not self._order.sized and not self._turned:
                self._room.keep_watermark(self._largest_bytes)
        return self._advance()

    def abandon(self, blob: int) -> list[Instruction]:
        """The copy into the slot failed and is over: the blob is freed, if it was not already.

        Raises:
            ValueError: The blob is not being filled.
        """
        record = self._filling(blob)
        if record.state is State.FREED:
            self._held.release(record)
        else:
            self._order.spoil()
            self._end(record)
        return self._advance()

    def saved(self, blob: int) -> bool:
        """Whether nothing is under way for saving it: no copy, no write, none wanted.

        Raises:
            HandleReleased: No such blob, or it is freed.
        """
        record = self._live(blob)
        return not record.wanted and record.state not in (State.FILLING, State.WRITING)

    def save_error(self, blob: int) -> ScratchError | None:
        """Why the blob could not be written to any file; it stays in RAM and can be loaded.

        Raises:
            HandleReleased: No such blob, or it is freed.
        """
        return self._live(blob).save_error

    # Loading

    def load(self, blob: int) -> tuple[bool, list[Instruction]]:
        """True: the data is in its slot, on loan until :meth:`unpin`; loans are counted.

        False: a copy or read is in flight, or room for the read is being made. Call again after a
        completion or an unpin.

        Raises:
            HandleReleased: No such blob, or it is freed.
            BlobModified: A borrower changed the only copy, or the one that is still on loan.
            ArenaFull, ScratchFull, ScratchError: As in :meth:`try_place`, for the read's slot. The
                data is safe on disk, and the load may be tried again.
            Exception: What the failed read was reported with; a further load reads again.
        """
        record = self._live(blob)
        self._loans.check_unmodified(record)
        self._ask(record)
        if record.state is State.FILLING:
            return False, []
        if record.state in (State.DISK, State.READING):
            self.prefetch_misses += self._reader.wait_for(record)
            return False, self._held.take_instructions()
        self._serve(record)
        self._loans.begin(record)
        return True, self._advance()

    def served(self, blob: int) -> list[Instruction]:
        """As a :meth:`load` that succeeded, by a device that has the bytes: nothing is lent.

        Raises:
            HandleReleased, BlobModified: As :meth:`load`.
        """
        record = self._live(blob)
        self._loans.check_unmodified(record)
        self._ask(record)
        self._serve(record)
        record.on_device = False
        self.device_hits += 1
        self._held.settle(record)
        return self._advance()

    def lend_resident(self, blob: int) -> bool:
        """True: the data is in RAM and on loan until :meth:`unpin`; this is no use of the blob.

        Raises:
            HandleReleased: No such blob, or it is freed.
        """
        record = self._live(blob)
        possible = self._loans.is_possible(record)
        if possible:
            self._loans.begin(record)
        return possible

    # Back to a device ahead of the load

    def list_ahead(self, blob: int) -> None:
        """The blob's device has no copy of it, and would like one before the load."""
        record = self._held.blobs.get(blob)
        if record is None or record.asked or record.state in (State.FREED, State.LOST):
            return
        self._held.ahead.add(record)

    def next_ahead(self) -> int | None:
        """The listed blob that is needed first, if it is in RAM; None: there is nothing to do."""
        record = self._held.ahead.first()
        return record.id if record is not None and self._loans.is_possible(record) else None

    def lend_ahead(self, blob: int) -> None:
        """What :meth:`next_ahead` gave goes to its device; on loan until :meth:`unpin`."""
        record = self._live(blob)
        self._held.ahead.discard(record)
        record.on_device = True
        self._loans.begin(record)

    def give_up_ahead(self, blob: int) -> list[Instruction]:
        """The device needs the memory for something else: the load will need the bytes again."""
        record = self._held.blobs.get(blob)
        if record is not None and record.state is not State.FREED:
            record.on_device = False
            self.list_ahead(blob)
            self._held.settle(record)
        return self._advance()

    # Loans

    def unpin(self, blob: int, modified: bool = False) -> list[Instruction]:
        """A loan ended; works on freed blobs too.

        Args:
            blob: A blob on loan.
            modified: The borrower changed the bytes in place. The RAM copy is then dropped if the
                disk copy was complete before the loan; else the blob is lost: it is kept nowhere,
                and loading it raises ``BlobModified``.

        Raises:
            ValueError: The blob has no loan.
        """
        record = self._held.blobs.get(blob)
        if record is None or record.pins == 0:
            raise ValueError(f"blob {blob} has no loan that could end")
        self._loans.end(record, modified)
        return self._advance()

    def prefetch(self, n: int | None) -> list[Instruction]:
        """Start up to ``n`` prefetch reads now; None: as many as limits and arena allow."""
        self._reader.fetch_ahead(n, heed_plan=False)
        return self._held.take_instructions()

    # The end of a blob

    def free(self, blob: int) -> list[Instruction]:
        """The blob's handle is gone. Its slot and extents stay taken while anything uses them.

        One that is being filled still needs its :meth:`filled` or :meth:`abandon`, one on loan its
        :meth:`unpin`, one in flight its completion.

        Raises:
            HandleReleased: No such blob, or it is freed.
        """
        record = self._live(blob)
        self._held.cancel(record)
        if record.state is State.FILLING:
            self._count_saved(record)
        if not record.written:
            self.elided_bytes += record.size_bytes
        self._end(record)
        return self._advance()

    # Completions

    def write_done(self, blob: int, failure: WriteFailure | None = None) -> list[Instruction]:
        """The blob's write is over, whether it was cancelled or not.

        Raises:
            ValueError: The blob has no write in flight.
        """
        record = self._completed(blob, Io.WRITE)
        if failure is None:
            record.written = True
            self.written_bytes += record.size_bytes
            self._room.forget_retry()
        else:
            self._held.note_failure(record, failure)
        if record.state is State.FREED:
            if failure is None:
                self.elided_bytes -= record.size_bytes
            self._held.release(record)
        else:
            if failure is None:
                record.move(State.CLEAN)
                self._held.settle(record)
            else:
                self._held.undo_write(record)
            if record.lost and record.pins == 0:
                self._held.lose(record)
            elif (
                failure is not None
                and failure.kind is not Failure.CANCELLED
                and record.ranking is self._held.dirty
            ):
                self._held.want_write(record)
        self._held.start_wanted(record.members)
        return self._advance()

    def read_done(
        self, blob: int, error: Exception | None = None, cancelled: bool = False
    ) -> list[Instruction]:
        """The blob's read is over. ``error`` is kept for the next load to raise.

        Raises:
            ValueError: The blob has no read in flight.
        """
        record = self._completed(blob, Io.READ)
        done = error is None and not cancelled
        if done:
            self.read_bytes += record.size_bytes
        if record.state is State.FREED:
            self._held.release(record)
        elif done:
            record.move(State.CLEAN)
            self._held.settle(record)
        else:
            self._held.undo_read(record, error)
        return self._advance()

    def retry_disk(self) -> None:
        """Forget that the disk was full or out of use: there may be room again."""
        self._held.retry_files()

    # What was counted

    @property
    def totals(self) -> Counters:
        """All counters, since the start."""
        return Counters(
            saved_blobs=self.saved_blobs,
            saved_bytes=self.saved_bytes,
            written_bytes=self.written_bytes,
            elided_bytes=self.elided_bytes,
            read_bytes=self.read_bytes,
            prefetch_hits=self.prefetch_hits,
            prefetch_misses=self.prefetch_misses,
            device_hits=self.device_hits,
        )

    # Steps

    def _ask(self, blob: Blob) -> None:
        """A load was called: the first one is an event of the cycle."""
        self._turned = True
        self._held.ahead.discard(blob)
        if blob.used:
            self._held.expect_reloads(True)
        if not blob.asked:
            blob.asked = True
            if self._order.load(blob.index):
                self._held.settle_all()

    def _serve(self, blob: Blob) -> None:
        """The bytes are at hand: no I/O that was under way or wanted for the blob is of use."""
        self._held.drop_want(blob)
        self._held.cancel(blob)
        waited = self._held.waiting.pop(blob.id, None) is not None
        if blob.prefetched:
            self.prefetch_hits += not waited
            self._held.set_prefetched(blob, False)
        blob.used = True

    def _count_saved(self, blob: Blob) -> None:
        self.saved_blobs += 1
        self.saved_bytes += blob.size_bytes

    def _advance(self) -> list[Instruction]:
        """Go on after an event, waiting loads before prefetch; all instructions since the call."""
        if self._reader.serve_waiting() and (self._turned or self._order.all_saved):
            self._reader.fetch_ahead(None, heed_plan=True)
        return self._held.take_instructions()

    def _end(self, blob: Blob) -> None:
        """Free a live blob, and end the cycle with its last one."""
        held = self._held
        held.ahead.discard(blob)
        held.drop_want(blob)
        held.waiting.pop(blob.id, None)
        held.set_prefetched(blob, False)
        blob.move(State.FREED)
        held.set_leaving(blob, blob.io is not None and blob.pins == 0)
        held.settle(blob)
        held.release(blob)
        self._order.free(blob.index)
        blob.members.live -= 1
        held.leave(blob.members)
        self.live_blobs -= 1
        if self._order.over:
            self._end_cycle()

    def _end_cycle(self) -> None:
        totals = self.totals
        self.last_cycle = totals.since(self._cycle_start)
        self._cycle_start = totals
        self.cycles += 1
        saves = self._order.end_cycle()
        if self.live_blobs:
            for blob in self._held.blobs.values():
                blob.index -= saves
            self._held.settle_all()
        self._turned = False
        self._held.expect_reloads(False)
        self._held.retry_files()
        self._room.forget_retry()
