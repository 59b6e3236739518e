"""One attached client: residency's instructions carried out over the arena and the link.

All calls take one lock, hand over what the daemon has answered, and go on; no thread runs here
between calls. Neither user code nor a copy runs under the lock.

*Why finalizers cannot deadlock.* A handle or a loaned view may be collected at any moment, also
inside a section that holds the lock, on the same thread. A finalizer therefore only appends to a
queue and tries the lock without waiting; whoever holds the lock looks at the queue once more
after letting go (:meth:`Session._section`).

*Why a waiter misses nothing.* ZeroMQ's fd signals edges, and any call on the socket may eat one.
So whoever settles anything while another thread polls wakes it, and a poller drains before it
sleeps. One thread polls at a time; the others wait on the condition.

Knows no torch: :mod:`disco_client.stored` copies tensors in and out.
"""

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict

from disco_client.arena import Arena
from disco_client.errors import BlobModified, HandleReleased
from disco_client.instructions import Counters as Traffic
from disco_client.link import Link
from disco_client.residency import Group, Residency
from disco_client.stats import Counters, Stats
from disco_client.transfers import Transfers
from discod.wire import align_up


class Loan:
    """A blob's bytes, lent to a reader as a view of its slot.

    Attributes:
        changed: Tells whether the borrower changed the bytes in place; set by the reader.
    """

    __slots__ = ("blob", "changed")

    def __init__(self, blob: int) -> None:
        self.blob = blob
        self.changed: Callable[[], bool] = lambda: False


