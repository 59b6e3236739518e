"""One blob's record: its states, the table of legal moves, its owner, its place by next use.

Everything here is bookkeeping for ``residency.py``, which takes all decisions.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from disco_client.errors import ScratchError
from disco_client.extents import Piece

_MAX_HISTORY = 32
"""States kept for error texts; a blob that is loaded for ever must not grow."""


class State(StrEnum):
    """Where a blob's bytes are."""

    FILLING = "filling"
    """Being copied into its slot."""
    DIRTY = "dirty"
    """In RAM only."""
    WRITING = "writing"
    """In RAM, with a write in flight."""
    CLEAN = "clean"
    """In RAM and on disk."""
    DISK = "disk"
    """On disk only."""
    READING = "reading"
    """On disk, with a slot and a read in flight."""
    LOST = "lost"
    """Nowhere: the only copy was changed, by a borrower or as it was made."""
    FREED = "freed"
    """The handle is gone; I/O in flight or loans may still hold slot and extents."""


class Io(StrEnum):
    """What is in flight for a blob."""

    WRITE = "write"
    READ = "read"


LEGAL_MOVES: dict[tuple[State, State], str] = {
    (State.FILLING, State.DIRTY): "the copy landed",
    (State.DIRTY, State.WRITING): "its write started",
    (State.WRITING, State.CLEAN): "its write completed",
    (State.WRITING, State.DIRTY): "its write failed or was cancelled",
    (State.CLEAN, State.DISK): "evicted",
    (State.DISK, State.READING): "its read started",
    (State.READING, State.CLEAN): "its read completed",
    (State.READING, State.DISK): "its read failed or was cancelled",
    (State.DIRTY, State.LOST): "the only copy was changed, by a borrower or as it was made",
    (State.CLEAN, State.LOST): "a borrower changed it while it was being written",
    (State.FILLING, State.FREED): "the copy failed, or the handle is gone",
    (State.DIRTY, State.FREED): "the handle is gone",
    (State.WRITING, State.FREED): "the handle is gone",
    (State.CLEAN, State.FREED): "the handle is gone",
    (State.DISK, State.FREED): "the handle is gone",
    (State.READING, State.FREED): "the handle is gone",
    (State.LOST, State.FREED): "the handle is gone",
}
"""Every move a blob may make, and when it is made. There are no others."""


class IllegalMove(RuntimeError):
    """A move that is not in ``LEGAL_MOVES``: a fault of discod's own, or a completion too many."""


class Group:
    """The owner of some blobs, one per manager: the limits that are its own.

    Holds nothing else, so that one group may serve several sessions, one after the other.

    Args:
        max_prefetch: Most blobs that are prefetched (being read, or in RAM) and not yet loaded;
            0 for no prefetch, None for no limit but the arena.
        max_writes: Most writes in flight, at least 1; further ones wait, farthest next use first.
            None for no limit.
        to_device: Whether blobs that were saved from a device are brought back to it before they
            are asked for.

    Raises:
        ValueError: A limit is below its least value.
    """

    def __init__(
        self,
        max_prefetch: int | None = None,
        max_writes: int | None = None,
        to_device: bool = True,
    ) -> None:
        if max_prefetch is not None and max_prefetch < 0:
            raise ValueError(f"max_prefetch is {max_prefetch}; it must be at least 0")
        if max_writes is not None and max_writes < 1:
            raise ValueError(f"max_writes is {max_writes}; it must be at least 1")
        self.max_prefetch = max_prefetch
        self.max_writes = max_writes
        self.to_device = to_device


