"""Every blob's slot and extents, its place in the rankings, and the I/O in flight: the accounts.

:class:`Holdings` makes single moves and keeps all sums and rankings true over them. Which move to
make, and when, is decided in ``residency.py``.
"""

from disco_client.ahead import Ahead
from disco_client.blobs import Blob, Group, Io, Members, Ranking, State
from disco_client.errors import ScratchError
from disco_client.extents import ExtentAllocator, ScratchSpace
from disco_client.instructions import Cancel, Instruction, StartRead, StartWrite, WriteFailure
from disco_client.plan import Order
from discod.wire.messages import Failure


class Holdings:
    """All blobs that are alive, on loan, or touched by something in flight.

    Args:
        capacity_bytes: Size of the arena.
        files: Number of scratch files.
        order: Gives each blob's next use.
    """

    def __init__(self, capacity_bytes: int, files: int, order: Order) -> None:
        self.capacity_bytes = capacity_bytes
        self.arena = ExtentAllocator(capacity_bytes)
        self.scratch = ScratchSpace(files)
        self.blobs: dict[int, Blob] = {}
        self.groups: dict[Group, Members] = {}
        """Those with live blobs."""
        self.clean = Ranking(farthest_first=True)
        """What can be evicted: CLEAN, not on loan, not waited for."""
        self.dirty = Ranking(farthest_first=True)
        """What can be written: DIRTY, not on loan, not refused by every file."""
        self.ahead = Ahead(order)
        """What devices may want back before it is asked for."""
        self.waiting: dict[int, Blob] = {}
        """Blobs whose load must be called again; no ranking has them."""
        self.reloads = False
        """Whether blobs that were used have been loaded again, so that others may be too."""
        self.leaving_bytes = 0
        """Of slots that can be had once the writes that are wanted or in flight are done."""
        self.in_flight = 0
        """Blobs with a copy, write or read in flight: while above 0, waiting is not pointless."""
        self.full_files: set[int] = set()
        """Scratch files that had no room at the last try."""
        self.out_files: set[int] = set()
        """Scratch files that the daemon had taken out of use at the last try."""
        self.full_text = ""
        self.failed_text = ""
        self._order = order
        self._instructions: list[Instruction] = []

    def take_instructions(self) -> list[Instruction]:
        """What is to be executed, once."""
        instructions, self._instructions = self._instructions, []
        return instructions

    def tell(self, instruction: Instruction) -> None:
        """Add an instruction."""
        self._instructions.append(instruction)

    # Rankings and sums

    def settle(self, blob: Blob) -> None:
        """Put the blob into the ranking that its condition asks for, and out of any other."""
        ranking = self._ranking_for(blob)
        if blob.ranking is not None and blob.ranking is not ranking:
            blob.ranking.discard(blob)
        blob.ranking = ranking
        if ranking is not None:
            ranking.add(blob, self.next_use(blob))

    def settle_all(self) -> None:
        """Rank every blob anew: the order of the cycle has changed."""
        self.ahead.rank_all()
        for ranking in (self.clean, self.dirty):
            for blob in ranking:
                self.settle(blob)
        for members in self.groups.values():
            for blob in (*members.on_disk, *members.wanted):
                self.settle(blob)

    def expect_reloads(self, expected: bool) -> None:
        """Whether to read blobs ahead that were used already: a second backward began, or ended."""
        if self.reloads != expected:
            self.reloads = expected
            for blob in self.blobs.values():
                self.settle(blob)

    def next_use(self, blob: Blob) -> int:
        """A number that is the greater the later the blob is needed."""
        needless = blob.used or (blob.on_device and blob.state is State.CLEAN)
        return self._order.next_use(blob.index, needless)

    def leave(self, members: Members) -> None:
        """Forget the members of a group of which nothing is left."""
        if members.live == 0 and members.writing == 0:
            self.groups.pop(members.group, None)

    def set_prefetched(self, blob: Blob, prefetched: bool) -> None:
        """Note that the blob counts, or no longer, towards its group's ``max_prefetch``."""
        blob.members.prefetched += prefetched - blob.prefetched
        blob.prefetched = prefetched

    def set_leaving(self, blob: Blob, leaving: bool) -> None:
        """Note that the slot can be had after the I/O in flight, or that this is off."""
        self.leaving_bytes += (leaving - blob.leaving) * blob.size_bytes
        blob.leaving = leaving

    def _ranking_for(self, blob: Blob) -> Ranking | None:
        if blob.pins or blob.id in self.waiting:
            return None
        match blob.state:
            case State.CLEAN:
                return self.clean
            case State.DIRTY if blob.wanted:
                return blob.members.wanted
            case State.DIRTY if blob.save_error is None:
                return self.dirty
            case State.DISK if blob.on_device or blob.read_error:
                return None
            case State.DISK if self.reloads or not blob.used:
                return blob.members.on_disk
        return None

    # Slots

    def evict(self, blob: Blob) -> None:
        """CLEAN → DISK: its slot is free at once."""
        blob.move(State.DISK)
        self.drop_slot(blob)
        self.set_prefetched(blob, False)
        self.settle(blob)

    def drop_slot(self, blob: Blob) -> None:
        """Free the slot, if there is one."""
        if blob.slot is not None:
            self.arena.free(blob.slot, blob.size_bytes)
            blob.slot = None

    def lose(self, blob: Blob) -> None:
        """DIRTY or CLEAN → LOST: no copy is good, so neither is kept."""
        blob.move(State.LOST)
        self.ahead.discard(blob)
        self.drop_slot(blob)
        self.scratch.free(blob.pieces)
        blob.pieces = ()
        self.settle(blob)

    def release(self, blob: Blob) -> None:
        """Give back what of a freed blob's slot and extents nothing uses any more."""
        if blob.io is not None or blob.filling:
            return
        if blob.pieces:
            self.scratch.free(blob.pieces)
            blob.pieces = ()
            if blob.written:
                self.full_files.clear()
        if blob.pins == 0:
            self.drop_slot(blob)
            del self.blobs[blob.id]

    # Writing

    @property
    def avoided_files(self) -> frozenset[int]:
        """Scratch files that no blob is to be written to now."""
        return frozenset(self.full_files | self.out_files)

    def retry_files(self) -> None:
        """Forget what was full or out of use: it may not be any more."""
        self.full_files.clear()
        self.out_files.clear()

    def want_write(self, blob: Blob) -> None:
        """Start a DIRTY blob's write, now or when its group may; or not, where no file takes it."""
        if not blob.members.may_write:
            blob.wanted = True
            self.set_leaving(blob, True)
            self.settle(blob)
            return
        pieces = self.scratch.allocate(blob.size_bytes, blob.bad_files | self.avoided_files)
        if pieces is None or blob.slot is None:
            return
        blob.pieces = pieces
        blob.move(State.WRITING)
        blob.io = Io.WRITE
        blob.members.writing += 1
        self.in_flight += 1
        self.set_leaving(blob, True)
        self.settle(blob)
        self.tell(StartWrite(blob.id, blob.slot, blob.size_bytes, pieces))

    def drop_want(self, blob: Blob) -> None:
        """Do not write the blob, if its write has not started."""
        if blob.wanted:
            blob.wanted = False
            self.set_leaving(blob, False)

    def start_wanted(self, members: Members) -> None:
        """Start the group's wanted writes, as many as it may."""
        while members.may_write and (blob := members.wanted.first()) is not None:
            self.drop_want(blob)
            self.settle(blob)
            self.want_write(blob)

    def cancel(self, blob: Blob) -> None:
        """Cancel the I/O in flight, unless that was done."""
        if blob.io is not None and not blob.cancelling:
            blob.cancelling = True
            self.set_leaving(blob, False)
            self.tell(Cancel(blob.id))

    def undo_write(self, blob: Blob) -> None:
        """WRITING → DIRTY: there is no disk copy."""
        blob.move(State.DIRTY)
        self.scratch.free(blob.pieces)
        blob.pieces = ()
        self.settle(blob)

    def note_failure(self, blob: Blob, failure: WriteFailure) -> None:
        """Remember which files not to write to, and whether any is left for the blob."""
        if failure.kind is Failure.CANCELLED:
            return
        if failure.kind in (Failure.DISK_FULL, Failure.OVER_BUDGET):
            known = failure.kind is Failure.DISK_FULL and failure.files
            self.full_files |= known or frozenset(range(self.scratch.files))
            self.full_text = failure.text
            return
        at_fault = failure.files or {piece.file for piece in blob.pieces}
        if failure.kind is Failure.OUT_OF_USE:
            self.out_files |= at_fault
        else:
            blob.bad_files |= at_fault
        self.failed_text = failure.text
        refusing = blob.bad_files | self.out_files
        if blob.state is not State.FREED and len(refusing) >= self.scratch.files:
            blob.save_error = ScratchError(
                f"blob {blob.id} could not be written to any scratch file and stays in RAM; the "
                f"last failure: {failure.text}"
            )

    # Reading

    def start_read(self, blob: Blob, slot: int, urgent: bool) -> None:
        """DISK → READING into ``slot``, which is allocated for it."""
        blob.slot = slot
        blob.move(State.READING)
        blob.io = Io.READ
        blob.urgent = urgent
        self.in_flight += 1
        self.set_prefetched(blob, not urgent)
        self.settle(blob)
        self.tell(StartRead(blob.id, slot, blob.size_bytes, blob.pieces, urgent))

    def undo_read(self, blob: Blob, error: Exception | None) -> None:
        """READING → DISK; ``error`` is for the next load to raise."""
        blob.move(State.DISK)
        blob.read_error = error
        self.drop_slot(blob)
        self.set_prefetched(blob, False)
        self.settle(blob)

    def completed(self, blob: Blob) -> None:
        """The blob's I/O is over, its outcome still to be taken in."""
        if blob.io is Io.WRITE:
            blob.members.writing -= 1
            self.leave(blob.members)
        blob.io = None
        blob.cancelling = False
        self.in_flight -= 1
        self.set_leaving(blob, False)
