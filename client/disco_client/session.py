"""One attached client: residency's instructions carried out over the arena and the link.

Every change is a section of ``monitor``, which has the lock, the waits, and what finalizers drop.
Neither user code, nor a copy, nor a wait runs inside of a section.

Knows no torch: :mod:`disco_client.stored` copies tensors in and out.
"""

import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict

from disco_client.arena import Arena
from disco_client.errors import (
    ArenaFull,
    BlobModified,
)
from disco_client.instructions import Counters as Traffic
from disco_client.link import Link
from disco_client.monitor import Monitor
from disco_client.residency import Group, Residency
from disco_client.stats import Counters, Stats
from disco_client.transfers import Transfers
from discod.wire import align_up

LOAN_WAIT_SECONDS = 10.0
"""How long a call waits for room that other threads' loaded tensors hold, before ``ArenaFull``."""


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
        self._arena = arena
        self._residency = Residency(arena.size_bytes, files=len(link.directories))
        self._monitor: Monitor[int | Loan] = Monitor(link, self._take_drop)
        self._threads: set[int] = set()
        self._loans: dict[int, list[Loan]] = {}
        self._transfers = Transfers(link, self._residency)
        self._save_wait_seconds = 0.0
        self._load_wait_seconds = 0.0
        self._cycle_start = (0.0, 0.0)
        self._cycle_waits = (0.0, 0.0)

    # Blobs

    def save(
        self, size_bytes: int, copy_in: Callable[[memoryview], None], group: Group, owner: object
    ) -> tuple[int, "weakref.finalize[[int | Loan], object]"]:
        """A new blob of ``size_bytes`` (above 0), filled by ``copy_in``; its id, and its end.

        The blob is freed when ``owner`` is collected, or when the finalizer that is returned is
        called. Waits while the arena is full and room is being made.

        Raises:
            RoomError: There is no room and none can be made; nothing was saved.
            DaemonLost: Room could only be made by a daemon that is gone.
        """
        blob = self._place(align_up(size_bytes), group)
        try:
            slot = self._residency.slot(blob)
            copy_in(self._arena.view[slot : slot + size_bytes])
        except BaseException:
            with self._monitor.section():
                self._transfers.carry_out(self._residency.abandon(blob))
                self._monitor.tell_waiters()
            raise
        with self._monitor.section(settle=False):
            self._transfers.carry_out(self._residency.filled(blob))
            self._monitor.tell_waiters()
            end = weakref.finalize(owner, self._monitor.drop, blob)
            end.atexit = False
        return blob, end

    def load(self, blob: int, size_bytes: int) -> tuple[memoryview, Loan]:
        """The blob's bytes as a writable view, whose slot is kept until the view is collected.

        Raises:
            BlobError: It cannot be read back; the leaf says why.
            RoomError: The arena is held by other loans, so there is nowhere to read it into.
            DaemonLost: It is on disk and the daemon is gone.
        """
        wait = _Wait(self._lenders())
        try:
            while True:
                with self._monitor.section():
                    if self._try_load(blob, wait):
                        return self._lend(blob, size_bytes)
                    self.link.check(blocked=True)
                    seen = self._monitor.changes
                self._monitor.pause(seen)
        finally:
            self._load_wait_seconds += wait.seconds

    def peek(self, blob: int, size_bytes: int) -> memoryview | None:
        """The blob's bytes to look at, if they are in RAM now; as :meth:`load`, but no use of it.

        Raises:
            HandleReleased: It was freed.
        """
        with self._monitor.section():
            if not self._residency.lend_resident(blob):
                return None
            return self._lend(blob, size_bytes)[0]

    def wait_saved(self, blob: int, timeout: float | None) -> None:
        """Until the blob needs no more of the disk: it is written, or stays in RAM.

        Raises:
            TimeoutError: Not within ``timeout`` seconds; the save goes on.
            ScratchError: Its write failed. The bytes are still in RAM and can be loaded.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._monitor.section():
                if self._residency.saved(blob):
                    error = self._residency.save_error(blob)
                    if error is not None:
                        raise error
                    return
                if deadline is not None and time.monotonic() >= deadline:
                    raise TimeoutError(f"the save was not done within {timeout} s; it goes on")
                self.link.check(blocked=True)
                seen = self._monitor.changes
            self._monitor.pause(seen, deadline)

    def prefetch(self, count: int | None) -> None:
        """Start reading the ``count`` blobs that are needed next, or as many as there is room."""
        with self._monitor.section():
            self._transfers.carry_out(self._residency.prefetch(count))

    # The whole

    def stats(self) -> Stats:
        """The counters now."""
        with self._monitor.section():
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
        """Detach. Blobs that are still held are lost; tensors that were loaded stay valid.

        In a signal handler that has interrupted another call of this session, that call's fds
        stay open until the process ends.
        """
        self._monitor.close(self._detach)

    def _detach(self) -> None:
        self.link.close()
        self._arena.close()

    def after_fork(self) -> None:
        """In a forked child: this session is the parent's; nothing of it may be touched."""
        self._monitor.forked = True
        self.link.abandon()

    # Inside of sections

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

    def _lend(self, blob: int, size_bytes: int) -> tuple[memoryview, Loan]:
        slot = self._residency.slot(blob)
        view = self._arena.view[slot : slot + size_bytes]
        loan = Loan(blob)
        self._loans.setdefault(blob, []).append(loan)
        weakref.finalize(view, self._monitor.drop, loan).atexit = False
        return view, loan

    # Room

    def _place(self, size_bytes: int, group: Group) -> int:
        wait = _Wait(self._lenders())
        try:
            while True:
                with self._monitor.section():
                    blob = self._try_place(size_bytes, group, wait)
                    if blob is not None:
                        self._back(blob, size_bytes)
                        return blob
                    self.link.check(blocked=True)
                    seen = self._monitor.changes
                self._monitor.pause(seen)
        finally:
            self._save_wait_seconds += wait.seconds

    def _back(self, blob: int, size_bytes: int) -> None:
        try:
            self._arena.back(self._residency.slot(blob) + size_bytes)
        except ArenaFull:
            self._transfers.carry_out(self._residency.abandon(blob))
            raise

    def _try_place(self, size_bytes: int, group: Group, wait: "_Wait") -> int | None:
        try:
            blob, instructions = self._residency.try_place(size_bytes, group)
        except ArenaFull:
            if wait.over:
                raise
            blob, instructions = None, []
        self._transfers.carry_out(instructions)
        if blob is None:
            wait.begin()
        return blob

    def _try_load(self, blob: int, wait: "_Wait") -> bool:
        if any(loan.changed() for loan in self._loans.get(blob, ())):
            raise BlobModified(
                "a tensor loaded from this handle was changed in place and is still alive; "
                "clone() it before changing it, or save it again"
            )
        try:
            ready, instructions = self._residency.load(blob)
        except ArenaFull:
            if wait.over:
                raise
            ready, instructions = False, []
        self._transfers.carry_out(instructions)
        if not ready:
            wait.begin()
        return ready

    def _lenders(self) -> bool:
        """Whether other threads may hold loans, whose end is worth waiting for."""
        self._threads.add(threading.get_ident())
        return len(self._threads) > 1


class _Wait:
    """How long a call has waited, and whether it should wait for loans of other threads."""

    def __init__(self, for_loans: bool) -> None:
        self._for_loans = for_loans
        self._began: float | None = None

    def begin(self) -> None:
        if self._began is None:
            self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        return 0.0 if self._began is None else time.monotonic() - self._began

    @property
    def over(self) -> bool:
        return not self._for_loans or self.seconds > LOAN_WAIT_SECONDS


def _counters(traffic: Traffic, waits: tuple[float, float]) -> Counters:
    return Counters(**asdict(traffic), save_wait_seconds=waits[0], load_wait_seconds=waits[1])