class Members:
    """The live blobs of one group in one residency: their numbers, and those that wait."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.live = 0
        self.writing = 0
        self.prefetched = 0
        self.on_disk = Ranking(farthest_first=False)
        self.wanted = Ranking(farthest_first=True)

    @property
    def may_write(self) -> bool:
        """Whether one more write may be in flight."""
        return self.group.max_writes is None or self.writing < self.group.max_writes

    @property
    def may_prefetch(self) -> bool:
        """Whether one more blob may be prefetched."""
        return self.group.max_prefetch is None or self.prefetched < self.group.max_prefetch


@dataclass(slots=True, eq=False)
class Blob:
    """All that residency knows of one blob. ``size_bytes`` is its slot's size."""

    id: int
    size_bytes: int
    members: Members
    index: int
    """The how-manieth save of its cycle it is, from 0; below 0 when that cycle is over."""
    slot: int | None
    state: State = State.FILLING
    history: list[State] = field(default_factory=lambda: [State.FILLING])
    pieces: tuple[Piece, ...] = ()
    pins: int = 0
    """Loans: loaded tensors that are alive and lie in the slot."""
    filling: bool = True
    """The slot is being copied to; outlives the state when the handle goes first."""
    io: Io | None = None
    cancelling: bool = False
    urgent: bool = False
    """The read in flight is, or was made, urgent."""
    wanted: bool = False
    """Its write waits for its group's limit."""
    leaving: bool = False
    """Its slot can be had once the write that is wanted or in flight is done."""
    prefetched: bool = False
    """Read, or being read, by prefetch and not yet loaded."""
    asked: bool = False
    """A first load was called."""
    used: bool = False
    """A load was served."""
    written: bool = False
    """A write completed once."""
    clean_loan: bool = False
    """The disk copy was complete when the first of the present loans began."""
    stale: bool = False
    """The RAM copy was changed by a borrower; the disk copy is good."""
    lost: bool = False
    """The only copy was changed by a borrower; LOST follows when nothing uses it any more."""
    spoilt: bool = False
    """The source was changed while it was being copied; LOST follows with the landing."""
    on_device: bool = False
    """A device has got its bytes back ahead of the load, which will need neither slot nor disk."""
    listed: bool = False
    """In :class:`disco_client.ahead.Ahead`."""
    bad_files: frozenset[int] = frozenset()
    """Scratch files on which its write failed."""
    save_error: ScratchError | None = None
    """Its write failed on every file."""
    read_error: Exception | None = None
    """Its last read failed; for the next load to raise."""
    ranking: "Ranking | None" = None
    """The one ranking it is in."""

    def move(self, to: State) -> None:
        """Enter state ``to``.

        Raises:
            IllegalMove: The move is not in ``LEGAL_MOVES``; the state is unchanged.
        """
        if (self.state, to) not in LEGAL_MOVES:
            history = " → ".join(self.history)
            raise IllegalMove(
                f"blob {self.id} cannot go from {self.state} to {to}; its last states: {history}"
            )
        self.state = to
        self.history.append(to)
        if len(self.history) > _MAX_HISTORY:
            del self.history[0]


class Ranking:
    """Blobs by next use: a heap with lazy deletion, so that each operation is O(log n).

    Args:
        farthest_first: Whether :meth:`first` is the blob needed last, or the one needed first.
    """

    def __init__(self, farthest_first: bool) -> None:
        self._sign = -1 if farthest_first else 1
        self._blobs: dict[int, tuple[int, Blob]] = {}
        self._heap: list[tuple[int, int]] = []
        self.total_bytes = 0

    def __len__(self) -> int:
        return len(self._blobs)

    def __iter__(self) -> Iterator[Blob]:
        return iter([blob for _, blob in self._blobs.values()])

    def add(self, blob: Blob, next_use: int) -> None:
        """Put the blob in, or give it another ``next_use``."""
        key = self._sign * next_use
        if blob.id not in self._blobs:
            self.total_bytes += blob.size_bytes
        self._blobs[blob.id] = key, blob
        heapq.heappush(self._heap, (key, blob.id))

    def discard(self, blob: Blob) -> None:
        """Take out a blob that is in."""
        del self._blobs[blob.id]
        self.total_bytes -= blob.size_bytes
        if len(self._heap) > 2 * len(self._blobs) + 64:
            self._heap = [(key, id_) for id_, (key, _) in self._blobs.items()]
            heapq.heapify(self._heap)

    def first(self) -> Blob | None:
        """The blob at the top, which stays in; None when there is none."""
        while self._heap:
            key, id_ = self._heap[0]
            known = self._blobs.get(id_)
            if known is not None and known[0] == key:
                return known[1]
            heapq.heappop(self._heap)
        return None
