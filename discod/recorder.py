"""The last I/O calls of an engine, or the last waits of the clients, for ``discod trace``.

A ring of packed records: bounded memory that is touched only as far as it is used, no object for
the garbage collector, and a part of it is a message as it is. Times are
``CLOCK_MONOTONIC`` in nanoseconds, one clock for all processes of a machine.

How the records are asked for is in :mod:`discod.trace`, what becomes of them in
:mod:`discod.trace_events`.
"""

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

from discod.wire.codec import MAX_RECORDS_BYTES

_FORMAT = struct.Struct("<qqqIIiHhBBxx")
RECORD_BYTES = _FORMAT.size

MOST_CALLS = 1 << 16
"""Of all devices: 3 MiB; a minute of disks that move 8 GB/s in chunks of 8 MiB."""
MOST_WAITS = 1 << 14

MOST_AT_A_TIME = MAX_RECORDS_BYTES // RECORD_BYTES
"""As many as one message takes."""

RING_OF_WAITS = 0
FIRST_RING_OF_CALLS = 1
"""The ring of a device is this and its number (``TraceRequest.ring``)."""

_MAX_INT32 = (1 << 31) - 1
_MAX_INT16 = (1 << 15) - 1

FAILED = -1
"""The outcome of what failed without an errno: as a rule its directory had gone out of use."""


class Kind(IntEnum):
    """What took its time. The first three are those of :class:`discod.schedule.Priority`."""

    URGENT_READ = 0
    READ_AHEAD = 1
    WRITE = 2
    ROOM_WAIT = 3
    """A save waited for room in the arena."""
    READ_WAIT = 4
    """A load waited for its bytes, or for room to read them into."""
    DEVICE_WAIT = 5
    """A save waited for earlier copies off a device."""


class Source(NamedTuple):
    """A client, as records name it.

    Attributes:
        pid: Its process, 0 where that cannot be seen from here.
        rank: -1 outside distributed jobs.
    """

    pid: int
    rank: int


NOBODY = Source(0, -1)


def source(pid: int, rank: int) -> Source:
    """A client that says it is ``rank``, which may be any number."""
    return Source(pid, max(-1, min(rank, _MAX_INT32)))


class Record(NamedTuple):
    """One call or wait.

    Attributes:
        queued_ns, began_ns, ended_ns: When; of a wait ``queued_ns`` is ``began_ns``.
        length: The bytes that the call was for, whatever came of it; of a wait 0.
        pid, rank: As in :class:`Source`.
        blobs: How many blobs the call was for: neighbours go together.
        outcome: 0: done; else the errno, or ``FAILED``.
        kind: A :class:`Kind`.
        thread: The number of the thread in the device's pool; of a wait 0.
    """

    queued_ns: int
    began_ns: int
    ended_ns: int
    length: int
    pid: int
    rank: int
    blobs: int
    outcome: int
    kind: int
    thread: int


class Recorder:
    """One ring of records. Not thread-safe.

    Args:
        most: How many it keeps.

    Attributes:
        end: How many were ever recorded: the number of the next one.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._ring = bytearray(most * RECORD_BYTES)
        self.end = 0

    def call(
        self,
        kind: int,
        thread: int,
        source: Source,
        length: int,
        blobs: int,
        queued_ns: int,
        began_ns: int,
        ended_ns: int,
        error: BaseException | None,
    ) -> None:
        """Keep a record; the arguments are as in :class:`Record`, ``error`` what it ended with."""
        _FORMAT.pack_into(
            self._ring,
            self.end % self._most * RECORD_BYTES,
            queued_ns,
            began_ns,
            ended_ns,
            length,
            source.pid,
            source.rank,
            blobs,
            0 if error is None else _outcome(error),
            kind,
            thread,
        )
        self.end += 1

    def wait(self, kind: Kind, source: Source, began_ns: int, ended_ns: int) -> None:
        """Keep a client's wait."""
        self.call(kind, 0, source, 0, 0, began_ns, began_ns, ended_ns, None)

    def part(self, first: int, most: int = MOST_AT_A_TIME) -> tuple[int, bytes]:
        """Records from number ``first`` on, or from the oldest that is kept, in their order.

        Args:
            first: The number.
            most: How many at most; fewer where the ring begins anew.

        Returns:
            The number of the first one, and the records, which :func:`unpack` reads.
        """
        first = min(max(first, self.end - self._most, 0), self.end)
        start = first % self._most
        count = min(most, self.end - first, self._most - start)
        return first, bytes(self._ring[start * RECORD_BYTES : (start + count) * RECORD_BYTES])


def unpack(records: bytes) -> Iterator[Record]:
    """The records of a part. Raises ``ValueError`` when it is none."""
    if len(records) % RECORD_BYTES:
        raise ValueError(f"{len(records)} bytes are no records of {RECORD_BYTES} bytes")
    return map(Record._make, _FORMAT.iter_unpack(records))


def _outcome(error: BaseException) -> int:
    code = error.errno if isinstance(error, OSError) else None
    return code if code and 0 < code <= _MAX_INT16 else FAILED