class Session:
    """The client's side of one attachment. See the module's text for its rules.

    Args:
        arena: This client's arena.
        link: The attached link.
    """

    def __init__(self, arena: Arena, link: Link) -> None:
        self.link = link
        self.forked = False
        self._arena = arena
        self._residency = Residency(arena.size_bytes, files=len(link.directories))
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._polling = False
        self._closed = False
        self._dropped: deque[int | Loan] = deque()
        self._loans: dict[int, list[Loan]] = {}
        self._transfers = Transfers(link, self._residency)
        self._save_wait_seconds = 0.0
        self._load_wait_seconds = 0.0
        self._cycle_start = (0.0, 0.0)
        self._cycle_waits = (0.0, 0.0)

    # Blobs

    def save(self, size_bytes: int, copy_in: Callable[[memoryview], None], group: Group) -> int:
        """A new blob of ``size_bytes`` (above 0), filled by ``copy_in``; its id.

        Waits while the arena is full and room is being made.

        Raises:
            RoomError: There is no room and none can be made; nothing was saved.
            DaemonLost: Room could only be made by a daemon that is gone.
        """
        with self._section():
            blob = self._place(align_up(size_bytes), group)
            slot = self._residency.slot(blob)
            try:
                self._arena.back(slot + align_up(size_bytes))
            except BaseException:
                self._transfers.carry_out(self._residency.abandon(blob))
                raise
        try:
            copy_in(self._arena.view[slot : slot + size_bytes])
        except BaseException:
            with self._section():
                self._transfers.carry_out(self._residency.abandon(blob))
                self._tell_waiters()
            raise
        with self._section():
            self._transfers.carry_out(self._residency.filled(blob))
            self._tell_waiters()
        return blob

    def load(self, blob: int, size_bytes: int) -> tuple[memoryview, Loan]:
        """The blob's bytes as a writable view, whose slot is kept until the view is collected.

        Raises:
            BlobError: It cannot be read back; the leaf says why.
            RoomError: The arena is held by other loans, so there is nowhere to read it into.
            DaemonLost: It is on disk and the daemon is gone.
        """
        with self._section():
            if any(loan.changed() for loan in self._loans.get(blob, ())):
                raise BlobModified(
                    "a tensor loaded from this handle was changed in place and is still alive; "
                    "clone() it before changing it, or save it again"
                )
            ready = self._try_load(blob)
            if not ready:
                started = time.monotonic()
                try:
                    while not self._try_load(blob):
                        self._wait()
                finally:
                    self._load_wait_seconds += time.monotonic() - started
            slot = self._residency.slot(blob)
            view = self._arena.view[slot : slot + size_bytes]
            loan = Loan(blob)
            self._loans.setdefault(blob, []).append(loan)
            weakref.finalize(view, self._drop, loan).atexit = False
        return view, loan

    def release(self, blob: int) -> None:
        """Forget the blob. Safe in a finalizer: never waits and never raises."""
        self._drop(blob)

    def wait_saved(self, blob: int, timeout: float | None) -> None:
        """Until the blob needs no more of the disk: it is written, or stays in RAM.

        Raises:
            TimeoutError: Not within ``timeout`` seconds; the save goes on.
            ScratchError: Its write failed. The bytes are still in RAM and can be loaded.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._section():
            while not self._residency.saved(blob):
                if deadline is not None and time.monotonic() >= deadline:
                    raise TimeoutError(f"the save was not done within {timeout} s; it goes on")
                self._wait(deadline)
            error = self._residency.save_error(blob)
            if error is not None:
                raise error

    def prefetch(self, count: int | None) -> None:
        """Start reading the ``count`` blobs that are needed next, or as many as there is room."""
        with self._section():
            self._transfers.carry_out(self._residency.prefetch(count))

    # The whole

    def stats(self) -> Stats:
        """The counters now."""
        with self._section():
            waits = self._save_wait_seconds, self._load_wait_seconds
            totals = _counters(self._residency.totals, waits)
            last = _counters(self._residency.last_cycle, self._cycle_waits)
            return Stats(
                **asdict(totals),
                live_blobs=self._residency.live_blobs,
                arena_bytes=self._arena.size_bytes,
                last_cycle=last,
            )

    def close(self) -> None:
        """Detach. Blobs that are still held are lost; tensors that were loaded stay valid."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            while self._polling:  # its fds must stay open until that thread is off them
                self.link.wake()
                self._changed.wait()
            self._changed.notify_all()
            self.link.close()
            self._arena.close()

    def after_fork(self) -> None:
        """In a forked child: this session is the parent's; nothing of it may be touched."""
        self.forked = True
        self.link.abandon()

    # Sections and waiting

    @contextmanager
    def _section(self) -> Iterator[None]:
        if self.forked:
            raise HandleReleased(
                "this handle belongs to the process that forked this one; a blob can be loaded "
                "only where it was saved"
            )
        with self._lock:
            if self._closed:
                raise HandleReleased("this process has detached from the daemon (close())")
            self._settle()
            try:
                yield
            finally:
                if not self._closed:
                    self._settle()
        self._clear_dropped()

    def _settle(self) -> None:
        """Take in every reply and every drop, and tell the waiters when there were any."""
        changed = False
        while self.link.drain() or self._dropped:
            changed = True
            while self._dropped:
                self._take_drop(self._dropped.popleft())
        self.link.check(blocked=False)
        if changed:
            self._tell_waiters()

    def _tell_waiters(self) -> None:
        """Something changed that another thread may wait for."""
        self._changed.notify_all()
        if self._polling:
            self.link.wake()

    def _wait(self, deadline: float | None = None) -> None:
        """Let go of the lock until something may have changed, or the deadline has passed."""
        self.link.check(blocked=True)
        timeout = self.link.patience
        if deadline is not None:
            timeout = min(timeout, max(0.0, deadline - time.monotonic()))
        if self._polling:
            self._changed.wait(timeout)
        else:
            self._polling = True
            self._lock.release()
            try:
                self.link.wait(timeout)
            finally:
                self._lock.acquire()
                self._polling = False
                self._changed.notify_all()
        if self._closed:
            raise HandleReleased("this process has detached from the daemon (close())")
        self._settle()

    def _drop(self, what: int | Loan) -> None:
        if self.forked or self._closed:
            return
        self._dropped.append(what)
        self._clear_dropped()

    def _clear_dropped(self) -> None:
        while self._dropped and self._lock.acquire(blocking=False):
            try:
                if self._closed:
                    return
                self._settle()
            finally:
                self._lock.release()

    def _take_drop(self, what: int | Loan) -> None:
        if isinstance(what, Loan):
            loans = self._loans[what.blob]
            loans.remove(what)
            if not loans:
                del self._loans[what.blob]
            self._transfers.carry_out(self._residency.unpin(what.blob, what.changed()))
        else:
            self._transfers.carry_out(self._residency.free(what))
            self._transfers.forget(what)
            if self._residency.live_blobs == 0:
                self._end_cycle()

    def _end_cycle(self) -> None:
        """Note the cycle's waits, and tell the daemon that the scratch is not in use."""
        waits = self._save_wait_seconds, self._load_wait_seconds
        self._cycle_waits = waits[0] - self._cycle_start[0], waits[1] - self._cycle_start[1]
        self._cycle_start = waits
        self._transfers.trim()

    # Room

    def _place(self, size_bytes: int, group: Group) -> int:
        blob = self._try_place(size_bytes, group)
        if blob is None:
            started = time.monotonic()
            try:
                while blob is None:
                    self._wait()
                    blob = self._try_place(size_bytes, group)
            finally:
                self._save_wait_seconds += time.monotonic() - started
        return blob

    def _try_place(self, size_bytes: int, group: Group) -> int | None:
        blob, instructions = self._residency.try_place(size_bytes, group)
        self._transfers.carry_out(instructions)
        return blob

    def _try_load(self, blob: int) -> bool:
        ready, instructions = self._residency.load(blob)
        self._transfers.carry_out(instructions)
        return ready


def _counters(traffic: Traffic, waits: tuple[float, float]) -> Counters:
    return Counters(**asdict(traffic), save_wait_seconds=waits[0], load_wait_seconds=waits[1])
