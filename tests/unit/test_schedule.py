"""The order in which pieces run, checked by simulation with random jobs and owners."""

import itertools
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from discod.schedule import CALM_PIECES, Entry, Priority, Schedule

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
        places = itertools.accumulate(owned, initial=0)
        for size, offset in zip(owned, places, strict=False):
            schedule.push(Entry(str(owner), priority, size, "file", offset))
    left = {str(owner): sum(owned) for owner, owned in enumerate(sizes)}
    served: dict[str, int] = defaultdict(int)
    while piece := schedule.pop():
        entry, _, length = piece
        for joined in schedule.join(entry) if length == entry.size_bytes else []:
            schedule.finish(joined)
            length += joined.size_bytes
        schedule.finish(entry)
        served[str(entry.owner)] += length
        left[str(entry.owner)] -= length
        waiting = [owner for owner, size in left.items() if size]
        if len(waiting) == len(left):  # all have been waiting all the time
            assert max(served.values()) - min(served[owner] for owner in left) <= 2 * CHUNK
    assert not any(left.values())


@pytest.mark.parametrize("priority", [Priority.WRITE, Priority.PREFETCH])
def test_pieces_are_long_while_no_read_is_urgent(priority: Priority) -> None:
    """The daemon would cost more than it must, or trainers wait for long pieces all the time."""
    schedule: Schedule[Entry] = Schedule(2, CHUNK)

    def next_length() -> int:
        (entry,) = queue(schedule, "a", priority, 3 * CHUNK)
        piece = schedule.pop()
        assert piece is not None
        schedule.drop(entry)
        schedule.finish(entry)
        return piece[2]

    for _ in range(2):
        assert {next_length() for _ in range(CALM_PIECES)} == {CHUNK}
        assert next_length() == 2 * CHUNK
        queue(schedule, "b", Priority.URGENT, CHUNK)
        taken(schedule, 1)
    assert next_length() == CHUNK


@pytest.mark.parametrize(
    ("chunk", "longest"),
    [(4096, 8192), (8 << 20, 16 << 20), (12 << 20, 16 << 20), (1 << 30, 1 << 30)],
)
def test_the_longest_piece(chunk: int, longest: int) -> None:
    """A large --chunk would be doubled beyond what one system call takes, a small one ignored."""
    schedule: Schedule[Entry] = Schedule(2, chunk)
    queue(schedule, "a", Priority.WRITE, (CALM_PIECES + 3) * chunk)
    lengths = []
    while (piece := schedule.pop()) is not None:
        schedule.finish(piece[0])
        lengths.append(piece[2])
    assert max(lengths) == longest


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


def neighbours(schedule: Schedule[Entry], *places: tuple[str, Priority, str, int]) -> list[Entry]:
    """Jobs of 2 bytes, by owner, class, file and offset."""
    entries = [Entry(owner, priority, 2, file, offset) for owner, priority, file, offset in places]
    for entry in entries:
        schedule.push(entry)
    return entries


@pytest.mark.parametrize("offsets", [[4, 6, 8, 10], [10, 8, 6, 4], [6, 8, 4, 10]])
@pytest.mark.parametrize("priority", [Priority.PREFETCH, Priority.WRITE])
def test_neighbours_run_together(priority: Priority, offsets: list[int]) -> None:
    """Small blobs would cost a system call, a lock and a wake-up each."""
    schedule: Schedule[Entry] = Schedule(2, CHUNK)
    entries = neighbours(schedule, *[("a", priority, "f", offset) for offset in [*offsets, 12]])
    assert schedule.pop() == (entries[0], 0, 2)
    assert schedule.join(entries[0]) == entries[1:4], "in order, and no more than a chunk"
    assert not any(map(schedule.cancel, entries[:4]))
    assert [schedule.finish(entry) for entry in entries[:4]] == [True] * 4
    assert schedule.pop() == (entries[4], 0, 2)


@pytest.mark.parametrize(
    "other",
    [
        ("b", Priority.WRITE, "f", 2),
        ("a", Priority.PREFETCH, "f", 2),
        ("a", Priority.WRITE, "g", 2),
        ("a", Priority.WRITE, "f", 4),
    ],
    ids=["owner", "class", "file", "gap"],
)
def test_others_do_not_run_together(other: tuple[str, Priority, str, int]) -> None:
    """Bytes would go to the wrong place, or to the wrong account, or a read be a write."""
    schedule: Schedule[Entry] = Schedule(3, CHUNK)
    (entry,) = neighbours(schedule, ("a", Priority.WRITE, "f", 0))
    schedule.pop()
    neighbours(schedule, other)
    assert schedule.join(entry) == []
    assert schedule.pop() is not None


def test_urgent_reads_run_alone() -> None:
    """A trainer would wait for bytes that nobody waits for."""
    schedule: Schedule[Entry] = Schedule(2, CHUNK)
    first, _ = neighbours(schedule, *[("a", Priority.URGENT, "f", offset) for offset in (0, 2)])
    schedule.pop()
    assert schedule.join(first) == []


def test_jobs_that_run_together_take_one_thread() -> None:
    """Many small writes in one piece would keep the other threads from all writes, or for ever."""
    schedule: Schedule[Entry] = Schedule(3, CHUNK)
    entries = neighbours(schedule, *[("a", Priority.WRITE, "f", 2 * i) for i in range(12)])
    pieces = []
    for _ in range(2):
        piece = schedule.pop()
        assert piece is not None
        pieces.append([piece[0], *schedule.join(piece[0])])
    assert pieces == [entries[:4], entries[4:8]]
    assert not schedule.ready
    for entry in pieces[0]:
        schedule.finish(entry)
    assert schedule.pop() == (entries[8], 0, 2)
    assert not schedule.ready, "the end of a piece let two begin"


