"""A simulated session: residency's instructions over an arena and scratch files made of page tags.

Every page of a blob has a tag of its own, so that a slot or extent given away too early shows as a
wrong tag. I/O begins and completes when the test says so; a begun write copies the pages that are
in the slot when it completes, which is the latest that a daemon might look at them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from disco_client.blobs import Io, State
from disco_client.errors import BlobCorrupted, BlobModified
from disco_client.residency import (
    Cancel,
    Group,
    Instruction,
    Promote,
    Residency,
    StartRead,
    StartWrite,
    WriteFailure,
)
from discod.wire import PAGE_BYTES
from discod.wire.messages import Failure

Tag = tuple[object, int]


@dataclass(eq=False)
class Op:
    """One write or read in flight."""

    start: StartWrite | StartRead
    begun: bool = False
    cancelled: bool = False
    urgent: bool = False


@dataclass(eq=False)
class Loan:
    """A loaded blob; ``pages`` are what the borrower believes to see."""

    blob: int
    slot: int
    pages: list[Tag]
    modified: bool = False


class Simulation:
    """Residency with what it would command. Sizes of blobs are in pages.

    Args:
        pages: Pages of the arena.
        files: Number of scratch files.
    """

    def __init__(self, pages: int, files: int = 1) -> None:
        self.residency = Residency(pages * PAGE_BYTES, files)
        self.files = files
        self.arena: list[Tag | None] = [None] * pages
        self.disk: dict[tuple[int, int], Tag] = {}
        self.ops: dict[int, Op] = {}
        self.filling: dict[int, int] = {}
        """Blobs being filled, freed ones too, with their first page."""
        self.live: dict[int, int] = {}
        """Pages of every live blob."""
        self.loans: list[Loan] = []
        self.modified: set[int] = set()
        self.written: list[int] = []
        self.reads: list[int] = []
        self.groups: set[Group] = set()
        self.ahead: set[int] = set()
        """Blobs that a device has got back ahead of their load."""

    # Calls

    def execute(self, instructions: Sequence[Instruction]) -> None:
        """Take the instructions, and check that each makes sense."""
        for instruction in instructions:
            match instruction:
                case StartWrite() | StartRead():
                    assert instruction.blob not in self.ops
                    covered = sorted((p.slot_offset, p.length) for p in instruction.pieces)
                    end = 0
                    for offset, length in covered:
                        assert offset == end
                        end += length
                    assert end == instruction.size_bytes
                    self.ops[instruction.blob] = Op(instruction)
                    if isinstance(instruction, StartRead):
                        self.ops[instruction.blob].urgent = instruction.urgent
                        self.reads.append(instruction.blob)
                    else:
                        self.written.append(instruction.blob)
                case Promote(blob):
                    op = self.ops[blob]
                    assert isinstance(op.start, StartRead)
                    assert not op.urgent
                    op.urgent = True
                case Cancel(blob):
                    assert not self.ops[blob].cancelled
                    self.ops[blob].cancelled = True
        check_invariants(self)

    @property
    def pending(self) -> bool:
        """Whether something will complete by itself, so that waiting makes sense."""
        return bool(self.ops or self.filling)

    def try_place(self, pages: int, group: Group) -> int | None:
        """Place a blob and write half of its tags; None: it must wait, which makes sense."""
        self.groups.add(group)
        blob, instructions = self.residency.try_place(pages * PAGE_BYTES, group)
        if blob is None:
            self.execute(instructions)
            assert self.pending, "told to wait, and nothing would ever happen"
            return None
        first = self.residency.slot(blob) // PAGE_BYTES
        self.live[blob] = pages
        self.filling[blob] = first
        self.execute(instructions)
        return blob

    def fill(self, blob: int, spoilt: bool = False) -> None:
        """The copy lands; ``spoilt``: with other bytes than were saved."""
        first = self.filling.pop(blob)
        pages = self.live.get(blob)
        if pages is not None:
            self.arena[first : first + pages] = self.tags(blob)
        if spoilt:
            self.modified.add(blob)
        self.execute(self.residency.filled(blob, spoilt))

    def abandon(self, blob: int) -> None:
        """The copy fails."""
        del self.filling[blob]
        self.live.pop(blob, None)
        self.execute(self.residency.abandon(blob))

    def try_load(self, blob: int) -> bool:
        """Load and check the data; False: it must wait, which makes sense."""
        ready, instructions = self.residency.load(blob)
        if not ready:
            self.execute(instructions)
            assert self.pending, "told to wait, and nothing would ever happen"
            return False
        self._borrow(blob)
        self.execute(instructions)
        return True

    def peek(self, blob: int) -> bool:
        """Borrow what is in RAM, check the data; False: it is not there, and nothing happens."""
        used = self.residency._held.blobs[blob].used
        lent = self.residency.lend_resident(blob)
        if lent:
            self._borrow(blob)
        assert self.residency._held.blobs[blob].used == used
        self.execute([])
        return lent

    def serve(self, blob: int) -> None:
        """A load by a device that has the bytes, of a blob in whatever state."""
        hits = self.residency.device_hits
        self.ahead.discard(blob)
        self.execute(self.residency.served(blob))
        assert self.residency.device_hits == hits + 1

    def list_ahead(self, blob: int) -> None:
        """The blob's device would like a copy of it."""
        if blob not in self.ahead:
            self.residency.list_ahead(blob)
        self.execute([])

    def lend_ahead(self) -> int | None:
        """Lend what is to go to its device next, if anything is: the listed blob needed first."""
        held = self.residency._held
        listed = [blob for blob in held.blobs.values() if blob.listed]
        blob = self.residency.next_ahead()
        if blob is None:
            return None
        uses = [held._order.next_use(other.index, used=False) for other in listed]
        assert held._order.next_use(held.blobs[blob].index, used=False) == min(uses)
        self.ahead.add(blob)
        self.residency.lend_ahead(blob)
        self._borrow(blob)
        self.execute([])
        return blob

    def give_up_ahead(self, blob: int) -> None:
        """The device drops its copy."""
        self.ahead.discard(blob)
        self.execute(self.residency.give_up_ahead(blob))

    def _borrow(self, blob: int) -> None:
        first = self.residency.slot(blob) // PAGE_BYTES
        pages = self.arena[first : first + self.live[blob]]
        sharing = [loan for loan in self.loans if loan.blob == blob]
        assert pages == (sharing[0].pages if sharing else self.tags(blob))
        self.loans.append(Loan(blob, first, self.tags(blob) if not sharing else sharing[0].pages))

    def modify(self, loan: Loan) -> None:
        """The borrower changes the bytes in place; all who share them see it."""
        loan.modified = True
        self.modified.add(loan.blob)
        loan.pages[0] = ("changed", id(loan))
        self.arena[loan.slot] = loan.pages[0]

    def unpin(self, loan: Loan) -> None:
        """The loan ends; until now nobody else has touched its slot."""
        pages = self.arena[loan.slot : loan.slot + len(loan.pages)]
        assert pages == loan.pages
        self.loans.remove(loan)
        self.execute(self.residency.unpin(loan.blob, loan.modified))

    def free(self, blob: int) -> None:
        """The handle is gone."""
        del self.live[blob]
        self.ahead.discard(blob)
        self.execute(self.residency.free(blob))

    # Completions

    def complete(self, blob: int, outcome: Failure | None = None, file: int | None = None) -> None:
        """The blob's I/O ends; cancelled I/O that has not begun ends as cancelled.

        ``file``: the one at fault; None: the outcome names none.
        """
        op = self.ops.pop(blob)
        start = op.start
        if op.cancelled and not op.begun:
            outcome = Failure.CANCELLED
        places = [
            (start.slot // PAGE_BYTES + piece.slot_offset // PAGE_BYTES + page, piece.file,
             piece.offset // PAGE_BYTES + page)
            for piece in start.pieces
            for page in range(piece.length // PAGE_BYTES)
        ]  # fmt: skip
        if outcome is not Failure.CANCELLED:
            # A failed transfer leaves garbage behind.
            for arena_page, file_, file_page in places:
                if isinstance(start, StartWrite):
                    tag = self.arena[arena_page] if outcome is None else ("garbage", blob)
                    assert tag is not None
                    self.disk[file_, file_page] = tag
                else:
                    tag = self.disk[file_, file_page] if outcome is None else ("garbage", blob)
                    self.arena[arena_page] = tag
        if isinstance(start, StartWrite):
            failure = None
            if outcome is not None:
                files = frozenset() if file is None else frozenset({file})
                failure = WriteFailure(outcome, f"{outcome} for blob {blob}", files)
            self.execute(self.residency.write_done(blob, failure))
        else:
            cancelled = outcome is Failure.CANCELLED
            error = None if outcome is None or cancelled else BlobCorrupted(f"blob {blob}")
            self.execute(self.residency.read_done(blob, error, cancelled))

    def complete_all(self) -> None:
        """Everything in flight ends well, oldest first, and what that starts too."""
        while self.ops:
            self.complete(next(iter(self.ops)))

    # A trainer that waits

    def save(self, pages: int, group: Group) -> int:
        """Save, with I/O completing, oldest first, only while it waits."""
        while (blob := self.try_place(pages, group)) is None:
            self.complete(next(iter(self.ops)))
        self.fill(blob)
        return blob

    def load(self, blob: int) -> Loan:
        """Load, with I/O completing, oldest first, only while it waits."""
        while not self.try_load(blob):
            self.complete(next(iter(self.ops)))
        return self.loans[-1]

    def use(self, blob: int) -> None:
        """Load, end the loan, free."""
        loan = self.load(blob)
        self.unpin(loan)
        self.free(blob)

    def finish(self) -> None:
        """End all that is left, reading back every blob that can be, and check that none leaks."""
        for blob in list(self.filling):
            self.fill(blob)
        for loan in list(self.loans):
            self.unpin(loan)
        self.complete_all()
        self.residency.retry_disk()
        # Those that no file took are in RAM for good; the others may need that room.
        for blob in sorted(self.live, key=lambda b: self.residency.save_error(b) is None):
            try:
                self.unpin(self.load(blob))
            except BlobModified:
                assert blob in self.modified
            except BlobCorrupted:
                self.unpin(self.load(blob))
            self.free(blob)
        self.complete_all()
        residency = self.residency
        assert residency.live_blobs == 0
        assert residency.arena_used_bytes == 0
        assert residency.scratch.used_bytes == 0
        assert residency._held.blobs == {}
        assert residency.saved_bytes == residency.written_bytes + residency.elided_bytes

    def tags(self, blob: int) -> list[Tag]:
        """The pages that were saved."""
        return [(blob, page) for page in range(self.live[blob])]


IN_RAM = {State.FILLING, State.DIRTY, State.WRITING, State.CLEAN, State.READING}
ON_DISK = {State.WRITING, State.CLEAN, State.DISK, State.READING}


def check_invariants(simulation: Simulation) -> None:
    """Everything that must hold between any two events, by the simplest way to compute it."""
    residency = simulation.residency
    held = residency._held
    blobs = list(held.blobs.values())

    slots = sorted((b.slot, b.size_bytes) for b in blobs if b.slot is not None)
    _check_disjoint(slots)
    assert sum(size for _, size in slots) == held.arena.used_bytes <= residency.capacity_bytes
    for file in range(simulation.files):
        _check_disjoint(
            sorted((p.offset, p.length) for b in blobs for p in b.pieces if p.file == file)
        )
    assert sum(p.length for b in blobs for p in b.pieces) == held.scratch.used_bytes

    for blob in blobs:
        if blob.state is State.FREED:
            assert blob.io or blob.pins or blob.filling
            assert blob.slot is not None
        else:
            assert (blob.slot is not None) == (blob.state in IN_RAM)
            assert bool(blob.pieces) == (blob.state in ON_DISK)
            assert (blob.io is Io.WRITE) == (blob.state is State.WRITING)
            assert (blob.io is Io.READ) == (blob.state is State.READING)
            assert blob.filling == (blob.state is State.FILLING)
        if blob.pins:
            assert blob.state in {State.DIRTY, State.WRITING, State.CLEAN, State.FREED}
        elif blob.lost and blob.io is None:
            assert blob.state in {State.LOST, State.FREED}
        if blob.listed:
            assert blob.state not in {State.FREED, State.LOST}
            assert not blob.asked
            assert not blob.on_device
            key, ranked = held.ahead._ranking._blobs[blob.id]
            assert ranked is blob
            assert key == held._order.next_use(blob.index, used=False)
        assert blob.state is State.FREED or blob.on_device == (blob.id in simulation.ahead)
        assert blob.ranking is held._ranking_for(blob)
        if blob.ranking is not None:
            key, ranked = blob.ranking._blobs[blob.id]
            assert ranked is blob
            assert abs(key) == abs(held.next_use(blob)), "ranked by an order that is over"
        assert not blob.wanted or blob.state is State.DIRTY
        assert not blob.wanted or blob.pins or not blob.members.may_write
        assert blob.leaving == (
            blob.wanted
            or (blob.state is State.WRITING and not blob.cancelling)
            or (blob.state is State.FREED and blob.io is not None and blob.pins == 0)
        )

    assert {b.id for b in blobs if b.listed} == {b.id for b in held.ahead._ranking}
    assert {b.id for b in blobs if b.io} == set(simulation.ops)
    assert {b.id for b in blobs if b.filling} == set(simulation.filling)
    assert {b.id for b in blobs if b.state is not State.FREED} == set(simulation.live)
    assert residency.live_blobs == len(simulation.live)
    assert held.waiting.keys() <= simulation.live.keys()
    assert all(b.state in ON_DISK for b in held.waiting.values())
    assert sum(b.pins for b in blobs) == len(simulation.loans)
    assert held.in_flight == len(simulation.ops) + len(simulation.filling)
    assert held.leaving_bytes == sum(b.size_bytes for b in blobs if b.leaving)
    for ranking in (held.clean, held.dirty):
        assert ranking.total_bytes == sum(b.size_bytes for b in ranking)
    for group in simulation.groups:
        own = [b for b in blobs if b.members.group is group]
        members = held.groups.get(group)
        if members is None:
            assert all(b.state is State.FREED and b.io is not Io.WRITE for b in own)
            continue
        assert all(b.members is members for b in own if b.state is not State.FREED)
        assert members.live == sum(b.state is not State.FREED for b in own)
        assert members.writing == sum(b.io is Io.WRITE for b in own)
        assert members.live or members.writing
        assert members.prefetched == sum(b.prefetched for b in own)
        assert group.max_writes is None or members.writing <= group.max_writes
        assert group.max_prefetch is None or members.prefetched <= group.max_prefetch


def _check_disjoint(extents: list[tuple[int, int]]) -> None:
    for (offset, size), (following, _) in pairwise(extents):
        assert offset + size <= following
