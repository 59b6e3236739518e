"""One attached client: residency's instructions carried out over the arena and the link.

Every change is a section of ``monitor``, which has the lock, the waits, and what finalizers drop.
Neither user code, nor a copy, nor a wait runs inside of a section.

Knows bytes: :mod:`disco_client.store` makes tensors of them.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from disco_client.arena import Arena
from disco_client.devices.interface import Arrival, Departure, Lent
from disco_client.errors import (
    ArenaFull,
    BlobModified,
    BlobTooLarge,
    RoomError,
    ScratchError,
    afresh,
)
from disco_client.interrupts import End
from disco_client.lending import Lending, Loan
from disco_client.link import Link
from disco_client.monitor import Monitor
from disco_client.pace import Pace
from disco_client.reporter import Reporter
from disco_client.residency import Group, Residency
from disco_client.spans import WAIT, profiling, record_function
from disco_client.staging import POLL_SECONDS, NoUnits, Staging, Units
from disco_client.stats import Stats, stats_of
from disco_client.transfers import Transfers
from disco_client.uninterrupted import to_its_end
from disco_client.waits import Wait, Waits
from discod.wire import align_up
from discod.wire.messages import WaitFor

_T = TypeVar("_T")


class Session:
    """The client's side of one attachment. See the module's text for its rules.

    Args:
        arena: This client's arena.
        link: The attached link.
        units: The devices that tensors come from; closed with the session.
        keep_on_device: As :class:`Staging`'s ``keep``.
    """

    def __init__(
        self,
        arena: Arena,
        link: Link,
        units: Units | None = None,
        keep_on_device: int | None = None,
    ) -> None:
        self.link = link
        self._arena = arena
        self._units = units or NoUnits()
        self._residency = Residency(arena.size_bytes, files=link.files)
        self._transfers = Transfers(link, self._residency)
        self._staging = Staging(self._residency, self._transfers, self._units, keep_on_device)
        self._monitor: Monitor[int | Loan] = Monitor(link, self._take_drop, self._staging)
        self._lending = Lending(arena, self._monitor.drop)
        self._waits = Waits()
        self._reporter = Reporter(link, self._residency, self._waits)
        self.detaching = False
        """Whether :meth:`close` has begun to let go: there is no way back."""
        self.detached = False
        """Whether it has let go of everything."""
        self._attached = time.monotonic()
        self._cycles = 0
        self._pace = Pace(arena.size_bytes)

    # Blobs

    def save(
        self,
        size_bytes: int,
        fill: Callable[[int, memoryview], Departure | None],
        group: Group,
        owner: object,
        device: torch.device | None = None,
    ) -> tuple[int, End]:
        """A new blob of ``size_bytes`` (above 0); its id, and its end.

        The blob is freed when ``owner`` is collected, or when the finalizer that is returned is
        called. Waits while the arena is full and room is being made.

        Args:
            size_bytes: Its size.
            fill: Copies the bytes to an offset in the arena, and the memory that is there. Returns
                the copy when it has yet to land.
            group: The owner that it counts for.
            owner: See above.
            device: Whose copies are under way until they land; None for the CPU.

        Raises:
            RoomError: There is no room and none can be made; nothing was saved.
            DaemonLost: Room could only be made by a daemon that is gone.
        """
        blob, slot = self._place(align_up(size_bytes), group, device)
        departure = None
        try:
            departure = fill(slot, self._arena.view[slot : slot + size_bytes])
        except BaseException:
            if departure is not None:
                self.wait_or_tear(departure.landed)
            self._monitor.change(self._abandon, blob)
            raise
        end = self._monitor.change(self._filled, blob, departure, group, owner, settle=False)
        return blob, end

    def load(self, blob: int, size_bytes: int) -> tuple[memoryview, Loan]:
        """The blob's bytes as a writable view, whose slot is kept until the view is collected.

        Raises:
            BlobError: It cannot be read back; the leaf says why.
            RoomError: The arena is held by other loans, so there is nowhere to read it into.
            DaemonLost: It is on disk and the daemon is gone.
        """
        wait = self._waits.begin()
        try:
            return self.wait_for(self._try_load, blob, size_bytes, wait)
        finally:
            self._waits.end_load(wait)

    def at_hand(self, blob: int, device: torch.device) -> Arrival | Lent | None:
        """What ``device`` itself has of the blob, which counts as a load of it.

        Raises:
            HandleReleased, BlobModified: As :meth:`load`.
        """
        return self._monitor.change(self._find, blob, device)

    def arrive(self, arrival: Arrival, memory: memoryview) -> None:
        """A copy of what was loaded was started; it needs ``memory``, the loan, until it landed."""
        self._monitor.change(self._staging.arrive, arrival, memory, settle=False)

    def lend_ahead(self) -> tuple[memoryview, Loan, torch.device, int] | None:
        """What to bring to its device next: bytes and loan, as of a load, device, size.

        The caller answers with :meth:`bring_ahead`, or :meth:`give_up_ahead` of it.
        """
        return self._monitor.change(self._lend_ahead, settle=False)

    def bring_ahead(self, blob: int, arrival: Arrival, memory: memoryview) -> None:
        """The copy of what :meth:`lend_ahead` gave was started."""
        self._monitor.change(self._bring_ahead, blob, arrival, memory, settle=False)

    def give_up_ahead(self, blob: int | None = None) -> None:
        """A device has no memory: drop what it has of live blobs. ``blob`` was not copied to it."""
        self._monitor.change(self._give_up_ahead, blob)

    def peek(self, blob: int, size_bytes: int) -> memoryview | None:
        """The blob's bytes to look at, if they are in RAM now; as :meth:`load`, but no use of it.

        Raises:
            HandleReleased: It was freed.
        """
        return self._monitor.change(self._peek, blob, size_bytes)

    def wait_saved(self, blob: int, timeout: float | None) -> None:
        """Until the blob needs no more of the disk: it is written, or stays in RAM.

        Raises:
            TimeoutError: Not within ``timeout`` seconds; the save goes on.
            ScratchError: Its write failed. The bytes are still in RAM and can be loaded.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout

        def saved() -> bool:
            if not self._residency.saved(blob):
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"the save was not done within {timeout} s; it goes on")
                return False
            error = self._residency.save_error(blob)
            if error is not None:
                raise afresh(error)
            return True

        self.wait_for(saved, deadline=deadline)

    def wait_for(
        self,
        attempt: Callable[..., _T | None],
        *args: Any,
        look: bool = False,
        deadline: float = math.inf,
    ) -> _T:
        """What ``attempt`` gives, other than None and False; made in sections, after each change.

        Args:
            attempt: What to try.
            args: Its arguments.
            look: Try often: what it waits for wakes no one.
            deadline: When to try once more at the latest, by the monotonic clock.

        Raises:
            DaemonLost: The daemon is gone, and so is the hope.
        """
        outcome: tuple[_T | None, int] = self._monitor.change(self._attempt, attempt, args)
        if outcome[0] is not None:
            return outcome[0]
        if profiling():
            with record_function(WAIT):
                return self._go_on(attempt, args, outcome[1], look, deadline)
        return self._go_on(attempt, args, outcome[1], look, deadline)

    def _go_on(
        self,
        attempt: Callable[..., _T | None],
        args: Sequence[Any],
        seen: int,
        look: bool,
        deadline: float,
    ) -> _T:
        """As :meth:`wait_for`, after an attempt that had seen so many changes."""
        while True:
            self._monitor.pause(seen, time.monotonic() + POLL_SECONDS if look else deadline)
            outcome: tuple[_T | None, int] = self._monitor.change(self._attempt, attempt, args)
            value, seen = outcome
            if value is not None:
                return value

    def wait_or_tear(self, ended: Callable[[], bool]) -> None:
        """Until ``ended``, in the face of an error; if that fails, no further call is served.

        For what still writes to a slot that is about to be given to another blob.
        """
        try:
            self.wait_for(ended, look=True)
        except BaseException:
            self._monitor.tear()
            raise

    def wait_for_copies(self) -> None:
        """Until the copies that are under way now have landed, and the devices' memory is free."""
        copies = self._monitor.change(lambda: self._staging.under_way)
        self.wait_for(lambda: all(copy.landed() for copy in copies), look=True)

    def prefetch(self, count: int | None) -> None:
        """Start reading the ``count`` blobs that are needed next, or as many as there is room."""
        self._monitor.change(lambda: self._transfers.carry_out(self._residency.prefetch(count)))

    # The whole

    def stats(self) -> Stats:
        """The counters now."""
        return self._monitor.change(self._stats)

    def close(self) -> None:
        """Detach. Blobs that are still held are lost; tensors that were loaded stay valid.

        In a signal handler that has interrupted another call of this session, that call's fds
        stay open until it is called once more. The same where it was interrupted itself.
        """
        if not self.detached:
            self._monitor.close(self._detach)

    def _detach(self) -> None:
        """Each step may be done again: an interrupted one is, and those after it."""
        self.detaching = True
        self._units.close()
        self._staging.close()
        to_its_end(self._close_fds)
        self.detached = True

    def _close_fds(self) -> None:
        self.link.close()
        self._arena.close()

    def after_fork(self) -> None:
        """In a forked child: this session is the parent's; nothing of it may be touched."""
        self._monitor.forked = True
        self._staging.abandon()
        self.link.abandon()

    # Inside of sections

    def _attempt(
        self, attempt: Callable[..., _T | None], args: Sequence[Any]
    ) -> tuple[_T | None, int]:
        """What ``attempt`` gives, or None and the changes that it has seen."""
        value = attempt(*args)
        if value is not None and value is not False:
            return value, 0
        # While a device copies by itself, it may be that which is waited for.
        self.link.check(blocked=not self._staging.device_works)
        self._reporter.look()
        return None, self._monitor.changes

    def _filled(self, blob: int, departure: Departure | None, group: Group, owner: object) -> End:
        if departure is None:
            self._transfers.carry_out(self._residency.filled(blob))
        else:
            self._staging.depart(blob, departure, group.to_device)
        self._monitor.tell_waiters()
        self._reporter.look()
        end = End(owner, self._monitor.drop, blob)
        end.atexit = False
        return end

    def _abandon(self, blob: int) -> None:
        self._transfers.carry_out(self._residency.abandon(blob))
        self._monitor.tell_waiters()

    def _find(self, blob: int, device: torch.device) -> Arrival | Lent | None:
        found = self._staging.find(blob, device)
        if found is not None:
            self._transfers.carry_out(self._residency.served(blob))
            self._reporter.loaded()
        return found

    def _lend_ahead(self) -> tuple[memoryview, Loan, torch.device, int] | None:
        wanted = self._staging.next_ahead()
        if wanted is None:
            return None
        blob, device, nbytes = wanted
        self._residency.lend_ahead(blob)
        return *self._lend(blob, nbytes), device, nbytes

    def _bring_ahead(self, blob: int, arrival: Arrival, memory: memoryview) -> None:
        self._staging.arrive(arrival, memory)
        self._staging.bring_ahead(blob, arrival)

    def _give_up_ahead(self, blob: int | None) -> None:
        self._staging.give_up()
        if blob is not None:
            self._transfers.carry_out(self._residency.give_up_ahead(blob))

    def _peek(self, blob: int, size_bytes: int) -> memoryview | None:
        if not self._residency.lend_resident(blob):
            return None
        return self._lend(blob, size_bytes)[0]

    def _stats(self) -> Stats:
        return stats_of(
            self._residency, self._waits, self._arena.size_bytes, time.monotonic() - self._attached
        )

    def _take_drop(self, what: int | Loan) -> None:
        if isinstance(what, Loan):
            self._lending.forget(what)
            self._transfers.carry_out(self._residency.unpin(what.blob, what.changed()))
        else:
            self._transfers.carry_out(self._residency.free(what))
            self._transfers.forget(what)
            self._staging.forget(what)
            self._end_cycle()
            if self._residency.live_blobs == 0:
                self._transfers.trim()

    def _end_cycle(self) -> None:
        """Note the cycle's waits, if residency has just ended one."""
        if self._cycles != self._residency.cycles:
            self._cycles = self._residency.cycles
            self._waits.end_cycle()
            self._staging.end_cycle()
            self._pace.end_cycle(self._residency.last_cycle, self._waits, self._transfers)
            self._reporter.end_cycle()

    def _lend(self, blob: int, size_bytes: int) -> tuple[memoryview, Loan]:
        return self._lending.lend(blob, self._residency.slot(blob), size_bytes)

    # Room

    def _place(self, size_bytes: int, group: Group, device: torch.device | None) -> tuple[int, int]:
        """A new blob, and its slot."""
        wait = self._waits.begin()
        try:
            return self.wait_for(self._try_place, size_bytes, group, device, wait)
        finally:
            self._waits.end_save(wait)

    def _try_place(
        self, size_bytes: int, group: Group, device: torch.device | None, wait: Wait
    ) -> tuple[int, int] | None:
        if device is not None and not self._staging.admits(device, size_bytes):
            wait.begin(WaitFor.DEVICE)
            return None
        try:
            blob, instructions = self._residency.try_place(size_bytes, group)
        except (RoomError, ScratchError) as error:
            if not self._may_change(error, wait):
                raise
            blob, instructions = None, []
        self._end_cycle()
        if instructions:
            self._transfers.carry_out(instructions)
        if blob is None:
            wait.begin(WaitFor.ROOM)
            return None
        slot = self._residency.slot(blob)
        if slot + size_bytes > self._arena.backed_bytes:
            self._back(blob, slot + size_bytes)
        return blob, slot

    def _back(self, blob: int, end_bytes: int) -> None:
        try:
            self._arena.back(end_bytes)
        except ArenaFull:
            self._transfers.carry_out(self._residency.abandon(blob))
            raise

    def _try_load(self, blob: int, size_bytes: int, wait: Wait) -> tuple[memoryview, Loan] | None:
        if self._lending.changed(blob):
            raise BlobModified(
                "a tensor loaded from this handle was changed in place and is still alive; "
                "clone() it before changing it, or save it again"
            )
        try:
            ready, instructions = self._residency.load(blob)
        except RoomError as error:
            if not self._may_change(error, wait):
                raise
            ready, instructions = False, []
        self._transfers.carry_out(instructions)
        if ready:
            self._reporter.loaded()
            return self._lend(blob, size_bytes)
        wait.begin(WaitFor.READ)
        return None

    def _may_change(self, error: RoomError | ScratchError, wait: Wait) -> bool:
        """Whether there may be room soon: loans end with copies, and in other threads."""
        if isinstance(error, BlobTooLarge):
            return False
        return self._staging.pending or (isinstance(error, ArenaFull) and not wait.over)
