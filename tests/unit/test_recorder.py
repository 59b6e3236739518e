"""The ring of records: bounded, in order, and as it was recorded."""

import errno

import pytest

from discod.recorder import (
    FAILED,
    MOST_AT_A_TIME,
    NOBODY,
    RECORD_BYTES,
    Kind,
    Record,
    Recorder,
    Source,
    source,
    unpack,
)
from discod.schedule import Priority
from discod.wire.codec import MAX_RECORDS_BYTES


def fill(recorder: Recorder, count: int) -> None:
    """Record so many calls, which begin at 0, 1, 2 and so on."""
    for _ in range(count):
        at = recorder.end
        recorder.call(Kind.WRITE, 0, NOBODY, 4096, 1, at, at, at + 1, None)


def starts(records: bytes) -> list[int]:
    return [record.began_ns for record in unpack(records)]


def test_a_record_comes_back_as_it_was() -> None:
    """A trace would show another call than the one that was made."""
    recorder = Recorder(4)
    error = OSError(errno.ENOSPC, "full")
    recorder.call(Kind.URGENT_READ, 255, Source(7, 3), 1 << 30, 256, 1, 2, 1 << 62, error)
    recorder.wait(Kind.READ_WAIT, NOBODY, 5, 9)
    _, records = recorder.part(0)
    assert list(unpack(records)) == [
        Record(1, 2, 1 << 62, 1 << 30, 7, 3, 256, errno.ENOSPC, Kind.URGENT_READ, 255),
        Record(5, 5, 9, 0, 0, -1, 0, 0, Kind.READ_WAIT, 0),
    ]


@pytest.mark.parametrize("error", [ValueError(), OSError(), OSError(1 << 40, "odd"), OSError("x")])
def test_an_error_without_errno_is_recorded(error: Exception) -> None:
    """An odd error would end the I/O thread that records it."""
    recorder = Recorder(4)
    recorder.call(Kind.WRITE, 0, NOBODY, 1, 1, 0, 0, 0, error)
    assert [record.outcome for record in unpack(recorder.part(0)[1])] == [FAILED]


@pytest.mark.parametrize("rank", [-1, 0, 1 << 31, (1 << 63) - 1])
def test_any_rank_can_be_recorded(rank: int) -> None:
    """A client that says it is rank 2^40 would end the I/O threads."""
    recorder = Recorder(4)
    recorder.wait(Kind.ROOM_WAIT, source(1, rank), 0, 1)
    (record,) = unpack(recorder.part(0)[1])
    assert record.rank == min(rank, (1 << 31) - 1)


def test_a_full_ring_forgets_the_oldest() -> None:
    """The daemon would grow, or the trace would begin with what is long past."""
    recorder = Recorder(10)
    fill(recorder, 13)
    first, records = recorder.part(0)
    assert (first, starts(records)) == (3, [3, 4, 5, 6, 7, 8, 9])
    first, records = recorder.part(10)  # the ring begins anew
    assert (first, starts(records)) == (10, [10, 11, 12])
    assert recorder.end == 13


@pytest.mark.parametrize("first", [13, 14, (1 << 63) - 1])
def test_what_is_not_recorded_yet_is_empty(first: int) -> None:
    """A question for the future would be answered with the past."""
    recorder = Recorder(10)
    fill(recorder, 13)
    assert recorder.part(first) == (13, b"")


def test_a_part_fits_into_a_message() -> None:
    """A reply would be over the limit of the wire, and the daemon fail at it."""
    recorder = Recorder(2 * MOST_AT_A_TIME)
    fill(recorder, 2 * MOST_AT_A_TIME)
    _, records = recorder.part(0)
    assert len(records) == MOST_AT_A_TIME * RECORD_BYTES
    assert MAX_RECORDS_BYTES - RECORD_BYTES < len(records) <= MAX_RECORDS_BYTES


def test_half_a_record_is_refused() -> None:
    """A daemon with another form of records would be misread in silence."""
    with pytest.raises(ValueError, match="are no records"):
        unpack(bytes(RECORD_BYTES + 1))


def test_kinds_are_those_of_the_schedule() -> None:
    """Reads would be shown as writes."""
    assert [*map(int, Priority)] == [Kind.URGENT_READ, Kind.READ_AHEAD, Kind.WRITE]
