"""What goes to the disks, counted, and with ``--write-budget`` capped over all clients.

A disk endures so many bytes. A write that would exceed the budget's window is held until enough of
what is in the window has left it, where that takes at most ``MOST_HELD_SECONDS``; else it is
refused at once, and its client keeps the bytes in RAM. Where there is not room for all, those who
wrote least in the window come first, also those who were refused: nobody who came sooner or asks
more often keeps another from the disk.

A write counts from the moment it is handed to the disk, and no more when it was cancelled before a
byte of it moved.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from discod.config import DAY_SECONDS, WriteRate
from discod.loop import Timer
from discod.window import Entry, Window, since_boot
from discod.wire.sizes import format_size

MOST_HELD_SECONDS = 60.0
"""A trainer may stand still for so long; beyond that it is better told than left to wait."""

ROOM_AGAIN = 0.9
"""Of the budget: below that a shortage is over, and the next one worth another line in the log."""

CLAIM_SECONDS = 300.0
"""A client that was refused still wants that room for so long: it tries again with each step."""

SAVES = 256
"""Of the record, while a whole budget is used: what was written is noted a 256th of it ahead."""

NO_LIMIT_BYTES = 1 << 62

_REMEDY = "Raise the daemon's --write-budget (DISCOD_WRITE_BUDGET)"

_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Held:
    """A write that waits for room in the budget."""

    owner: Hashable
    size_bytes: int
    start: Callable[[], None]
    refuse: Callable[[str], None]
    since: float


@dataclass(slots=True)
class _Use:
    """One client's; ``claim`` is what it was last refused, and when.

    ``written`` is the budget's window, and is ``day`` itself where that is as long.
    """

    written: Window
    day: Window
    began: float
    held: deque[Held] = field(default_factory=deque)
    claim: tuple[int, float] = (0, 0.0)


class Writes:
    """All writes of the daemon.

    Args:
        budget: The most that may be written; None for no limit.
        call_later: The loop's; for what is held.
        save: Has the record kept, of which another process can :meth:`restore`; without waiting.
        clock: Seconds since the boot.
    """

    def __init__(
        self,
        budget: WriteRate | None = None,
        call_later: Callable[[float, Callable[[], None]], Timer] | None = None,
        save: Callable[[list[Entry]], None] = lambda entries: None,
        clock: Callable[[], float] = since_boot,
    ) -> None:
        if budget is not None and call_later is None:
            raise ValueError("a budget needs a loop")
        self.budget = budget
        self._call_later = call_later
        self._save = save
        self._clock = clock
        self._limit_bytes = NO_LIMIT_BYTES if budget is None else budget.size_bytes
        self._seconds = DAY_SECONDS if budget is None else budget.seconds
        self._written, self._day = self._windows()
        self._began = clock()
        self._uses: dict[Hashable, _Use] = {}
        self._timer: Timer | None = None
        self._total_bytes = 0
        self._short_since: float | None = None
        self._unsaved_bytes = math.inf

    # The record

    def restore(self, entries: list[Entry]) -> None:
        """Count what an earlier daemon has written."""
        for window in {self._written, self._day}:
            window.restore(entries)
        self._began = min([self._began, *(start for start, _ in self._day.entries())])

    def entries(self) -> list[Entry]:
        """What is in the budget's window."""
        return self._written.entries()

    # Writing

    def admit(
        self,
        owner: Hashable,
        size_bytes: int,
        start: Callable[[], None],
        refuse: Callable[[str], None],
    ) -> Held | None:
        """A client wants to write. One of the two is called, now or later.

        Args:
            owner: The client.
            size_bytes: How much.
            start: The write may go to the disk.
            refuse: It may not; with a text that says why, until when, and what can be done.

        Returns:
            What is held, to :meth:`cancel`; None when it was started or refused.
        """
        if self.budget is None:
            self._count(self._use(owner), size_bytes)
            start()
            return None
        use = self._use(owner)
        held = Held(owner, size_bytes, start, refuse, self._clock())
        if size_bytes > self._limit_bytes:
            refuse(
                f"a write of {format_size(size_bytes)} is more than the write budget of "
                f"{self.budget} ever allows. {_REMEDY}"
            )
            return None
        seconds = self._expected_seconds(use, size_bytes)
        if seconds > MOST_HELD_SECONDS:
            self._short("what is over it stays in RAM while there is room")
            use.claim = size_bytes, self._clock()
            refuse(self._refusal(size_bytes, seconds))
            return None
        use.held.append(held)
        self._serve()
        if held not in use.held:
            return None
        self._short("writes wait for it")
        return held

    def cancel(self, held: Held) -> None:
        """Forget a write that is held; neither of its functions is called."""
        self._uses[held.owner].held.remove(held)
        self._serve()

    def undone(self, owner: Hashable, size_bytes: int) -> None:
        """A write that was started was cancelled before a byte of it moved."""
        use = self._uses.get(owner)
        own = () if use is None else (use.written, use.day)
        for window in {*own, self._written, self._day}:
            window.take_back(size_bytes)
        self._total_bytes -= size_bytes
        self._serve()

    def leave(self, owner: Hashable) -> None:
        """The client is gone, and so is what is held of it."""
        self._uses.pop(owner, None)
        self._serve()

    # What was counted

    def status(self) -> dict[str, int | float | None]:
        """For ``discod status``: see :mod:`discod.status`."""
        budget = self.budget
        held = [one for use in self._uses.values() for one in use.held]
        now = self._clock()
        return {
            "written_bytes": self._total_bytes,
            "written_last_day_bytes": self._day.total_bytes,
            "written_bytes_per_day": _per_day(self._day, now - self._began),
            "write_budget_bytes": budget.size_bytes if budget else None,
            "write_budget_seconds": budget.seconds if budget else None,
            "write_budget_used_bytes": self._written.total_bytes,
            "write_budget_short_seconds": now - (self._short_since or now),
            "write_budget_held": len(held),
            "write_budget_held_bytes": sum(one.size_bytes for one in held),
        }

    def status_of(self, owner: Hashable) -> dict[str, int]:
        """The same of one client, since it attached."""
        use = self._uses.get(owner)
        if use is None:
            return {"written_last_day_bytes": 0, "written_bytes_per_day": 0, "writes_held": 0}
        return {
            "written_last_day_bytes": use.day.total_bytes,
            "written_bytes_per_day": _per_day(use.day, self._clock() - use.began),
            "writes_held": len(use.held),
        }

    # Inside

    def _use(self, owner: Hashable) -> _Use:
        use = self._uses.get(owner)
        if use is None:
            use = self._uses[owner] = _Use(*self._windows(), began=self._clock())
        return use

    def _windows(self) -> tuple[Window, Window]:
        """The budget's, and a day's."""
        day = Window(DAY_SECONDS, self._clock)
        written = day if self._seconds == DAY_SECONDS else Window(self._seconds, self._clock)
        return written, day

    def _count(self, use: _Use, size_bytes: int) -> None:
        now = self._clock()
        use.day.add(size_bytes, now)
        self._day.add(size_bytes, now)
        if self._written is not self._day:
            use.written.add(size_bytes, now)
            self._written.add(size_bytes, now)
        self._total_bytes += size_bytes

    def _start(self, held: Held) -> None:
        use = self._use(held.owner)
        self._count(use, held.size_bytes)
        use.claim = 0, 0.0
        if self.budget is not None:
            self._note(self.budget, held.size_bytes)
        held.start()

    def _note(self, budget: WriteRate, size_bytes: int) -> None:
        """Keep the record ahead of what was written, whenever this process may be killed."""
        self._unsaved_bytes += size_bytes
        ahead = budget.size_bytes // SAVES
        if self._unsaved_bytes >= ahead:
            self._unsaved_bytes = 0
            self._save([*self.entries(), (self._clock(), ahead)])

    def _serve(self) -> None:
        """Start what fits, and look again when more does."""
        if self.budget is None or self._call_later is None:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while (held := self._next()) is not None:
            over = self._over(held.size_bytes + self._claimed_before(self._uses[held.owner]))
            if over <= 0:
                self._uses[held.owner].held.popleft()
                self._start(held)
            elif self._clock() - held.since > MOST_HELD_SECONDS:
                self._uses[held.owner].held.popleft()
                held.refuse(self._refusal(held.size_bytes, self._written.seconds_until_gone(over)))
            else:
                seconds = min(self._written.seconds_until_gone(over), MOST_HELD_SECONDS)
                self._timer = self._call_later(seconds + 0.01, self._serve)
                return
        if self._short_since is not None and (
            self._written.total_bytes < ROOM_AGAIN * self._limit_bytes
        ):
            self._short_since = None
            _log.info("the write budget has room again")

    def _next(self) -> Held | None:
        waiting = [use for use in self._uses.values() if use.held]
        return min(waiting, key=lambda use: use.written.total_bytes).held[0] if waiting else None

    def _over(self, more_bytes: int) -> int:
        """By how much the window would exceed the budget."""
        return self._written.total_bytes + more_bytes - self._limit_bytes

    def _expected_seconds(self, use: _Use, size_bytes: int) -> float:
        """Until a write could go to the disk, after those that are before it."""
        written_bytes = use.written.total_bytes
        before = self._claimed_before(use) + sum(
            held.size_bytes
            for other in self._uses.values()
            if other.written.total_bytes <= written_bytes
            for held in other.held
        )
        over = self._over(before + size_bytes)
        return self._written.seconds_until_gone(over) if over > 0 else 0.0

    def _claimed_before(self, use: _Use) -> int:
        """Room that is kept for those who wrote less and were refused."""
        since = self._clock() - CLAIM_SECONDS
        written_bytes = use.written.total_bytes
        return sum(
            other.claim[0]
            for other in self._uses.values()
            if other.claim[1] > since and other.written.total_bytes < written_bytes
        )

    def _short(self, what: str) -> None:
        if self._short_since is None:
            self._short_since = self._clock()
            _log.warning(
                "the write budget of %s is used up: %s; raise --write-budget "
                "(DISCOD_WRITE_BUDGET), or give the clients larger arenas",
                self.budget,
                what,
            )

    def _refusal(self, size_bytes: int, seconds: float) -> str:
        room = "others, who wrote less, come first"
        if not math.isinf(seconds):
            room = f"has room for {format_size(size_bytes)} more in {_duration(seconds)}"
        return (
            f"the write budget of {self.budget} is used up "
            f"({format_size(self._written.total_bytes)} were written), and {room}. {_REMEDY}"
        )


def _per_day(day: Window, seconds: float) -> int:
    """What a whole day would come to, at the rate of the part of it that has passed."""
    passed = min(max(seconds, 1.0), DAY_SECONDS)
    return int(day.total_bytes * DAY_SECONDS / passed)


def _duration(seconds: float) -> str:
    """For people: the larger unit alone is enough."""
    for unit, length in (("h", 3600.0), ("min", 60.0)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"
