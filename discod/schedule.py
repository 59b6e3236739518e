"""Which piece of which job runs next: pure bookkeeping, without threads, locks or I/O.

Three classes: urgent reads before prefetch reads before writes. Inside a class, owners take
turns by bytes (deficit round robin, in its surplus form: an owner may finish the piece that
overdraws it, and waits until its debt is paid); an owner's own jobs run first in, first out.
Writes never occupy all threads, so that a read that comes finds one at once.

A job runs in pieces of at most one chunk, several at a time; of ``LONG_PIECE_BYTES`` where no read
has been urgent for a while, so that there are fewer of them. Small jobs of one owner whose extents
lie side by side can run as one piece. :mod:`discod.engine` runs them.
"""

from collections import OrderedDict, deque
from collections.abc import Hashable
from enum import IntEnum
from typing import Generic, TypeVar

MOST_JOINED = 255
"""Jobs that join another; far below what one system call takes (IOV_MAX, 1,024)."""

LONG_PIECE_BYTES = 16 << 20
"""Half the calls of two chunks of the default size; a disk gains nothing from longer ones."""

CALM_PIECES = 256
"""Pieces without an urgent read, after which they may be long: 2 GiB, about a second."""


class Priority(IntEnum):
    """The classes, first one first."""

    URGENT = 0
    PREFETCH = 1
    WRITE = 2


class Entry:
    """A job as the schedule sees it: whose it is, how urgent, and how far it has come.

    Args:
        owner: Whom fairness is between.
        priority: Its class.
        size_bytes: Its size.
        file: What it reads or writes, where it may run together with its neighbours.
        offset: Where in ``file``.
    """

    __slots__ = (
        *("file", "joined", "offset", "owner"),
        *("priority", "running", "size_bytes", "taken_bytes"),
    )

    def __init__(
        self,
        owner: Hashable,
        priority: Priority,
        size_bytes: int,
        file: Hashable | None = None,
        offset: int = 0,
    ) -> None:
        if size_bytes <= 0:
            raise ValueError(f"a job of {size_bytes} bytes")
        self.owner = owner
        self.priority = priority
        self.size_bytes = size_bytes
        self.file = file
        self.offset = offset
        self.taken_bytes = 0
        self.running = 0
        self.joined = False


E = TypeVar("E", bound=Entry)


class _Class(Generic[E]):
    """The queues of one class, one per owner that has anything queued."""

    def __init__(self, quantum_bytes: int) -> None:
        self._quantum_bytes = quantum_bytes
        self._queues: dict[Hashable, OrderedDict[E, None]] = {}
        self._turns: deque[Hashable] = deque()
        self._credit_bytes: dict[Hashable, int] = {}

    def __bool__(self) -> bool:
        return bool(self._turns)

    def push(self, entry: E) -> None:
        queue = self._queues.get(entry.owner)
        if queue is None:
            queue = self._queues[entry.owner] = OrderedDict()
            self._turns.append(entry.owner)
            self._credit_bytes[entry.owner] = self._quantum_bytes
        queue[entry] = None

    def head(self) -> E:
        """The job whose turn it is. There must be one."""
        while self._credit_bytes[self._turns[0]] <= 0:
            self._credit_bytes[self._turns[0]] += self._quantum_bytes
            self._turns.rotate(-1)
        return next(iter(self._queues[self._turns[0]]))

    def next_of(self, owner: Hashable) -> E | None:
        """The job of ``owner`` that is next among its own."""
        return next(iter(self._queues.get(owner, ())), None)

    def charge(self, owner: Hashable, size_bytes: int) -> None:
        self._credit_bytes[owner] -= size_bytes

    def holds(self, entry: E) -> bool:
        return entry in self._queues.get(entry.owner, ())

    def remove(self, entry: E) -> bool:
        if not self.holds(entry):
            return False
        queue = self._queues[entry.owner]
        del queue[entry]
        if not queue:
            self._forget(entry.owner)
        return True

    def remove_owner(self, owner: Hashable) -> list[E]:
        queue = self._queues.get(owner)
        if queue is None:
            return []
        self._forget(owner)
        return list(queue)

    def _forget(self, owner: Hashable) -> None:
        del self._queues[owner], self._credit_bytes[owner]
        self._turns.remove(owner)


