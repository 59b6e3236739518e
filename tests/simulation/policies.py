"""Policies to compare with. Each is what a straightforward offloader does, and does it well.

They count bytes and place nothing, so no room is lost to holes: they are the better for it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from disco_client.blobs import Group, State
from disco_client.instructions import (
    Cancel,
    Instruction,
    Promote,
    StartRead,
    StartWrite,
    WriteFailure,
)


@dataclass(eq=False, slots=True)
class _Blob:
    id: int
    size_bytes: int
    state: State
    touched: int
    """When it was last saved or loaded; the how-manieth call that was."""
    on_loan: bool = False
    waited: bool = False

    @property
    def takes_room(self) -> bool:
        return self.state is not State.DISK


class Simple:
    """A policy of one rule each for writing, evicting and reading ahead; subclasses say which.

    Args:
        capacity_bytes: Size of the arena.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.written_bytes = 0
        self.read_bytes = 0
        self._blobs: dict[int, _Blob] = {}
        self._next_id = 0
        self._calls = 0
        self._largest_bytes = 0
        self._turned = False
        self._told: list[Instruction] = []

    # The rules

    def needed_last(self, blobs: Iterable[_Blob]) -> list[_Blob]:
        """The blobs, what should leave the arena first at the front."""
        raise NotImplementedError

    def staging_bytes(self) -> int:
        """Room to keep free by writing before it is needed."""
        return max(self._largest_bytes, self.capacity_bytes // 8)

    def reads_ahead(self) -> bool:
        """Whether blobs are read before they are asked for."""
        raise NotImplementedError

    def writes_at_once(self) -> bool:
        """Whether all that is saved is written."""
        return False

    # The calls

    def try_place(self, size_bytes: int, group: Group) -> tuple[int | None, list[Instruction]]:
        self._turned = False
        self._largest_bytes = max(self._largest_bytes, size_bytes)
        if not self._make_room(size_bytes):
            return None, self._take()
        blob = _Blob(self._next_id, size_bytes, State.FILLING, self._touch())
        self._next_id += 1
        self._blobs[blob.id] = blob
        return blob.id, self._take()

    def filled(self, blob: int) -> list[Instruction]:
        record = self._blobs[blob]
        record.state = State.DIRTY
        if self.writes_at_once():
            self._write(record)
        else:
            staying = self._sum(State.DIRTY, State.READING)
            excess = staying - (self.capacity_bytes - self.staging_bytes())
            self._write_some(excess)
        return self._take()

    def load(self, blob: int) -> tuple[bool, list[Instruction]]:
        record = self._blobs[blob]
        self._turned = True
        if record.state in (State.DIRTY, State.WRITING, State.CLEAN):
            record.on_loan, record.waited, record.touched = True, False, self._touch()
            self._read_ahead()
            return True, self._take()
        record.waited = True
        if record.state is State.READING:
            self._told.append(Promote(blob))
        elif self._make_room(record.size_bytes):
            self._read(record, urgent=True)
        return False, self._take()

    def unpin(self, blob: int) -> list[Instruction]:
        self._blobs[blob].on_loan = False
        return self._advance()

    def free(self, blob: int) -> list[Instruction]:
        record = self._blobs[blob]
        if record.state in (State.WRITING, State.READING):
            self._told.append(Cancel(blob))
            record.waited = False
            record.state = State.FREED
        else:
            del self._blobs[blob]
        return self._advance()

    def write_done(self, blob: int, failure: WriteFailure | None = None) -> list[Instruction]:
        record = self._blobs[blob]
        if failure is None:
            self.written_bytes += record.size_bytes
        if record.state is State.FREED:
            del self._blobs[blob]
        else:
            record.state = State.CLEAN if failure is None else State.DIRTY
        return self._advance()

    def read_done(
        self, blob: int, error: Exception | None = None, cancelled: bool = False
    ) -> list[Instruction]:
        record = self._blobs[blob]
        if not cancelled:
            self.read_bytes += record.size_bytes
        if record.state is State.FREED:
            del self._blobs[blob]
        else:
            record.state = State.DISK if cancelled else State.CLEAN
        return self._advance()

    # The parts

    def _touch(self) -> int:
        self._calls += 1
        return self._calls

    def _take(self) -> list[Instruction]:
        told, self._told = self._told, []
        return told

    def _sum(self, *states: State) -> int:
        return sum(blob.size_bytes for blob in self._blobs.values() if blob.state in states)

    def _free_bytes(self) -> int:
        taken = sum(blob.size_bytes for blob in self._blobs.values() if blob.takes_room)
        return self.capacity_bytes - taken

    def _idle(self, state: State) -> list[_Blob]:
        """Blobs in that state that nobody uses or waits for, what should leave first in front."""
        return self.needed_last(
            blob
            for blob in self._blobs.values()
            if blob.state is state and not blob.on_loan and not blob.waited
        )

    def _make_room(self, size_bytes: int) -> bool:
        for blob in self._idle(State.CLEAN):
            if self._free_bytes() >= size_bytes:
                break
            blob.state = State.DISK
        missing = size_bytes - self._free_bytes()
        self._write_some(missing)
        return missing <= 0

    def _write_some(self, wanted_bytes: int) -> None:
        """Have that much on its way to disk."""
        for blob in self._idle(State.DIRTY):
            if self._sum(State.WRITING, State.FREED) >= wanted_bytes:
                break
            self._write(blob)

    def _write(self, blob: _Blob) -> None:
        blob.state = State.WRITING
        self._told.append(StartWrite(blob.id, 0, blob.size_bytes, ()))

    def _read(self, blob: _Blob, urgent: bool) -> None:
        blob.state = State.READING
        self._told.append(StartRead(blob.id, 0, blob.size_bytes, (), urgent))

    def _advance(self) -> list[Instruction]:
        for blob in self._blobs.values():
            if blob.waited and blob.state is State.DISK:
                if not self._make_room(blob.size_bytes):
                    return self._take()
                self._read(blob, urgent=True)
        self._read_ahead()
        return self._take()

    def _read_ahead(self) -> None:
        if not self._turned or not self.reads_ahead():
            return
        for blob in reversed(self._idle(State.DISK)):
            if self._free_bytes() < blob.size_bytes:
                break
            self._read(blob, urgent=False)


class Watermark(Simple):
    """Newest first: the oldest is written when room gets short, the newest on disk read ahead."""

    name = "watermark"

    def needed_last(self, blobs: Iterable[_Blob]) -> list[_Blob]:
        return sorted(blobs, key=lambda blob: blob.id)

    def reads_ahead(self) -> bool:
        return True


class LeastRecentlyUsed(Simple):
    """As a kernel swaps: what was unused for longest goes, and comes back when it is asked for."""

    name = "LRU"

    def needed_last(self, blobs: Iterable[_Blob]) -> list[_Blob]:
        return sorted(blobs, key=lambda blob: blob.touched)

    def reads_ahead(self) -> bool:
        return False


class WriteEverything(Watermark):
    """All that is saved goes to disk at once; the arena is a cache of it."""

    name = "write everything"

    def writes_at_once(self) -> bool:
        return True
