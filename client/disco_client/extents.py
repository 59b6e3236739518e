"""Which bytes of the arena and of the scratch files are in use: allocation only, no memory, no I/O.

:class:`ExtentAllocator` serves one address range, the arena or one scratch file.
:class:`ScratchSpace` spreads blobs over the scratch files. All offsets and sizes are bytes and
multiples of ``PAGE_BYTES``. What is kept where, and for how long, is decided in ``residency.py``.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from discod.wire import PAGE_BYTES

STRIPE_BYTES = 8 << 20
"""Least piece of a blob that is split over files: a full-speed request on every NVMe measured."""

_UNBOUNDED_BYTES = 1 << 62
"""The address range of an allocator without a capacity: offsets stay below the wire's 2**63."""

_CHUNK_RANGES = 128
"""A chunk of free ranges is halved at this length: first fit looks through one chunk and the
chunks' maxima, which is 4 times faster than one list at 7,000 free ranges."""


class ExtentAllocator:
    """Lowest-address first fit over one range, so that every cycle reuses the same extents.

    The free ranges are kept sorted in chunks (see ``_CHUNK_RANGES``); neighbours are joined.

    Args:
        capacity_bytes: Size of the range; None for no limit.
    """

    def __init__(self, capacity_bytes: int | None) -> None:
        if capacity_bytes is not None:
            _check_size(capacity_bytes)
        self._limit = _UNBOUNDED_BYTES if capacity_bytes is None else capacity_bytes
        self._allocated: dict[int, int] = {}
        self._used = 0
        # Parallel lists, one entry per chunk: its ranges' starts and lengths, its first start,
        # its greatest length.
        self._starts: list[list[int]] = [[0]]
        self._lengths: list[list[int]] = [[self._limit]]
        self._heads: list[int] = [0]
        self._largest: list[int] = [self._limit]

    @property
    def used_bytes(self) -> int:
        """Bytes allocated now."""
        return self._used

    @property
    def free_bytes(self) -> int:
        """Bytes not allocated now, in however many pieces."""
        return self._limit - self._used

    @property
    def largest_free_bytes(self) -> int:
        """The greatest size that :meth:`allocate` can serve now."""
        return max(self._largest, default=0)

    @property
    def high_water_bytes(self) -> int:
        """End of the highest extent allocated now; 0 when there is none."""
        if self._starts and self._starts[-1][-1] + self._lengths[-1][-1] == self._limit:
            return self._starts[-1][-1]
        return self._limit

    def allocate(self, size_bytes: int) -> int | None:
        """The offset of a new extent, or None when no free range is large enough.

        Raises:
            ValueError: The size is not a positive multiple of ``PAGE_BYTES``.
        """
        _check_size(size_bytes)
        chunk = _first_fit(self._largest, size_bytes)
        if chunk is None:
            return None
        lengths = self._lengths[chunk]
        at = _first_fit(lengths, size_bytes)
        if at is None:
            raise RuntimeError(f"free ranges are inconsistent at {self._heads[chunk]}")
        offset = self._starts[chunk][at]
        length = lengths[at]
        if length == size_bytes:
            self._remove(chunk, at)
        else:
            self._starts[chunk][at] = offset + size_bytes
            lengths[at] = length - size_bytes
            self._heads[chunk] = self._starts[chunk][0]
            if length == self._largest[chunk]:
                self._largest[chunk] = max(lengths)
        self._allocated[offset] = size_bytes
        self._used += size_bytes
        return offset

    def free(self, offset: int, size_bytes: int) -> None:
        """Give back the extent that :meth:`allocate` gave as ``offset`` for ``size_bytes``.

        Raises:
            ValueError: No such extent is allocated; nothing has changed.
        """
        if self._allocated.get(offset) != size_bytes:
            raise ValueError(f"no extent of {size_bytes} bytes is allocated at {offset}")
        del self._allocated[offset]
        self._used -= size_bytes
        if not self._heads:
            self._insert(0, 0, offset, size_bytes)
            return
        # Only in chunk 0 can the range come before all others (at == 0), so the range before it,
        # if any, is in the same chunk.
        chunk = max(bisect_right(self._heads, offset) - 1, 0)
        starts, lengths = self._starts[chunk], self._lengths[chunk]
        at = bisect_left(starts, offset)
        next_chunk, next_at = (chunk, at) if at < len(starts) else (chunk + 1, 0)
        joins_previous = at > 0 and starts[at - 1] + lengths[at - 1] == offset
        joins_next = (
            next_chunk < len(self._heads)
            and self._starts[next_chunk][next_at] == offset + size_bytes
        )
        if joins_previous:
            lengths[at - 1] += size_bytes
            if joins_next:
                lengths[at - 1] += self._lengths[next_chunk][next_at]
            self._largest[chunk] = max(self._largest[chunk], lengths[at - 1])
            if joins_next:
                self._remove(next_chunk, next_at)
        elif joins_next:
            lengths = self._lengths[next_chunk]
            lengths[next_at] += size_bytes
            self._starts[next_chunk][next_at] = offset
            self._heads[next_chunk] = self._starts[next_chunk][0]
            self._largest[next_chunk] = max(self._largest[next_chunk], lengths[next_at])
        else:
            self._insert(chunk, at, offset, size_bytes)

    def _remove(self, chunk: int, at: int) -> None:
        starts, lengths = self._starts[chunk], self._lengths[chunk]
        length = lengths[at]
        del starts[at], lengths[at]
        if not starts:
            del self._starts[chunk], self._lengths[chunk], self._heads[chunk], self._largest[chunk]
            return
        self._heads[chunk] = starts[0]
        if length == self._largest[chunk]:
            self._largest[chunk] = max(lengths)

    def _insert(self, chunk: int, at: int, start: int, length: int) -> None:
        if not self._heads:
            self._starts, self._lengths = [[start]], [[length]]
            self._heads, self._largest = [start], [length]
            return
        starts, lengths = self._starts[chunk], self._lengths[chunk]
        starts.insert(at, start)
        lengths.insert(at, length)
        self._heads[chunk] = starts[0]
        self._largest[chunk] = max(self._largest[chunk], length)
        if len(starts) >= _CHUNK_RANGES:
            half = len(starts) // 2
            self._starts[chunk : chunk + 1] = starts[:half], starts[half:]
            self._lengths[chunk : chunk + 1] = lengths[:half], lengths[half:]
            self._heads[chunk : chunk + 1] = starts[0], starts[half]
            self._largest[chunk : chunk + 1] = max(lengths[:half]), max(lengths[half:])


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a blob on one scratch file; ``slot_offset`` is where in the blob it begins."""

    file: int
    offset: int
    slot_offset: int
    length: int


class ScratchSpace:
    """The extents of all scratch files: one unbounded allocator each.

    A blob of at least two stripes is split, so that it alone can use all devices; a smaller one
    goes whole to the file with the fewest bytes.

    Args:
        files: Number of scratch files, at least 1.
    """

    def __init__(self, files: int) -> None:
        if files < 1:
            raise ValueError(f"{files} scratch files; at least one is needed")
        self._files = tuple(ExtentAllocator(None) for _ in range(files))
        self._next_file = 0

    @property
    def files(self) -> int:
        """Number of scratch files."""
        return len(self._files)

    @property
    def used_bytes(self) -> int:
        """Bytes allocated now, over all files."""
        return sum(file.used_bytes for file in self._files)

    def high_water_bytes(self, file: int) -> int:
        """End of the highest extent allocated now in ``file``; 0 when there is none."""
        return self._files[file].high_water_bytes

    def allocate(
        self, size_bytes: int, avoid: frozenset[int] = frozenset()
    ) -> tuple[Piece, ...] | None:
        """Extents for a whole blob, outside the files in ``avoid``; None when all are avoided.

        Raises:
            ValueError: The size is not a positive multiple of ``PAGE_BYTES``.
        """
        _check_size(size_bytes)
        count = len(self._files)
        usable = [
            file for turn in range(count) if (file := (self._next_file + turn) % count) not in avoid
        ]
        if not usable:
            return None
        usable.sort(key=lambda file: self._files[file].used_bytes)
        chosen = usable[: max(1, min(len(usable), size_bytes // STRIPE_BYTES))]
        self._next_file = (chosen[-1] + 1) % count
        pages = size_bytes // PAGE_BYTES
        pieces = []
        slot_offset = 0
        for done, file in enumerate(chosen):
            length = (pages * (done + 1) // len(chosen)) * PAGE_BYTES - slot_offset
            offset = self._files[file].allocate(length)
            if offset is None:
                raise RuntimeError(f"scratch file {file} is out of addresses")
            pieces.append(Piece(file, offset, slot_offset, length))
            slot_offset += length
        return tuple(pieces)

    def free(self, pieces: Sequence[Piece]) -> None:
        """Give back what :meth:`allocate` gave.

        Raises:
            ValueError: A piece is not allocated exactly so; those before it have been freed.
        """
        for piece in pieces:
            self._files[piece.file].free(piece.offset, piece.length)


def _first_fit(lengths: list[int], size_bytes: int) -> int | None:
    for at, length in enumerate(lengths):
        if length >= size_bytes:
            return at
    return None


def _check_size(size_bytes: int) -> None:
    if size_bytes <= 0 or size_bytes % PAGE_BYTES:
        raise ValueError(f"{size_bytes} bytes is not a positive multiple of {PAGE_BYTES}")
