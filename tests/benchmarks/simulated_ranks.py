"""More ranks than two cores can run: the daemon's own schedule over a simulated disk.

What the daemon decides is in :mod:`discod.schedule`, which is pure. Here it serves many owners on
threads whose transfers take a time drawn from a seed, at most one unit for a chunk; so a wait of
one unit is the wait for one chunk. What a real disk does when several transfers share it is left
out: :mod:`tests.benchmarks.blocked_read` measures that.
"""

import heapq
import random
from collections.abc import Callable
from statistics import median
from typing import Any, Protocol

from discod.schedule import Entry, Priority, Schedule

THREADS = 4
CHUNK_BYTES = 8 << 20
BLOB_BYTES = (4 << 20, 16 << 20, 64 << 20)
"""By turns: fairness is by bytes, so the owners of small blobs must not get less."""
QUEUED_BLOBS = 3
"""Of each owner, at any time: it never has nothing to do."""
CHUNKS_PER_OWNER = 60
LEAST_SHARE = 0.5
"""Of a unit: the shortest transfer of a whole chunk."""
READ_GAPS = (1.0, 5.0)
"""Units between the start of one urgent read and the next one's arrival."""


class Order(Protocol):
    """What decides: :class:`discod.schedule.Schedule`, or another for comparison."""

    def push(self, entry: Entry) -> None:
        """Queue a job."""

    def pop(self) -> tuple[Entry, int, int] | None:
        """The next piece: job, start, length."""

    def finish(self, entry: Entry) -> bool:
        """A piece has ended; True when the job has."""


def daemons_order() -> Order:
    """The daemon's."""
    schedule: Schedule[Entry] = Schedule(THREADS, CHUNK_BYTES)
    return schedule


def simulate(
    owners: int,
    load: Priority,
    order: Callable[[], Order] = daemons_order,
    chunks_per_owner: int = CHUNKS_PER_OWNER,
) -> dict[str, Any]:
    """``owners`` that do ``load`` without end, one of them at a time blocked in a read.

    Args:
        owners: How many.
        load: Writes leave a thread to reads; prefetch reads leave none.
        order: Who decides what runs next.
        chunks_per_owner: How long it goes on.

    Returns:
        ``fairness``, the bytes served to the owner with most over those with least;
        ``longest_wait`` and ``median_wait`` of the blocked reads, in chunks; ``reads``.
    """
    return _Run(owners, load, order()).until(owners * chunks_per_owner * CHUNK_BYTES)


class _Run:
    """Events in the order of their time: the end of a transfer, or the arrival of a read."""

    def __init__(self, owners: int, load: Priority, order: Order) -> None:
        self._owners = owners
        self._load = load
        self._order = order
        self._random = random.Random(owners)
        self._now = 0.0
        self._served = [0] * owners
        self._waits: list[float] = []
        self._arrived: dict[Entry, float] = {}
        self._idle = THREADS
        # Time, a number that keeps the order total, and what ends; None: a read arrives.
        self._events: list[tuple[float, int, tuple[Entry, int, int] | None]] = []
        self._number = 0
        self._owner_of: dict[Entry, int] = {}

    def until(self, total_bytes: int) -> dict[str, Any]:
        for _ in range(QUEUED_BLOBS):
            for owner in range(self._owners):
                self._push(owner, self._load, BLOB_BYTES[owner % len(BLOB_BYTES)])
        self._at(self._random.uniform(*READ_GAPS), None)
        self._start()
        while sum(self._served) < total_bytes:
            self._now, _, ended = heapq.heappop(self._events)
            if ended is None:
                owner = self._random.randrange(self._owners)
                self._arrived[self._push(owner, Priority.URGENT, CHUNK_BYTES)] = self._now
            else:
                self._end(*ended)
            self._start()
        return {
            "owners": self._owners,
            "load": self._load.name.lower(),
            "fairness": max(self._served) / max(1, min(self._served)),
            "longest_wait": max(self._waits),
            "median_wait": median(self._waits),
            "reads": len(self._waits),
        }

    def _push(self, owner: int, priority: Priority, size_bytes: int) -> Entry:
        entry = Entry(owner, priority, size_bytes)
        self._owner_of[entry] = owner
        self._order.push(entry)
        return entry

    def _at(self, time: float, event: tuple[Entry, int, int] | None) -> None:
        self._number += 1
        heapq.heappush(self._events, (time, self._number, event))

    def _start(self) -> None:
        while self._idle and (piece := self._order.pop()) is not None:
            self._idle -= 1
            entry, _, length = piece
            if entry in self._arrived:
                self._waits.append(self._now - self._arrived.pop(entry))
                self._at(self._now + self._random.uniform(*READ_GAPS), None)
            took = self._random.uniform(LEAST_SHARE, 1.0) * length / CHUNK_BYTES
            self._at(self._now + took, piece)

    def _end(self, entry: Entry, start: int, length: int) -> None:
        self._idle += 1
        over = self._order.finish(entry)
        owner = self._owner_of[entry]
        if entry.priority is self._load:
            self._served[owner] += length
        if over:
            del self._owner_of[entry]
            if entry.priority is self._load:
                self._push(owner, self._load, entry.size_bytes)
