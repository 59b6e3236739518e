"""The order in which pieces run, checked by simulation with random jobs and owners."""

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from discod.schedule import Entry, Priority, Schedule

CHUNK = 8
READS = [Priority.URGENT, Priority.PREFETCH]


def taken(schedule: Schedule[Entry], pieces: int) -> list[Entry]:
    """Whose pieces run, one at a time."""
    entries = []
    for _ in range(pieces):
        piece = schedule.pop()
        if piece is None:
            break
        schedule.finish(piece[0])
        entries.append(piece[0])
    return entries


def queue(schedule: Schedule[Entry], owner: str, priority: Priority, *sizes: int) -> list[Entry]:
    entries = [Entry(owner, priority, size) for size in sizes]
    for entry in entries:
        schedule.push(entry)
    return entries


def test_classes_go_first_to_last() -> None:
    """A trainer blocked on a read would wait for prefetches or writes."""
    schedule: Schedule[Entry] = Schedule(2, CHUNK)
    for priority in reversed(Priority):
        queue(schedule, "a", priority, CHUNK, CHUNK)
    assert [entry.priority for entry in taken(schedule, 6)] == sorted(list(Priority) * 2)


def test_an_owners_jobs_run_in_order_and_in_chunks() -> None:
    """Blobs would be written out of order, or in other pieces than --chunk."""
    schedule: Schedule[Entry] = Schedule(2, CHUNK)
    first, second = queue(schedule, "a", Priority.WRITE, 2 * CHUNK + 3, 1)
    pieces = []
    while piece := schedule.pop():
        pieces.append(piece)
        schedule.finish(piece[0])
    assert pieces == [
        (first, 0, CHUNK),
        (first, CHUNK, CHUNK),
        (first, 2 * CHUNK, 3),
        (second, 0, 1),
    ]


@given(
    st.sampled_from(Priority),
    st.lists(st.lists(st.integers(1, 5 * CHUNK), min_size=1), min_size=2, max_size=5),
)
def test_owners_share_by_bytes(priority: Priority, sizes: list[list[int]]) -> None:
    """One client with many or large requests would starve another in the same class."""
    schedule: Schedule[Entry] = Schedule(2, CHUNK)
    for owner, owned in enumerate(sizes):
        queue(schedule, str(owner), priority, *owned)
    left = {str(owner): sum(owned) for owner, owned in enumerate(sizes)}
    served: dict[str, int] = defaultdict(int)
    while piece := schedule.pop():
        entry, _, length = piece
        schedule.finish(entry)
        served[str(entry.owner)] += length
        left[str(entry.owner)] -= length
        waiting = [owner for owner, size in left.items() if size]
        if len(waiting) == len(left):  # all have been waiting all the time
            assert max(served.values()) - min(served[owner] for owner in left) <= 2 * CHUNK
    assert not any(left.values())


@given(st.integers(2, 8), st.integers(1, 50))
def test_writes_leave_a_thread(threads: int, writes: int) -> None:
    """A read that comes while large writes run would wait for one of them."""
    schedule: Schedule[Entry] = Schedule(threads, CHUNK)
    queue(schedule, "a", Priority.WRITE, *[CHUNK] * writes)
    running = []
    while piece := schedule.pop():
        running.append(piece[0])
    assert len(running) == min(writes, threads - 1)
    (read,) = queue(schedule, "b", Priority.PREFETCH, 1)
    assert schedule.ready
    assert schedule.pop() == (read, 0, 1)
    if writes > len(running):
        assert not schedule.ready
        schedule.finish(running[0])
        assert schedule.ready


def test_one_thread_is_refused() -> None:
    """With one thread no write could ever run."""
    with pytest.raises(ValueError, match="1 threads"):
        Schedule(1, CHUNK)


def test_an_empty_job_is_refused() -> None:
    """A job without pieces would never end."""
    with pytest.raises(ValueError, match="0 bytes"):
        Entry("a", Priority.WRITE, 0)


def test_cancel_only_before_it_begins() -> None:
    """A request would be answered as cancelled while its I/O runs."""
    schedule: Schedule[Entry] = Schedule(2, CHUNK)
    begun, queued = queue(schedule, "a", Priority.PREFETCH, 2 * CHUNK, CHUNK)
    schedule.pop()
    assert not schedule.cancel(begun)
    assert schedule.cancel(queued)
    assert not schedule.cancel(queued)
    assert schedule.pop() == (begun, CHUNK, CHUNK)
    assert schedule.pop() is None


