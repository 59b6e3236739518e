"""The daemon's schedule over a simulated disk: what the scale benchmark says of many ranks."""

from collections import deque

import pytest

from discod.schedule import Entry, Priority
from tests.benchmarks.simulated_ranks import CHUNK_BYTES, simulate


@pytest.mark.parametrize("owners", [3, 64])
@pytest.mark.parametrize("load", [Priority.WRITE, Priority.PREFETCH])
def test_the_schedule_is_fair_to_many(owners: int, load: Priority) -> None:
    """One job's ranks would starve another's; or a blocked read would wait behind many others."""
    found = simulate(owners, load, chunks_per_owner=30 + 300 // owners)
    assert found["fairness"] <= 1.15
    assert found["reads"] > 10
    assert 0 <= found["longest_wait"] <= 1.0
    # Writes leave a thread to it, reads ahead do not: both are run as they are meant.
    assert (found["longest_wait"] > 0) is (load is Priority.PREFETCH)


class FirstComeFirstServed:
    """Whole jobs in the order of their arrival, whatever they are."""

    def __init__(self) -> None:
        self._queue: deque[Entry] = deque()

    def push(self, entry: Entry) -> None:
        self._queue.append(entry)

    def pop(self) -> tuple[Entry, int, int] | None:
        if not self._queue:
            return None
        entry = self._queue[0]
        start = entry.taken_bytes
        length = min(CHUNK_BYTES, entry.size_bytes - start)
        entry.taken_bytes += length
        entry.running += 1
        if entry.taken_bytes == entry.size_bytes:
            self._queue.popleft()
        return entry, start, length

    def finish(self, entry: Entry) -> bool:
        entry.running -= 1
        return entry.running == 0 and entry.taken_bytes == entry.size_bytes


def test_an_unfair_order_is_found() -> None:
    """The simulation would praise any schedule, and its goals could not be missed."""
    found = simulate(8, Priority.WRITE, FirstComeFirstServed, chunks_per_owner=30)
    assert found["fairness"] > 2
    assert found["longest_wait"] > 2