PLACES = st.tuples(
    st.sampled_from("ab"),
    st.sampled_from(Priority),
    st.sampled_from("fg"),
    st.integers(1, CHUNK),
    st.sampled_from(["above", "below", "apart"]),
)


@given(st.lists(PLACES, max_size=30))
def test_any_jobs_join_rightly(places: list[tuple[str, Priority, str, int, str]]) -> None:
    """Of some sequence a job would be lost, run twice or out of order, or with what is not near."""
    schedule: Schedule[Entry] = Schedule(2, CHUNK)
    expected: dict[tuple[object, Priority], list[Entry]] = defaultdict(list)
    low = high = 1000
    for owner, priority, file, size, side in places:
        offset = {"above": high, "below": low - size, "apart": high + 1}[side]
        low, high = min(low, offset), max(high, offset + size)
        entry = Entry(owner, priority, size, file, offset)
        schedule.push(entry)
        expected[owner, priority].append(entry)
    while piece := schedule.pop():
        leader = piece[0]
        together = [leader, *schedule.join(leader)]
        queue = expected[leader.owner, leader.priority]
        assert together == queue[: len(together)]
        del queue[: len(together)]
        assert len({entry.file for entry in together}) == 1
        assert sum(entry.size_bytes for entry in together) <= CHUNK
        by_place = sorted(together, key=lambda entry: entry.offset)
        for entry, following in itertools.pairwise(by_place):
            assert entry.offset + entry.size_bytes == following.offset
        assert all([schedule.finish(entry) for entry in together])  # noqa: C419  finishes each
    assert not any(expected.values())


class Simulation(RuleBasedStateMachine):
    """Random jobs, pieces, cancellations, promotions and failures against a simple model."""

    THREADS = 3

    def __init__(self) -> None:
        super().__init__()
        self.schedule: Schedule[Entry] = Schedule(self.THREADS, CHUNK)
        self.alive: list[Entry] = []
        self.running: list[Entry] = []
        self.led: dict[Entry, Entry] = {}
        """Which job each one that was joined runs together with."""
        self.covered: dict[Entry, int] = {}

    @rule(owner=st.integers(0, 3), priority=st.sampled_from(Priority), size=st.integers(1, 40))
    def push(self, owner: int, priority: Priority, size: int) -> None:
        self.push_one(Entry(owner, priority, size))

    @rule(
        owner=st.integers(0, 3),
        priority=st.sampled_from(Priority),
        sizes=st.lists(st.integers(1, 3), min_size=2, max_size=6),
        gaps=st.sets(st.integers(0, 5)),
        upwards=st.booleans(),
    )
    def push_neighbours(
        self, owner: int, priority: Priority, sizes: list[int], gaps: set[int], upwards: bool
    ) -> None:
        start = end = 1000
        for number, size in enumerate(sizes):
            gap = number in gaps
            offset = end + gap if upwards else start - size - gap
            start, end = min(start, offset), max(end, offset + size)
            self.push_one(Entry(owner, priority, size, "file", offset))

    def push_one(self, entry: Entry) -> None:
        self.schedule.push(entry)
        self.alive.append(entry)
        self.covered[entry] = 0

    @precondition(lambda self: len(self.pieces()) < self.THREADS)
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
        if length == entry.size_bytes:
            self.join(entry)

    def join(self, entry: Entry) -> None:
        behind = [
            other
            for other in self.queued()
            if (other.owner, other.priority) == (entry.owner, entry.priority)
        ]
        joined = self.schedule.join(entry)
        by_place = sorted([entry, *joined], key=lambda one: one.offset)
        for one, following in itertools.pairwise(by_place):
            assert one.offset + one.size_bytes == following.offset
        assert not joined or sum(one.size_bytes for one in by_place) <= CHUNK
        assert not joined or entry.priority is not Priority.URGENT
        assert set(joined) <= set(behind)
        for one in joined:
            assert self.covered[one] == 0
            self.covered[one] = one.size_bytes
            self.led[one] = entry
            self.running.append(one)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), failed=st.booleans())
    def finish(self, data: st.DataObject, failed: bool) -> None:
        """All that ran in one piece ends at once."""
        entry = data.draw(st.sampled_from(self.running))
        entry = self.led.get(entry, entry)
        for one in [entry, *[one for one, leader in self.led.items() if leader is entry]]:
            self.led.pop(one, None)
            self.finish_one(one, failed)

    def finish_one(self, entry: Entry, failed: bool) -> None:
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
        writes = [entry for entry in self.pieces() if entry.priority is Priority.WRITE]
        assert len(writes) < self.THREADS

    @invariant()
    def nothing_is_forgotten(self) -> None:
        writes = [entry for entry in self.pieces() if entry.priority is Priority.WRITE]
        can_run = [
            entry
            for entry in self.queued()
            if entry.priority is not Priority.WRITE or len(writes) < self.THREADS - 1
        ]
        assert self.schedule.ready == bool(can_run)

    def pieces(self) -> list[Entry]:
        return [entry for entry in self.running if entry not in self.led]

    def queued(self) -> list[Entry]:
        return [entry for entry in self.alive if self.covered[entry] < entry.size_bytes]


TestSimulation = Simulation.TestCase