def test_promote_moves_what_is_left() -> None:
    """A prefetch on which a trainer is blocked by now would wait behind all others."""
    schedule: Schedule[Entry] = Schedule(2, CHUNK)
    begun, queued, other = queue(schedule, "a", Priority.PREFETCH, 2 * CHUNK, CHUNK, CHUNK)
    (write,) = queue(schedule, "a", Priority.WRITE, CHUNK)
    schedule.pop()
    schedule.promote(other)
    schedule.promote(begun)
    schedule.promote(write)
    assert taken(schedule, 9) == [other, begun, queued, write]


def test_promote_after_the_end_is_harmless() -> None:
    """A promotion that comes late would run a request again."""
    schedule: Schedule[Entry] = Schedule(2, CHUNK)
    (entry,) = queue(schedule, "a", Priority.PREFETCH, CHUNK)
    taken(schedule, 1)
    schedule.promote(entry)
    assert schedule.pop() is None


def test_drop_after_a_failure() -> None:
    """The rest of a job that has failed would be written nevertheless."""
    schedule: Schedule[Entry] = Schedule(3, CHUNK)
    (entry,) = queue(schedule, "a", Priority.WRITE, 4 * CHUNK)
    schedule.pop()
    schedule.pop()
    assert not schedule.finish(entry)
    assert not schedule.drop(entry)
    assert schedule.pop() is None
    assert schedule.finish(entry)


class Simulation(RuleBasedStateMachine):
    """Random jobs, pieces, cancellations, promotions and failures against a simple model."""

    THREADS = 3

    def __init__(self) -> None:
        super().__init__()
        self.schedule: Schedule[Entry] = Schedule(self.THREADS, CHUNK)
        self.alive: list[Entry] = []
        self.running: list[Entry] = []
        self.covered: dict[Entry, int] = {}

    @rule(owner=st.integers(0, 3), priority=st.sampled_from(Priority), size=st.integers(1, 40))
    def push(self, owner: int, priority: Priority, size: int) -> None:
        entry = Entry(owner, priority, size)
        self.schedule.push(entry)
        self.alive.append(entry)
        self.covered[entry] = 0

    @precondition(lambda self: len(self.running) < self.THREADS)
    @rule()
    def pop(self) -> None:
        ready = self.schedule.ready
        piece = self.schedule.pop()
        assert (piece is not None) == ready
        if piece is None:
            return
        entry, start, length = piece
        assert entry in self.alive
        assert start == self.covered[entry]
        assert 0 < length <= CHUNK
        self.covered[entry] += length
        assert self.covered[entry] <= entry.size_bytes
        better = [other for other in self.queued() if other.priority < entry.priority]
        assert not better, "a more urgent job waits"
        self.running.append(entry)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), failed=st.booleans())
    def finish(self, data: st.DataObject, failed: bool) -> None:
        entry = data.draw(st.sampled_from(self.running))
        self.running.remove(entry)
        last = self.schedule.finish(entry)
        if failed:
            last = self.schedule.drop(entry)
            self.covered[entry] = entry.size_bytes
        assert last == (entry not in self.running and self.covered[entry] == entry.size_bytes)
        if last:
            self.alive.remove(entry)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.alive))
        cancelled = self.schedule.cancel(entry)
        assert cancelled == (self.covered[entry] == 0)
        if cancelled:
            self.alive.remove(entry)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def promote(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.alive))
        before = entry.priority
        self.schedule.promote(entry)
        assert entry.priority is (Priority.URGENT if before in READS else Priority.WRITE)

    @rule(owner=st.integers(0, 3))
    def drop_owner(self, owner: int) -> None:
        dropped = self.schedule.drop_owner(owner)
        assert set(dropped) == {entry for entry in self.queued() if entry.owner == owner}
        for entry in dropped:
            self.covered[entry] = entry.size_bytes
            if entry not in self.running:
                self.alive.remove(entry)

    @invariant()
    def a_thread_is_left_for_reads(self) -> None:
        writes = [entry for entry in self.running if entry.priority is Priority.WRITE]
        assert len(writes) < self.THREADS

    @invariant()
    def nothing_is_forgotten(self) -> None:
        writes = [entry for entry in self.running if entry.priority is Priority.WRITE]
        can_run = [
            entry
            for entry in self.queued()
            if entry.priority is not Priority.WRITE or len(writes) < self.THREADS - 1
        ]
        assert self.schedule.ready == bool(can_run)

    def queued(self) -> list[Entry]:
        return [entry for entry in self.alive if self.covered[entry] < entry.size_bytes]


TestSimulation = Simulation.TestCase