class Schedule(Generic[E]):
    """The queues of one pool of threads.

    Args:
        threads: Threads of the pool, at least 2.
        chunk_bytes: Most bytes of one piece, where reads are urgent now and then; else of twice as
            much, but no more than ``LONG_PIECE_BYTES``.
    """

    def __init__(self, threads: int, chunk_bytes: int) -> None:
        if threads < 2:
            raise ValueError(f"{threads} threads: a write could keep a read waiting")
        self._most_writes = threads - 1
        self._chunk_bytes = chunk_bytes
        self._long_bytes = max(chunk_bytes, min(2 * chunk_bytes, LONG_PIECE_BYTES))
        self._calm = 0
        """Pieces since a read was urgent."""
        self._classes = {priority: _Class[E](chunk_bytes) for priority in Priority}
        self._writes_running = 0

    @property
    def ready(self) -> bool:
        """Whether :meth:`pop` would return a piece."""
        return self._next_class() is not None

    def push(self, entry: E) -> None:
        """Queue a job behind the others of its owner and class."""
        self._classes[entry.priority].push(entry)

    def pop(self) -> tuple[E, int, int] | None:
        """Take the next piece: job, start and length in the job. :meth:`finish` must follow."""
        queues = self._next_class()
        if queues is None:
            return None
        entry = queues.head()
        start = entry.taken_bytes
        most = self._chunk_bytes if self._calm < CALM_PIECES else self._long_bytes
        length = min(most, entry.size_bytes - start)
        self._calm = 0 if entry.priority is Priority.URGENT else self._calm + 1
        queues.charge(entry.owner, length)
        entry.taken_bytes += length
        entry.running += 1
        if entry.taken_bytes == entry.size_bytes:
            queues.remove(entry)
        if entry.priority is Priority.WRITE:
            self._writes_running += 1
        return entry, start, length

    def join(self, entry: E, joined: list[E] | None = None) -> list[E]:
        """Take also the jobs that can run in one piece with ``entry``, of which all was just taken.

        These are the next ones of its owner and class that extend its extent, upwards or downwards,
        up to a chunk in all. :meth:`finish` must follow for each. Urgent reads run alone:
        somebody waits for that one.

        Args:
            entry: What was taken.
            joined: Where to put them, at once: it has them also when this raises.
        """
        joined = [] if joined is None else joined
        if entry.file is None or entry.priority is Priority.URGENT:
            return joined
        queues = self._classes[entry.priority]
        start, end = entry.offset, entry.offset + entry.size_bytes
        while (other := queues.next_of(entry.owner)) is not None and len(joined) < MOST_JOINED:
            size = other.size_bytes
            if (
                other.file != entry.file
                or other.taken_bytes
                or end - start + size > self._chunk_bytes
            ):
                break
            if other.offset == end:
                end += size
            elif other.offset + size == start:
                start = other.offset
            else:
                break
            queues.charge(entry.owner, size)
            queues.remove(other)
            other.taken_bytes = size
            other.running = 1
            other.joined = True
            joined.append(other)
        return joined

    def finish(self, entry: E) -> bool:
        """A piece of ``entry`` has ended. True when it was the last: nothing runs or is queued."""
        entry.running -= 1
        if entry.priority is Priority.WRITE and not entry.joined:
            self._writes_running -= 1
        return entry.running == 0 and not self._classes[entry.priority].holds(entry)

    def drop(self, entry: E) -> bool:
        """Take what is queued of ``entry`` out. True when nothing of it runs either."""
        self._classes[entry.priority].remove(entry)
        return entry.running == 0

    def cancel(self, entry: E) -> bool:
        """Take ``entry`` out if no piece of it was ever taken; else leave it and return False."""
        return entry.taken_bytes == 0 and self._classes[entry.priority].remove(entry)

    def promote(self, entry: E) -> None:
        """Make a prefetch read urgent. What is queued of it goes behind other urgent reads."""
        if entry.priority is not Priority.PREFETCH:
            return
        queued = self._classes[Priority.PREFETCH].remove(entry)
        entry.priority = Priority.URGENT
        if queued:
            self._classes[Priority.URGENT].push(entry)

    def drop_owner(self, owner: Hashable) -> list[E]:
        """Take out all that is queued of ``owner``; what runs of it runs on."""
        return [entry for queues in self._classes.values() for entry in queues.remove_owner(owner)]

    def _next_class(self) -> _Class[E] | None:
        for priority, queues in self._classes.items():
            if queues and (
                priority is not Priority.WRITE or self._writes_running < self._most_writes
            ):
                return queues
        return None
