"""When each blob is needed next: learned from the last cycle, or newest first.

:class:`Plan` is one finished cycle's order, and which blobs to write at once when the next cycle
is the same. :class:`Order` records the cycle that runs, compares it with the plan, and gives every
blob's next use. What follows from that is decided in ``residency.py``.
"""

import heapq
from collections.abc import Sequence
from enum import Enum

from disco_client.extents import ExtentAllocator
from discod.wire import PAGE_BYTES, align_up

MAX_TRACE_EVENTS = 1 << 20
"""A cycle of more events is not learned: someone keeps a blob for ever, so it never ends."""

OVERDUE_SAVES = 8
OVERDUE_REST = 8
"""A cycle is over, though not all of its blobs are freed, when it has saved this many times the
most that were ever alive, and this part of those is left: a few blobs are being kept for later."""

_LAST_OF_ALL = 1 << 48
"""Next use of a blob that was loaded already or never will be; above every position."""


class Event(Enum):
    """What happened to a blob: saved, loaded for the first time, freed."""

    SAVE = "save"
    LOAD = "load"
    FREE = "free"


def staging_bytes(capacity_bytes: int, largest_bytes: int) -> int:
    """Room to keep for blobs that are on their way to disk.

    An eighth of the arena: a few blobs at least in training, so that writes overlap with compute,
    and never less than one blob.
    """
    return max(largest_bytes, capacity_bytes // 8 // PAGE_BYTES * PAGE_BYTES)


def _spare_bytes(capacity_bytes: int, largest_bytes: int) -> int:
    """Room to keep for the same when what is to be written is known: one blob on its way is enough.

    In simulation (``python -m tests.simulation``) pipelines waited no less with an eighth of the
    arena, and wrote up to a tenth more; with a disk of half the rate they waited 6 % of the time
    instead of 4. A 64th is for small blobs, of which one is written before the next has begun.
    """
    return max(largest_bytes, capacity_bytes // 64 // PAGE_BYTES * PAGE_BYTES)


class Plan:
    """The order of one finished cycle.

    Args:
        sizes: Bytes of each blob, by save index.
        events: What happened, in order, with the save index; at most one ``LOAD`` a blob.
        capacity_bytes: Size of the arena.
    """

    def __init__(
        self, sizes: Sequence[int], events: Sequence[tuple[Event, int]], capacity_bytes: int
    ) -> None:
        self.sizes = tuple(sizes)
        self._events = events
        self._capacity_bytes = capacity_bytes
        self.loads = tuple(index for event, index in events if event is Event.LOAD)
        """Save indices in the order of their first loads."""
        self.next_use = [_LAST_OF_ALL - index for index in range(len(sizes))]
        """Position of each blob's first load; ``_LAST_OF_ALL`` or little less: never loaded."""
        self.saved_bytes = [0]
        """Bytes of the first n saves, by n."""
        self._saves_before_use = [len(sizes)] * len(sizes)
        live = peak = 0
        for position, (event, index) in enumerate(events):
            if event is Event.SAVE:
                live += sizes[index]
                peak = max(peak, live)
                self.saved_bytes.append(self.saved_bytes[-1] + sizes[index])
            elif event is Event.FREE:
                live -= sizes[index]
            else:
                self.next_use[index] = position
                self._saves_before_use[index] = len(self.saved_bytes) - 1
        self.write_at_once: frozenset[int] = frozenset()
        """Save indices of the blobs to write as soon as they are saved: what does not fit."""
        if peak > capacity_bytes:
            self.write_at_once = self._overflow(events, capacity_bytes)

    def scaled(self, first_bytes: int) -> "Plan":
        """The same with all sizes in proportion, the first one ``first_bytes``: a longer batch.

        Itself when one of them could not be saved.
        """
        sizes = [align_up(size * first_bytes // self.sizes[0]) for size in self.sizes]
        if max(sizes) > self._capacity_bytes:
            return self
        return Plan(sizes, self._events, self._capacity_bytes)

    def bytes_before_use(self, index: int, saves: int) -> int:
        """Bytes that are yet to be saved before the blob is needed, after the first ``saves``."""
        before = self._saves_before_use[index]
        return max(0, self.saved_bytes[before] - self.saved_bytes[min(saves, len(self.sizes))])

    def _overflow(self, events: Sequence[tuple[Event, int]], capacity_bytes: int) -> frozenset[int]:
        written, hurried = self._simulate(events, capacity_bytes)
        largest = max(self.sizes)
        reduced = capacity_bytes - _spare_bytes(capacity_bytes, largest)
        if hurried and reduced >= largest:
            # What is used first in, first out (pipeline schedules) would be written through a
            # single slot, each save waiting for the write before it.
            written, _ = self._simulate(events, reduced)
        return frozenset(written)

    def _simulate(
        self, events: Sequence[tuple[Event, int]], capacity_bytes: int
    ) -> tuple[set[int], bool]:
        """Which blobs Belady's rule writes with that capacity, and whether any in a hurry.

        Belady: what is needed last goes. The real allocator is used, because with blobs of
        several sizes not every byte can be used. A blob whose load has passed and whose free has
        not is being used: its position is the lowest, so it goes only when nothing else is left.
        "In a hurry" is a blob whose place is needed before as many bytes were saved as are spare.
        """
        arena = ExtentAllocator(capacity_bytes)
        spare = _spare_bytes(capacity_bytes, max(self.sizes))
        slots: dict[int, int] = {}
        heap: list[tuple[int, int]] = []
        written: set[int] = set()
        hurried = False
        saves = 0
        for event, index in events:
            if event is Event.FREE:
                if index in slots:
                    arena.free(slots.pop(index), self.sizes[index])
                continue
            saves += event is Event.SAVE
            if index in slots:
                continue
            while (slot := arena.allocate(self.sizes[index])) is None:
                _, victim = heapq.heappop(heap)
                if victim not in slots:  # freed since
                    continue
                arena.free(slots.pop(victim), self.sizes[victim])
                if event is Event.SAVE and victim not in written:
                    since = self.saved_bytes[saves - 1] - self.saved_bytes[victim + 1]
                    hurried = hurried or since < spare
                written.add(victim)
            slots[index] = slot
            heapq.heappush(heap, (-self.next_use[index], index))
        return written, hurried


class Order:
    """The running cycle's order: recorded, compared with the plan, asked for next uses.

    A cycle follows the plan of the last one as long as it makes no more saves and its first loads
    come in the planned order. After the first deviation, and without a plan, the newest blob is
    expected to be needed first. When the first save has another size, as with batches of varying
    length, the others are expected to have theirs in proportion. One that has not leaves the order
    as it is, but what does not fit is then not known beforehand.

    Blobs of earlier cycles have an index below 0. They are no part of this one's order.

    Args:
        capacity_bytes: Size of the arena.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity = capacity_bytes
        self.plan = Plan((), (), capacity_bytes)
        """The order of the last cycle that had loads; empty before there was one."""
        self.follows = False
        """Whether this cycle has followed the plan's order so far."""
        self.sized = False
        """Whether it has followed the plan's sizes too."""
        self.saves = 0
        """Saves in this cycle: the index of the next one."""
        self._loads = 0
        self._alive = self._most_alive = 0
        self._sizes: list[int] = []
        self._events: list[tuple[Event, int]] | None = []

    @property
    def all_saved(self) -> bool:
        """Whether every save of the plan was made."""
        return self.follows and self.saves >= len(self.plan.sizes)

    @property
    def over(self) -> bool:
        """Whether all blobs of this cycle are freed again."""
        return self.saves > 0 and self._alive == 0

    @property
    def overdue(self) -> bool:
        """Whether this cycle should end before the next save: see ``OVERDUE_SAVES``."""
        return (
            self._loads > 0
            and self.saves >= OVERDUE_SAVES * self._most_alive
            and OVERDUE_REST * self._alive <= self._most_alive
        )

    def expect_save(self, size_bytes: int) -> bool:
        """A save is coming, perhaps after others. True: this cycle deviates, from now on."""
        if not self.follows:
            return False
        if self.saves == 0 and size_bytes != self.plan.sizes[0]:
            self.plan = self.plan.scaled(size_bytes)
        self.follows = self.saves < len(self.plan.sizes)
        self.sized = self.sized and self.follows and self.plan.sizes[self.saves] == size_bytes
        return not self.follows

    def save(self, size_bytes: int) -> int:
        """A blob was saved; its index."""
        index = self.saves
        self.saves += 1
        self._alive += 1
        self._most_alive = max(self._most_alive, self._alive)
        self._record(Event.SAVE, index)
        if self._events is not None:
            self._sizes.append(size_bytes)
        return index

    def load(self, index: int) -> bool:
        """A blob is loaded for the first time. True: this cycle deviates, from now on."""
        if index < 0:
            return False
        self._record(Event.LOAD, index)
        loads = self._loads
        self._loads += 1
        if not self.follows:
            return False
        self.follows = loads < len(self.plan.loads) and self.plan.loads[loads] == index
        self.sized = self.sized and self.follows
        return not self.follows

    def free(self, index: int) -> None:
        """A blob was freed."""
        if index < 0:
            return
        self._alive -= 1
        self._record(Event.FREE, index)

    def spoil(self) -> None:
        """This cycle is not like the next: do not learn from it."""
        self._events = None

    def end_cycle(self) -> int:
        """Learn from this cycle if it had loads and is news, and begin the next.

        Returns:
            How many saves it had: by so much the indices of blobs that still live are now less.
        """
        saves = self.saves
        complete = self.all_saved and self._loads == len(self.plan.loads)
        # One that was like the last as far as it went is a step that was broken off.
        known = self.follows and (self.sized or not complete)
        if self._events and self._loads and not known:
            self.plan = Plan(self._sizes, self._events, self._capacity)
        self.follows = self.sized = bool(self.plan.sizes)
        self.saves = self._loads = self._alive = self._most_alive = 0
        self._sizes = []
        self._events = []
        return saves

    def next_use(self, index: int, used: bool) -> int:
        """A number that is the greater the later the blob is needed; constant until ``used``.

        It changes for all blobs when the cycle deviates. Blobs that were used count as needed
        last, among themselves newest first.
        """
        if used or (self.follows and index < 0):
            return _LAST_OF_ALL - index
        return self.plan.next_use[index] if self.follows else -index

    def writes_at_once(self, index: int) -> bool:
        """Whether the plan wants the blob written as soon as it is saved."""
        return self.sized and index in self.plan.write_at_once

    def bytes_before_use(self, index: int) -> int:
        """Bytes the plan has yet to be saved before the blob is needed; 0 without a plan."""
        if not self.follows or index < 0:
            return 0
        return self.plan.bytes_before_use(index, self.saves)

    def _record(self, event: Event, index: int) -> None:
        if self._events is not None:
            self._events.append((event, index))
            if len(self._events) > MAX_TRACE_EVENTS:
                self._events = None
