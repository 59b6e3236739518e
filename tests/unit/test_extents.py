"""The allocator against a naive model, and how blobs are spread over scratch files."""

from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from disco_client import extents
from disco_client.extents import STRIPE_BYTES, ExtentAllocator, Piece, ScratchSpace
from discod.wire import PAGE_BYTES


class NaiveAllocator:
    """First fit by looking at every page."""

    def __init__(self, pages: int) -> None:
        self.pages = [False] * pages

    def allocate(self, pages: int) -> int | None:
        for first in range(len(self.pages) - pages + 1):
            if not any(self.pages[first : first + pages]):
                self.pages[first : first + pages] = [True] * pages
                return first
        return None

    def free(self, first: int, pages: int) -> None:
        self.pages[first : first + pages] = [False] * pages

    def largest_free(self) -> int:
        runs = "".join("x" if used else "." for used in self.pages).split("x")
        return max(len(run) for run in runs)

    def high_water(self) -> int:
        return max((page + 1 for page, used in enumerate(self.pages) if used), default=0)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=100)
@given(
    capacity=st.integers(1, 60),
    chunk=st.sampled_from([2, 3, 128]),
    steps=st.lists(st.tuples(st.integers(1, 7), st.integers(0, 1000)), max_size=80),
)
def test_it_does_what_first_fit_does(
    capacity: int, chunk: int, steps: list[tuple[int, int]]
) -> None:
    """Else extents overlap, free space is lost, or a cycle does not reuse its extents."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extents, "_CHUNK_RANGES", chunk)
        naive, allocator = NaiveAllocator(capacity), ExtentAllocator(capacity * PAGE_BYTES)
        live: list[tuple[int, int]] = []
        for pages, choice in steps:
            if live and choice % 5 < 2:
                first, freed = live.pop(choice % len(live))
                naive.free(first, freed)
                allocator.free(first * PAGE_BYTES, freed * PAGE_BYTES)
            else:
                expected = naive.allocate(pages)
                offset = allocator.allocate(pages * PAGE_BYTES)
                assert offset == (None if expected is None else expected * PAGE_BYTES)
                if expected is not None:
                    live.append((expected, pages))
            assert allocator.used_bytes == sum(naive.pages) * PAGE_BYTES
            assert allocator.free_bytes == (capacity - sum(naive.pages)) * PAGE_BYTES
            assert allocator.largest_free_bytes == naive.largest_free() * PAGE_BYTES
            assert allocator.high_water_bytes == naive.high_water() * PAGE_BYTES
        for first, pages in live:
            allocator.free(first * PAGE_BYTES, pages * PAGE_BYTES)
        assert allocator.largest_free_bytes == capacity * PAGE_BYTES


def test_freeing_what_is_not_allocated_is_refused() -> None:
    """Else a double free hands the same bytes to two blobs."""
    allocator = ExtentAllocator(8 * PAGE_BYTES)
    offset = allocator.allocate(2 * PAGE_BYTES)
    assert offset == 0
    for wrong in [(0, PAGE_BYTES), (PAGE_BYTES, PAGE_BYTES), (0, 4 * PAGE_BYTES)]:
        with pytest.raises(ValueError, match="no extent"):
            allocator.free(*wrong)
    allocator.free(0, 2 * PAGE_BYTES)
    with pytest.raises(ValueError, match="no extent"):
        allocator.free(0, 2 * PAGE_BYTES)
    assert allocator.used_bytes == 0


@pytest.mark.parametrize("size", [0, -PAGE_BYTES, PAGE_BYTES + 1, 1])
def test_sizes_are_whole_pages(size: int) -> None:
    """Else O_DIRECT refuses the I/O, long after the mistake."""
    with pytest.raises(ValueError, match="multiple"):
        ExtentAllocator(None).allocate(size)
    with pytest.raises(ValueError, match="multiple"):
        ScratchSpace(1).allocate(size)
    with pytest.raises(ValueError, match="multiple"):
        ExtentAllocator(size)


def test_without_a_capacity_it_never_ends() -> None:
    """Else a scratch file has a limit that nobody set."""
    allocator = ExtentAllocator(None)
    assert [allocator.allocate(1 << 40) for _ in range(3)] == [0, 1 << 40, 2 << 40]
    assert allocator.high_water_bytes == 3 << 40


def test_a_large_blob_uses_every_file() -> None:
    """Else one blob is written at the speed of one device."""
    space = ScratchSpace(3)
    size = 3 * STRIPE_BYTES + PAGE_BYTES
    pieces = space.allocate(size)
    assert pieces is not None
    assert sorted(piece.file for piece in pieces) == [0, 1, 2]
    assert pieces[0].slot_offset == 0
    for piece, following in pairwise(pieces):
        assert piece.slot_offset + piece.length == following.slot_offset
    assert sum(piece.length for piece in pieces) == size
    lengths = [piece.length for piece in pieces]
    assert max(lengths) - min(lengths) <= PAGE_BYTES
    assert all(length % PAGE_BYTES == 0 for length in lengths)
    space.free(pieces)
    assert space.used_bytes == 0


def test_a_blob_is_split_no_finer_than_a_stripe() -> None:
    """Else many files make requests too small for any of them."""
    space = ScratchSpace(8)
    assert len(space.allocate(2 * STRIPE_BYTES) or ()) == 2
    assert len(space.allocate(2 * STRIPE_BYTES - PAGE_BYTES) or ()) == 1


def test_small_blobs_go_where_least_is() -> None:
    """Else one device gets all of the small blobs, or one file grows beyond the others."""
    space = ScratchSpace(3)
    first = [space.allocate(PAGE_BYTES) for _ in range(3)]
    assert sorted(pieces[0].file for pieces in first if pieces) == [0, 1, 2]
    big = space.allocate(4 * PAGE_BYTES)
    assert big is not None
    following = [space.allocate(PAGE_BYTES) for _ in range(4)]
    assert big[0].file not in {pieces[0].file for pieces in following if pieces}


def test_equal_files_take_turns_also_when_nothing_stays() -> None:
    """Else a blob at a time, saved and freed, wears out the first device alone."""
    space = ScratchSpace(2)
    used = []
    for _ in range(4):
        pieces = space.allocate(PAGE_BYTES)
        assert pieces is not None
        used.append(pieces[0].file)
        space.free(pieces)
    assert used == [0, 1, 0, 1]


def test_avoided_files_get_nothing() -> None:
    """Else a blob is written again to the device that has just failed."""
    space = ScratchSpace(3)
    for size in (PAGE_BYTES, 4 * STRIPE_BYTES):
        pieces = space.allocate(size, avoid=frozenset({0, 2}))
        assert pieces is not None
        assert {piece.file for piece in pieces} == {1}
    assert space.allocate(PAGE_BYTES, avoid=frozenset({0, 1, 2})) is None


def test_pieces_are_freed_once() -> None:
    """Else a piece freed twice is given to two blobs."""
    space = ScratchSpace(1)
    pieces = space.allocate(PAGE_BYTES)
    assert pieces == (Piece(file=0, offset=0, slot_offset=0, length=PAGE_BYTES),)
    assert space.high_water_bytes(0) == PAGE_BYTES
    space.free(pieces)
    with pytest.raises(ValueError, match="no extent"):
        space.free(pieces)


def test_at_least_one_file() -> None:
    """Else a client without scratch fails at its first write instead of at its start."""
    with pytest.raises(ValueError, match="at least one"):
        ScratchSpace(0)
